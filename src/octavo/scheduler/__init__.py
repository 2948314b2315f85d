"""The scheduler: chooses the tokens that each step computes. Each line may import only from lines below it; a test
checks this drawing.

assembly                     builds the cache and the scheduler from options
scheduler                    what the engine calls: add, schedule, update, end

composer                     which tokens a step computes: those of streams, then of prompts
beam | speculation           beam search; which drafted tokens a step verifies
acceptance_rates             how likely drafted tokens are right
drafts | draft_model         tokens that may follow, from text that is known, or from a smaller model
admission | stream_turns     which sequences start to run, and who may overtake; turns among streams
step_budget                  what a step may take: time and tokens

lifecycle                    the requests, and the transitions of their sequences between these two:
waiting | kv_limits          lines in order of admission, and waits for a store's blocks; what can ever be served
running | policy             places, with the blocks still to come; the order of service, and what follows from it
preemption | step_time       whether to swap or to recompute; how long a step will take

plan_builder | plan_log      from what was decided to data; recordings of it
plan                         the step as data, and its result
"""
