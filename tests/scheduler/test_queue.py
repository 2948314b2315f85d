"""Who is admitted next, and that nobody waits for ever."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.request import Sequence, SequenceStatus
from octavo.scheduler.lifecycle import SchedulerConfig
from octavo.scheduler.plan import StepResult
from octavo.scheduler.policy import AgeingPriority, FirstComeFirstServed, VirtualTokenCounter
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.waiting import WaitingQueue
from tests.kvcache.caches import make_manager, make_request
from tests.scheduler.kit import Harness

_arrivals = itertools.count(1)


def waiting(prefix: int = 0, tenant: str = "", priority: int = 0) -> Sequence:
    """A sequence that arrives after all before it; `prefix` tokens of it are said to be cached."""
    request = make_request([0] * (prefix + 1))
    request.tenant, request.priority, request.arrival_time = tenant, priority, next(_arrivals)
    return request.sequences[0]


def by_prefix(max_overtakes: int = 4, window: int = 32) -> WaitingQueue:
    """A queue by prefixes, where every token is said to be cached but the last."""
    return WaitingQueue(
        FirstComeFirstServed(), lambda seq: seq.num_tokens - 1, max_overtakes=max_overtakes, window=window
    )


def pop(queue: WaitingQueue) -> Sequence:
    """Admit the next."""
    seq = queue.head()
    assert seq is not None
    queue.admit(seq)
    return seq


def drain(queue: WaitingQueue) -> list[Sequence]:
    return [pop(queue) for _ in range(len(queue))]


@pytest.fixture(params=[FirstComeFirstServed, AgeingPriority, "by prefix", VirtualTokenCounter], ids=str)
def queue(request: pytest.FixtureRequest) -> WaitingQueue:
    return by_prefix() if request.param == "by prefix" else WaitingQueue(request.param())


def test_equal_sequences_leave_in_the_order_of_arrival(queue: WaitingQueue) -> None:
    sequences = [waiting(tenant=tenant) for tenant in "abab"]
    for seq in reversed(sequences):
        queue.push(seq)
    assert len(queue) == 4
    assert drain(queue) == sequences
    assert queue.head() is None


def test_the_more_important_leaves_first(queue: WaitingQueue) -> None:
    late = [waiting(9, priority=1), waiting(priority=0), waiting(priority=-1)]
    for seq in late:
        queue.push(seq)
    assert drain(queue) == late[::-1]


def test_the_first_few_begin_with_the_head_and_name_nobody_twice(queue: WaitingQueue) -> None:
    for tenant in "aabca":
        queue.push(waiting(tenant=tenant))
    for count in range(1, 7):
        first = queue.first(count)
        assert first[0] is queue.head()
        assert len(set(map(id, first))) == len(first) == min(count, 5)


def test_a_discarded_sequence_is_passed_over(queue: WaitingQueue) -> None:
    first, second, third = waiting(), waiting(), waiting()
    for seq in (first, second, third):
        queue.push(seq)
    for seq in (first, third):
        seq.status = SequenceStatus.FINISHED
        queue.discard(seq)
    assert len(queue) == 1
    assert pop(queue) is second
    assert queue.head() is None


def test_a_preempted_sequence_returns_to_its_old_place(queue: WaitingQueue) -> None:
    first, second = waiting(), waiting(9)
    queue.push(first)
    assert pop(queue) is first
    queue.push(second)
    first.num_preemptions = 1
    queue.push(first)
    assert pop(queue) is first


def test_within_a_tenant_the_longest_cached_prefix_leaves_first() -> None:
    queue = by_prefix()
    short, long, middle = waiting(1), waiting(9), waiting(4)
    for seq in (short, long, middle):
        queue.push(seq)
    assert drain(queue) == [long, middle, short]


def test_a_cached_prefix_does_not_put_one_tenant_before_another() -> None:
    queue = by_prefix()
    first, greedy = waiting(0, tenant="a"), [waiting(9, tenant="b") for _ in range(3)]
    for seq in (first, *greedy):
        queue.push(seq)
    assert pop(queue) is first


def test_one_that_was_overtaken_often_enough_is_next() -> None:
    queue = by_prefix(max_overtakes=4)
    unlucky = waiting(0)
    queue.push(unlucky)
    for _ in range(4):
        queue.push(waiting(50))
        assert pop(queue) is not unlucky
    queue.push(waiting(50))
    assert pop(queue) is unlucky


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    line=st.lists(st.tuples(st.integers(0, 5), st.sampled_from("ab")), min_size=1, max_size=12),
    stream=st.lists(st.tuples(st.integers(6, 60), st.sampled_from("ab")), min_size=1, max_size=4),
    max_overtakes=st.integers(0, 6),
    window=st.integers(1, 8),
)
def test_no_request_starves_behind_a_stream_of_better_prefixes(
    line: list[tuple[int, str]], stream: list[tuple[int, str]], max_overtakes: int, window: int
) -> None:
    queue = by_prefix(max_overtakes, window)
    sequences = [waiting(prefix, tenant) for prefix, tenant in line]
    for seq in sequences:
        queue.push(seq)
    adversary = itertools.cycle(stream)
    popped: list[Sequence] = []
    # Every admission is answered by arrivals that would all go first, had they their way.
    for _ in range((len(sequences) + 1) * (max_overtakes + 1) * 2):
        for _ in range(len(stream)):
            queue.push(waiting(*next(adversary)))
        popped.append(pop(queue))
    for tenant in "ab":
        mine = [seq for seq in sequences if seq.request.tenant == tenant]
        served = [seq for seq in popped if seq.request.tenant == tenant]
        for ahead, seq in enumerate(mine):
            assert served.index(seq) < (ahead + 1) * (max_overtakes + 1)


def test_a_stream_of_hits_does_not_keep_a_miss_from_being_served_by_a_whole_scheduler() -> None:
    kv = make_manager(num_blocks=12, block_size=4)
    scheduler = Scheduler(SchedulerConfig(1, 64, max_model_len=40), kv, by_prefix=True)
    popular = list(range(100, 117))

    def add(tokens: list[int]) -> Sequence:
        request = make_request(tokens, max_tokens=1, ignore_eos=True)
        request.arrival_time = next(_arrivals)
        scheduler.add(request)
        return request.sequences[0]

    def step() -> None:
        plan = scheduler.schedule()
        scheduler.update(plan, StepResult((1,) * plan.num_draws))

    add(popular)
    step()
    unlucky, overtakers = add(list(range(9))), []
    for _ in range(40):
        overtakers.append(add(popular))
        step()
        if unlucky.finished:
            break
    assert unlucky.finished
    assert sum(seq.finished for seq in overtakers) == 16
    kv.audit()


def test_with_the_longest_cached_prefix_first_a_batch_over_few_documents_computes_less_of_them() -> None:
    documents = [[100 * number + token for token in range(64)] for number in range(8)]
    order = [documents[number] for number in (*range(8), *range(8), *range(8))]

    def num_computed(*, by_prefix: bool) -> int:
        server = Harness(num_blocks=41, block_size=4, max_num_seqs=1, by_prefix=by_prefix)
        requests = [server.add([*document, 10_000 + k], 1) for k, document in enumerate(order)]
        server.run()
        return sum(len(request.prompt_token_ids) - (request.num_cached_tokens or 0) for request in requests)

    assert num_computed(by_prefix=False) == 24 * 65
    assert num_computed(by_prefix=True) < 24 * 65 // 2
