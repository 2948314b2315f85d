"""How far a sequence has followed its grammar: what `SamplingTable` keeps for it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from octavo.errors import OctavoError, shortened
from octavo.grammar.compiler import ROW_ITEMS, STEP_FUEL, STEP_ITEMS, CompiledGrammar

# Tokens after which a mask is filled though nobody needs it: llguidance counts a lexer's steps from mask to mask.
_MASK_EVERY = 64

Mask = npt.NDArray[np.uint32]
"""[ceil(vocab / 32)], a bit for each token, 32 in a word."""

live_states: WeakSet[GrammarState] = WeakSet()
"""Every state that somebody holds, for tests that none is left behind."""


class GrammarBroken(OctavoError):  # noqa: N818  not raised to callers: the sampler names the request
    """A grammar cannot be followed any further: it has become too complex, or a token does not match it.

    Args:
        said: by llguidance.
        num_tokens: of the output until then.
    """

    def __init__(self, said: str, num_tokens: int) -> None:
        reason = next((limit for words, limit in _LIMITS if words in said), shortened(said.split("\n")[0]))
        super().__init__(f"after {num_tokens} output tokens: {reason}")


_LIMITS = (
    ("Current row has", f"more than {ROW_ITEMS:,} rules of the grammar could go on there, the most allowed"),
    ("Too many items", f"the next token takes more than {STEP_ITEMS:,} items of parsing, the most allowed"),
    ("too many", f"the next token takes more than {STEP_FUEL:,} steps of the lexer, the most allowed"),
)


class MaskInTheMaking(Protocol):
    """A mask that another thread is filling, to which the matcher belongs until then."""

    def result(self) -> Mask | None:
        """Waits for it; None: it could not be filled."""


class GrammarState:
    """The grammar of one sequence after its output so far.

    Made from the tokens alone, on first use: a sequence that was preempted and comes back begins with all it has drawn.
    The matcher is never given an end-of-sequence: nothing follows one, and llguidance does not count it in a rollback.

    Args:
        grammar: may still be compiled.
        token_ids: the sequence's output so far.
    """

    __slots__ = (
        "__weakref__",
        "_compiled",
        "_forces",
        "_grammar",
        "_is_broad",
        "_mask",
        "_matcher",
        "_pending",
        "_since_mask",
        "token_ids",
    )

    def __init__(self, grammar: Future[CompiledGrammar], token_ids: Sequence[int] = ()) -> None:
        self._grammar = grammar
        self._compiled: CompiledGrammar | None = None
        self._matcher: Any = None
        self._forces = True
        self._is_broad: bool | None = None
        self._since_mask = 0
        self._mask: Mask | None = None
        self._pending: MaskInTheMaking | None = None
        self.token_ids = list(token_ids)
        live_states.add(self)

    @property
    def matcher(self) -> Any:
        """llguidance's, after the output so far; waits for the grammar where it is still compiled.

        Raises:
            GrammarBroken: the output does not match the grammar.
        """
        if self._pending is not None:
            self._settle()
        if self._matcher is None:
            grammar = self.compiled
            matcher = (grammar.matcher if self._forces else grammar.without_forcing).deep_copy()
            output = self._without_end(self.token_ids)
            for first in range(0, len(output), _MASK_EVERY):
                if first:
                    matcher.compute_bitmask()
                if not matcher.consume_tokens(output[first : first + _MASK_EVERY]):
                    if self.give_up_forcing():
                        return self.matcher
                    raise GrammarBroken(matcher.get_error(), len(self.token_ids))
            self._matcher = matcher
        return self._matcher

    @property
    def compiled(self) -> CompiledGrammar:
        """The grammar; waits where it is still compiled."""
        # Kept: a future's answer takes a lock, and a draw asks for it several times.
        if self._compiled is None:
            self._compiled = self._grammar.result()
        return self._compiled

    @property
    def is_sound(self) -> bool:
        """Whether the matcher has followed the output so far; else it is made anew when the next mask is due."""
        return self._matcher is not None

    @property
    def mask(self) -> Mask | None:
        """What may come next, where that has been found out; not to be written to."""
        if self._pending is not None:
            self._settle()
        return self._mask

    @property
    def is_broad(self) -> bool:
        """Whether free text may come next: a mask would take long and allow nearly everything.

        It depends on the output so far alone. Where several letters may come next, nothing is forced.

        Raises:
            GrammarBroken: the output does not match the grammar.
        """
        if self._is_broad is None:
            matcher, probes = self.matcher, self.compiled.vocabulary.probes
            self._is_broad = bool(probes) and all(matcher.validate_tokens(probe) for probe in probes)
            if not self._is_broad and matcher.is_error():
                self.failed()
        return self._is_broad

    @property
    def eos_token_id(self) -> int:
        return self.compiled.vocabulary.eos_token_id

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.compiled.vocabulary.eos_token_ids

    def follow(self, first: int, token_ids: Sequence[int]) -> None:
        """Take in output tokens `first ..`; those that it has followed already are passed over.

        A fork draws a token of its own where its parent drew another: what differs is rolled back.
        """
        known = self.token_ids
        agreed = 0
        while agreed < len(token_ids) and first + agreed < len(known) and known[first + agreed] == token_ids[agreed]:
            agreed += 1
        if agreed < len(token_ids):
            self.return_to(first + agreed)
            self._moved()
            self.token_ids += token_ids[agreed:]
            rest = self._without_end(token_ids[agreed:])
            if self._matcher is not None and not self._matcher.consume_tokens(rest):
                self.failed()

    def return_to(self, position: int) -> None:
        """Roll back to the first `position` tokens of the output: what was forced for a parent is not a fork's."""
        if len(self.token_ids) > position:
            self._moved()
            surplus = self._without_end(self.token_ids[position:])
            del self.token_ids[position:]
            if self._matcher is not None and not self._matcher.rollback(len(surplus)):
                self._matcher = None

    def takes(self, token_id: int, *, follow: bool) -> bool:
        """Whether a mask would allow a token where the grammar is broad; with `follow`, such a one is taken in.

        Costs a hundredth of a mask.
        """
        matcher, vocabulary = self.matcher, self.compiled.vocabulary
        if self._since_mask >= _MASK_EVERY:
            matcher.compute_bitmask()
            self._since_mask = 0
        if token_id in vocabulary.eos_token_ids:
            taken = bool(matcher.is_accepting())
        elif not vocabulary.spells(token_id):
            return False
        elif follow:
            taken = matcher.try_consume_tokens([token_id]) == 1
        else:
            taken = matcher.validate_tokens([token_id]) == 1
        if matcher.is_error():
            self.failed()
        elif taken and follow:
            self.drew(token_id)
        return taken

    def drew(self, token_id: int) -> None:
        """A token was drawn; the matcher has been given it, unless it is an end-of-sequence."""
        self._moved()
        self.token_ids.append(token_id)
        self._since_mask += 1

    def keep(self, mask: Mask) -> None:
        """Remember what may come next."""
        self._mask = mask
        self._since_mask = 0

    def keep_later(self, mask: MaskInTheMaking) -> None:
        """Remember a mask that is not filled yet."""
        self._pending = mask

    def _settle(self) -> None:
        pending, self._pending = self._pending, None
        assert pending is not None
        if (mask := pending.result()) is not None:
            self.keep(mask)

    def failed(self) -> None:
        """The matcher refused a token. It is made anew when the next mask is due, which says so if it must."""
        self._matcher = None

    def give_up_forcing(self) -> bool:
        """Go on without looking at what must come next, which may be endless; False: that has been done already."""
        gave_up, self._forces, self._matcher = self._forces, False, None
        return gave_up

    def fork(self) -> GrammarState:
        """A copy, for a forked sequence."""
        child = GrammarState(self._grammar, self.token_ids)
        child._mask = self.mask
        child._forces, child._is_broad, child._since_mask = self._forces, self._is_broad, self._since_mask
        if self._matcher is not None:
            child._matcher = self._matcher.deep_copy()
        return child

    def _moved(self) -> None:
        if self._pending is not None:
            self._settle()
        self._is_broad = self._mask = None

    def _without_end(self, token_ids: Sequence[int]) -> list[int]:
        eos_token_ids = self.eos_token_ids
        return [token_id for token_id in token_ids if token_id not in eos_token_ids]
