"""Who computes what in each step. Each line may import only what stands below it; a test holds this drawing.

assembly                        builds the cache and the scheduler from options
scheduler                       what the engine calls: add, schedule, update, end

a step
composer                        which tokens it computes: those of running streams, then of prompts
ahead                           the step after the one in flight
admission                       which sequences start to run, with how many blocks, and who may overtake
stream_turns                    turns among streams that take too long together, or are too many
step_budget | results           what a step may take: time and tokens; what becomes of its tokens
step_time                       how long a step will take

a request's way
lifecycle | fetching            from the waiting line to the end; beside the line while stores load its prefix
preemptor                       who gives blocks back

who waits and who runs
waiting | capacity              lines in order of admission; what can ever be served
kv_limits                       blocks that tenants can always have, and may have
running | policy                with the blocks still to come; the order of service, and what follows from it
preemption | sequences          how preempted sequences resume; questions to a sequence
scheduler_config

the plan
plan_builder | plan_log         from what was decided to data; recordings of it
beam                            which continuations of a beam search survive
plan                            the step as data, and its result
"""
