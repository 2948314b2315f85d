"""Who computes what in each step. Each line may import only what stands below it; a test holds this drawing.

assembly                        builds the cache and the scheduler from options
scheduler                       what the engine calls: add, schedule, update, end

a request's way
results                         applies a step's tokens: plain sampling, or beams
lifecycle | restart             from the waiting line to the end; what a failed step leads to
fetching | pinning              beside the line while stores load its prefix; prefixes to be pinned

a step
parts                           what knows who runs and who waits; a restart replaces all of it
service | ahead                 tokens for running streams, then for prompts; the step after the one in flight
admission                       which sequences start to run, and with how many blocks
backfill | yielding             who may overtake; who gives blocks back
stream_turns                    turns among streams that take too long together, or are too many
latency_target | budget         what a step may take: time and tokens
step_time                       how long a step will take

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
