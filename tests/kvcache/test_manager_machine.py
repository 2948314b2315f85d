"""A state machine drives pool, tables, forks and prefix cache at random; after each step `audit()` and a model agree.

The model keeps for every block what was written into it, and follows copies: a block that is shared by mistake, handed
out while in use or found for the wrong prefix shows as a sequence reading another's tokens.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from octavo.kvcache.block import NULL_BLOCK, BlockId
from octavo.request import Sequence
from tests.kvcache.caches import FULL, make_manager, make_sequence, sliding

LAYERS = [(FULL,), (sliding(5),), (FULL, sliding(3)), (FULL, sliding(6), sliding(6))]


class CacheMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")

    @initialize(
        num_blocks=st.integers(2, 24),
        block_size=st.sampled_from([1, 2, 4]),
        layers=st.sampled_from(LAYERS),
        caching=st.booleans(),
    )
    def build(self, num_blocks: int, block_size: int, layers: tuple, caching: bool) -> None:
        self.manager = make_manager(num_blocks, block_size, layers, caching)
        self.block_size = block_size
        self.written: dict[tuple[BlockId, int], tuple[int, tuple[int, ...]]] = {}
        self.live: set[Sequence] = set()

    def write(self, seq: Sequence, count: int) -> None:
        """What the runner does: store each new token, with all before it, at its slot."""
        for position in range(seq.num_computed, seq.num_computed + count):
            for group, table in enumerate(self.manager.tables(seq)):
                block = table[position // self.block_size]
                self.written[block, position % self.block_size] = (group, tuple(seq.token_ids[: position + 1]))
        seq.num_computed += count
        self.manager.commit(seq)

    @rule(target=sequences, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20), salt=st.sampled_from("ab"))
    def arrive(self, tokens: list[int], salt: str) -> Sequence:
        return make_sequence(tokens, salt)

    @rule(seq=sequences, chunk=st.integers(1, 20))
    def admit(self, seq: Sequence, chunk: int) -> None:
        if seq in self.live or seq.finished:
            return
        hit = self.manager.match(seq)
        chunk = min(chunk, seq.num_tokens - hit.num_tokens)
        if self.manager.admit(seq, hit, chunk):
            self.live.add(seq)
            seq.num_computed = hit.num_tokens
            self.write(seq, chunk)

    @rule(seq=sequences, token=st.integers(0, 1), chunk=st.integers(1, 6))
    def compute(self, seq: Sequence, token: int, chunk: int) -> None:
        if seq not in self.live:
            return
        if seq.num_computed == seq.num_tokens:
            seq.token_ids.append(token)
        chunk = min(chunk, seq.num_tokens - seq.num_computed)
        copies = self.manager.extend(seq, chunk)
        if copies is None:
            return
        for copy in copies:
            for offset in range(self.block_size):
                if (copy.source, offset) in self.written:
                    self.written[copy.destination, offset] = self.written[copy.source, offset]
        self.write(seq, chunk)

    @rule(target=sequences, parent=sequences)
    def fork(self, parent: Sequence) -> Sequence:
        child = make_sequence(list(parent.token_ids), parent.request.cache_salt)
        if parent in self.live:
            self.manager.fork(parent, child)
            child.num_computed = parent.num_computed
            self.live.add(child)
        return child

    @rule(seq=sequences)
    def preempt(self, seq: Sequence) -> None:
        if seq in self.live:
            self.manager.release(seq)
            seq.num_computed = 0
            self.live.discard(seq)

    @rule(seq=consumes(sequences))
    def finish(self, seq: Sequence) -> None:
        self.manager.forget(seq)
        self.live.discard(seq)

    @rule()
    def reset(self) -> None:
        self.manager.reset_prefix_cache()

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        if hasattr(self, "manager"):
            self.manager.audit()

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for seq in getattr(self, "live", ()):
            for group, table in enumerate(self.manager.tables(seq)):
                window = self.manager.spec.groups[group].sliding_window
                first = 0 if window is None else max(0, seq.num_computed - window + 1)
                for position in range(first, seq.num_computed):
                    block = table[position // self.block_size]
                    found = self.written[block, position % self.block_size]
                    expected = (group, tuple(seq.token_ids[: position + 1]))
                    if block == NULL_BLOCK or found != expected:
                        raise AssertionError(f"position {position} of {seq.token_ids}: block {block} holds {found}")


CacheMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=80, deadline=None)
TestCacheMachine = CacheMachine.TestCase
