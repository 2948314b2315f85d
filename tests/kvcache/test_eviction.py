"""What every eviction policy promises, and what each claims for itself."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Iterable
from typing import cast

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.kvcache.block import BlockId
from octavo.kvcache.eviction import (
    EVICTION_POLICIES,
    AdaptiveEviction,
    EvictionPolicy,
    make_eviction_policy,
)
from octavo.kvcache.eviction.adaptive import GhostList, ReturnRates
from octavo.kvcache.eviction.policies import RankedEviction
from octavo.kvcache.hashing import key_prefix

NAMES = sorted(EVICTION_POLICIES)


def hold(policy: EvictionPolicy, *blocks: int, priority: int = 0) -> None:
    """Publish the blocks as those of one sequence, and give them up from its tail."""
    for block in reversed(blocks):
        policy.publish(BlockId(block), priority)
    policy.add([BlockId(block) for block in reversed(blocks)])


def use(policy: EvictionPolicy, *blocks: int, priority: int = 0) -> None:
    """A request hits the blocks and ends."""
    policy.remove([BlockId(block) for block in blocks])
    policy.hit([BlockId(block) for block in blocks], priority)
    policy.add([BlockId(block) for block in reversed(blocks)])


def make(name: str, num_blocks: int = 600) -> EvictionPolicy:
    policy = make_eviction_policy(name)
    policy.reserve(num_blocks)
    return policy


def make_adaptive(num_blocks: int) -> AdaptiveEviction:
    policy = AdaptiveEviction()
    policy.reserve(num_blocks)
    return policy


def evict(policy: EvictionPolicy) -> BlockId:
    (victim,) = policy.evict(1)
    return victim


def evict_all(policy: EvictionPolicy) -> list[int]:
    return [evict(policy) for _ in range(len(policy))]


@pytest.fixture(params=NAMES)
def policy(request: pytest.FixtureRequest) -> EvictionPolicy:
    return make(request.param)


def test_an_added_block_is_held_until_it_is_removed_or_evicted(policy: EvictionPolicy) -> None:
    hold(policy, 3, 4, 5)
    assert len(policy) == 3
    assert sorted(policy) == [3, 4, 5]
    policy.remove([BlockId(4)])
    assert BlockId(4) not in policy
    assert sorted(evict_all(policy)) == [3, 5]
    assert len(policy) == 0


def test_evicting_from_nothing_and_removing_a_stranger_raise(policy: EvictionPolicy) -> None:
    with pytest.raises(KeyError):
        evict(policy)
    with pytest.raises(KeyError):
        policy.remove([BlockId(1)])


def test_untouched_sequences_leave_tail_first_and_the_older_one_first(policy: EvictionPolicy) -> None:
    hold(policy, 1, 2, 3)
    hold(policy, 4, 5, 6)
    order = evict_all(policy)
    assert [block for block in order if block < 4] == [3, 2, 1]
    assert [block for block in order if block > 3] == [6, 5, 4]
    assert order.index(3) < order.index(6)


@pytest.mark.parametrize("name", NAMES)
def test_evicting_many_at_once_is_as_evicting_them_one_by_one(name: str) -> None:
    rng = random.Random(0)
    together, alone = make(name), make(name)
    free, keys = [*range(599, 0, -1)], itertools.count(1)
    for _ in range(300):
        count = rng.choice([1, 2, 30, 70])
        if len(free) < count:
            wanted = min(len(alone), rng.choice([1, 2, 5, 80]))
            victims = together.evict(wanted)
            assert victims == [evict(alone) for _ in range(wanted)]
            free.extend(victims)
            continue
        blocks = [free.pop() for _ in range(count)]
        again = rng.sample(sorted(alone), min(len(alone), rng.randrange(20)))
        # Some of the keys are those of blocks that were evicted before.
        named = [(block, max(1, next(keys) - rng.choice([0, 500]))) for block in blocks]
        priority = rng.randrange(3)
        for policy in (together, alone):
            for block, key in named:
                policy.publish(BlockId(block), priority, key.to_bytes(16, "little"))
            use(policy, *again, priority=priority)
            policy.add([BlockId(block) for block in blocks])
    with pytest.raises(KeyError):
        together.evict(len(together) + 1)
    assert evict_all(together) == evict_all(alone)
    with pytest.raises(KeyError):
        together.evict(1)


def test_a_block_published_anew_has_no_past(policy: EvictionPolicy) -> None:
    hold(policy, 1, priority=-5)
    for _ in range(9):
        use(policy, 1, priority=-5)
    assert evict(policy) == 1
    hold(policy, 1)
    for _ in range(3):
        hold(policy, 2)
        use(policy, 2, priority=-1)
        assert evict(policy) == 1
        hold(policy, 1)
        policy.remove([BlockId(2)])


@pytest.mark.parametrize("name", NAMES)
def test_a_policys_memory_does_not_grow_with_traffic(name: str) -> None:
    policy = make(name)
    hold(policy, *range(1, 50))
    for _ in range(2000):
        use(policy, 7, 8, 9)
    if isinstance(policy, RankedEviction):
        assert len(policy._heap) <= 49 + 49 // 8 + 64
    assert len(policy) == 49


@pytest.mark.parametrize("name", NAMES)
def test_an_array_of_blocks_comes_and_goes_as_a_list_and_as_one_by_one(name: str) -> None:
    rng = random.Random(0)
    arrays, lists, alone = policies = [make(name) for _ in range(3)]
    for many in (300, 20, 3, 200):
        for each in policies:
            for block in range(1, 301):
                if BlockId(block) not in each:
                    each.publish(BlockId(block), 0)
        ids = rng.sample([BlockId(b) for b in range(1, 301) if BlockId(b) not in arrays], many)
        gone = rng.sample(ids, many // 2)
        arrays.add(np.array(ids, np.int32))
        lists.add(ids)
        for block in ids:
            alone.add([block])
        arrays.remove(np.array(gone, np.int32))
        lists.remove(gone)
        for block in gone:
            alone.remove([block])
        arrays.hit(np.array(gone, np.int32), 0)
        for each in (lists, alone):
            each.hit(gone, 0)
        again = gone[::2]  # rest a second time, now as blocks that were hit
        arrays.add(np.array(again, np.int32))
        lists.add(again)
        for block in again:
            alone.add([block])
        victims = [evict(alone) for _ in range(many // 3)]
        assert arrays.evict(many // 3) == lists.evict(many // 3) == victims
        kept = list(alone)
        assert set(arrays) == set(lists) == set(kept)
        for each in policies:
            each.remove(np.array(kept, np.int32))
            with pytest.raises(KeyError):
                each.remove(np.array(kept[-1:], np.int32))
    assert [len(each) for each in policies] == [0, 0, 0]


def test_lru_gives_up_what_was_used_longest_ago() -> None:
    policy = make("lru")
    hold(policy, 1)
    hold(policy, 2)
    use(policy, 1)
    assert evict_all(policy) == [2, 1]


def test_fifo_gives_up_what_was_published_first_however_often_it_is_used() -> None:
    policy = make("fifo")
    hold(policy, 1)
    hold(policy, 2)
    for _ in range(5):
        use(policy, 1)
    assert evict_all(policy) == [1, 2]


def test_priority_protects_the_blocks_of_important_requests() -> None:
    policy = make("priority")
    hold(policy, 1, priority=-1)
    hold(policy, 2, priority=5)
    hold(policy, 3, priority=0)
    use(policy, 2, priority=5)
    assert evict_all(policy) == [2, 3, 1]


def test_a_hit_by_an_important_request_protects_a_block_from_then_on() -> None:
    policy = make("priority")
    hold(policy, 1, priority=5)
    hold(policy, 2, priority=0)
    use(policy, 1, priority=-1)
    use(policy, 1, priority=9)
    assert evict_all(policy) == [2, 1]


def replay(policy: EvictionPolicy, references: Iterable[int], pool: int) -> float:
    """Share of references that a pool of single blocks finds."""
    places: dict[int, int] = {}
    keys: dict[int, int] = {}
    hits = total = 0
    for reference in references:
        total += 1
        block = places.get(reference)
        if block is not None:
            hits += 1
            policy.remove([BlockId(block)])
            policy.hit([BlockId(block)], 0)
        else:
            block = len(places) + 1 if len(places) < pool else evict(policy)
            places.pop(keys.get(block, -1), None)
            policy.publish(BlockId(block), 0, reference.to_bytes(16, "little"))
            places[reference], keys[block] = block, reference
        policy.add([BlockId(block)])
    return hits / total


def test_adaptive_keeps_what_comes_back_from_a_flood_of_what_does_not() -> None:
    rng, strangers = random.Random(0), itertools.count(1000)
    references = [rng.randrange(150) if rng.random() < 0.3 else next(strangers) for _ in range(8000)]
    assert replay(make("lru", 101), references, 100) < 0.10
    assert replay(make("adaptive", 101), references, 100) > 0.15


def test_adaptive_gives_up_old_conversations_as_lru_does() -> None:
    """Everything comes back twice, soon, and then never: what was used once is worth more than what was used often."""
    references = [x for i in range(3000) for x in (i, i - 40, i - 80) if x >= 0]
    lru = replay(make("lru", 101), references, 100)
    assert replay(make("adaptive", 101), references, 100) >= lru - 0.005


def replay_prompts(policy: EvictionPolicy, prompts: Iterable[list[int]], pool: int) -> float:
    """Share of references that a pool finds where a block counts only with all those before it."""
    places: dict[int, int] = {}
    keys: dict[int, int] = {}
    free = list(range(pool, 0, -1))
    hits = total = 0
    for prompt in prompts:
        held = [BlockId(places[key]) for key in itertools.takewhile(places.__contains__, prompt)]
        for block in held:
            policy.remove([block])
        policy.hit(held, 0)
        hits, total = hits + len(held), total + len(prompt)
        for position in range(len(held), len(prompt)):
            key = prompt[position]
            if key in places:  # behind a block that is gone
                continue
            block = BlockId(free.pop() if free else evict(policy))
            places.pop(keys.get(block, -1), None)
            places[key], keys[block] = block, key
            policy.publish(block, 0, key.to_bytes(16, "little"))
            held.append(block)
        for block in reversed(held):
            policy.add([block])
    return hits / total


@pytest.mark.slow
def test_adaptive_keeps_prefixes_whole_where_all_conversations_return_alike() -> None:
    rng, tokens = random.Random(0), itertools.count()
    live: list[list[int]] = [[] for _ in range(40)]
    prompts = []
    for _ in range(1500):
        which = rng.randrange(len(live))
        if len(live[which]) > 40:
            live[which] = []
        live[which] = live[which] + [next(tokens) for _ in range(rng.randint(1, 4))]
        prompts.append(live[which])
    lru = replay_prompts(make("lru", 261), prompts, 260)
    assert 0.1 < lru < 0.7
    assert replay_prompts(make("adaptive", 261), prompts, 260) >= lru - 0.005


def test_rests_that_ended_are_counted_by_class_and_age() -> None:
    rng, now, rates = random.Random(0), 5000, ReturnRates(100, 1000)
    returned, lost = ([(rng.randrange(2), rng.randrange(1, 1000)) for _ in range(99)] for _ in range(2))
    rates.note_returned([2 * age - kind for kind, age in returned])
    rates.note_lost([2 * (now - age) + kind for kind, age in lost], now)
    rates._count_noted()
    for rests, counts in ((returned, rates._returns), (returned + lost, rates._ends)):
        expected = np.zeros_like(counts)
        for kind, age in rests:
            expected[kind, max(i for i, edge in enumerate(rates._edges) if edge <= age)] += 1
        assert (counts == expected).all()


def test_adaptive_follows_when_what_comes_back_changes() -> None:
    rng, strangers = random.Random(0), itertools.count(10_000)
    references = [rng.randrange(80) + i // 6000 * 1000 if rng.random() < 0.4 else next(strangers) for i in range(18000)]
    assert replay(make("adaptive", 101), references, 100) > 1.3 * replay(make("lru", 101), references, 100)


def test_adaptive_begins_with_the_least_recently_used_and_of_equals_with_those_used_once() -> None:
    policy = make_adaptive(4)
    policy.publish(BlockId(1), 0)
    policy.hit([BlockId(1)], 0)
    policy.add([BlockId(1)])
    policy.publish(BlockId(2), 0)
    policy.add([BlockId(2)])
    assert evict_all(policy) == [1, 2]
    for block in (1, 2, 3):
        policy.publish(BlockId(block), 0)
    policy.hit([BlockId(1)], 0)
    policy.add([BlockId(block) for block in (1, 2, 3)])
    assert evict_all(policy) == [2, 3, 1]


def test_adaptive_counts_many_hits_at_once_as_it_does_one_by_one() -> None:
    together, alone = make_adaptive(102), make_adaptive(102)
    blocks = [BlockId(block) for block in range(1, 101)]
    for policy in (together, alone):
        hold(policy, *blocks)
        for number in range(20):  # so that it has begun to count
            victim = evict(policy)
            policy.publish(victim, 0, (number + 1).to_bytes(16, "little"))
            policy.add([victim])
    together.hit(np.array(blocks), 0)
    for block in blocks:
        alone.hit([block], 0)
    assert together._model is not None
    assert alone._model is not None
    for model in (together._model, alone._model):
        model._count_noted()
    assert together._model._returns.sum() == 100
    assert (together._model._returns == alone._model._returns).all()
    assert (together._model._ends == alone._model._ends).all()
    assert together._stamps == alone._stamps
    assert together._kinds == alone._kinds


@pytest.mark.parametrize("blocks", [80, 10_000])
def test_adaptive_chooses_as_before_when_its_stamps_begin_anew(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    rng = random.Random(0)
    references = [rng.randrange(80) if rng.random() < 0.5 else rng.randrange(blocks) for _ in range(5000)]
    plain = replay(make("adaptive", 101), references, 100)
    monkeypatch.setattr("octavo.kvcache.eviction.adaptive._STAMPS", (1 << 13) - 1)
    policy = make_adaptive(101)
    policy._clock = 6000
    assert replay(policy, references, 100) == plain
    assert policy._clock > 1 << 13


def test_a_ghost_takes_20_bytes_and_is_found_once() -> None:
    ghosts = GhostList(4)
    assert GhostList.BYTES_EACH == 20
    index = ghosts._index
    values = cast("array[int]", ghosts._values)
    held = sum(len(a) * a.itemsize for a in (values, index._heads, index._after, index._keys))
    assert held == 4 * GhostList.BYTES_EACH + 4 + 8  # the places of no key
    assert ghosts.add([key_prefix(bytes([i]) * 16) for i in range(4)], [20, 21, 22, 23]) == []
    assert ghosts.add([key_prefix(b"x" * 16)], [40]) == [20]
    assert ghosts.take(bytes([1]) * 16) == 21
    assert ghosts.take(bytes([1]) * 16) is None
    assert ghosts.add([key_prefix(b"y" * 16)], [42]) == []
    assert len(ghosts) == 4


def test_ghosts_added_at_once_are_those_added_one_by_one() -> None:
    rng = random.Random(0)
    together, alone = GhostList(20), GhostList(20)
    for number in range(60):
        keys = [rng.randrange(40).to_bytes(16, "little") for _ in range(rng.choice([0, 1, 5, 20, 45]))]
        uses = [number << 1 | rng.randrange(2) for _ in keys]
        together.add([key_prefix(key) for key in keys], uses)
        for key, use in zip(keys, uses, strict=True):
            alone.add([key_prefix(key)], [use])
        taken = rng.randrange(40).to_bytes(16, "little")
        assert together.take(taken) == alone.take(taken)
        assert len(together) == len(alone)
    assert list(together.check()) == []
    known = [key.to_bytes(16, "little") for key in range(40)]
    assert [together.take(key) for key in known] == [alone.take(key) for key in known]


class PolicyMachine(RuleBasedStateMachine):
    """A policy beside a plain set: it holds exactly what it was given, whatever the order."""

    @initialize(name=st.sampled_from(NAMES))
    def build(self, name: str) -> None:
        self.policy = make(name, 13)
        self.held: set[BlockId] = set()
        self.active: set[BlockId] = set()

    @rule(block=st.integers(1, 12), priority=st.integers(-2, 2))
    def publish(self, block: int, priority: int) -> None:
        if block not in self.held:
            self.policy.publish(BlockId(block), priority)
            self.active.add(BlockId(block))

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.active)))
        self.policy.add([block])
        self.active.remove(block)
        self.held.add(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), priority=st.integers(-2, 2))
    def reuse(self, data: st.DataObject, priority: int) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        self.policy.remove([block])
        self.policy.hit([block], priority)
        self.held.remove(block)
        self.active.add(block)

    @precondition(lambda self: self.held)
    @rule()
    def evict(self) -> None:
        self.held.remove(*self.policy.evict(1))

    @invariant()
    def it_holds_what_it_was_given(self) -> None:
        if hasattr(self, "policy"):
            assert set(self.policy) == self.held
            assert len(self.policy) == len(self.held)


PolicyMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestPolicyMachine = pytest.mark.slow(PolicyMachine.TestCase)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_is_that_of_a_list_sorted_by_rank_and_age(name: str) -> None:
    """Against an oracle that knows nothing of heaps."""
    policy, rng = make(name), random.Random(0)
    published: dict[int, int] = {}
    priority: dict[int, int] = {}
    last: dict[int, int] = {}
    rank = {
        "lru": lambda b: last[b],
        "fifo": lambda b: published[b],
        "priority": lambda b: (-priority[b], last[b]),
        "adaptive": lambda b: last[b],  # before it has seen anything come back
    }[name]
    for now in range(400):
        block = rng.randrange(1, 40)
        if block in published:
            importance = rng.randrange(-3, 3)
            use(policy, block, priority=importance)
            priority[block] = min(priority[block], importance)
        else:
            hold(policy, block)
            published[block], priority[block] = now, 0
        last[block] = now
    assert evict_all(policy) == sorted(published, key=rank)  # type: ignore[arg-type]
