"""The state of a sequence's grammar, which the runner keeps (`runner/sequences.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from octavo.errors import OctavoError, shortened
from octavo.grammar.bounded_matcher import ROW_ITEMS, STEP_FUEL, STEP_ITEMS
from octavo.grammar.compiler import CompiledGrammar

# A mask is computed after this many tokens even if it is not needed, because llguidance counts the lexer's steps from
# mask to mask.
_MASK_EVERY = 64

Mask = npt.NDArray[np.uint32]
"""[ceil(vocab / 32)], one bit per token, 32 per word."""

live_states: WeakSet[GrammarState] = WeakSet()
"""All states that are referenced, for tests that none is leaked."""


class GrammarBroken(OctavoError):  # noqa: N818  not raised to callers: the sampler names the request
    """A grammar cannot be followed any further: it has become too complex, or a token does not match it.

    Args:
        said: llguidance's message.
        num_tokens: number of output tokens up to that point.
    """

    def __init__(self, said: str, num_tokens: int) -> None:
        reason = next((limit for words, limit in _LIMITS if words in said), shortened(said.split("\n")[0]))
        super().__init__(f"after {num_tokens} output tokens: {reason}")


_LIMITS = (
    ("Current row has", f"more than {ROW_ITEMS:,} rules of the grammar could go on there, the most allowed"),
    ("Too many items", f"the next token takes more than {STEP_ITEMS:,} items of parsing, the most allowed"),
    ("too many", f"the next token takes more than {STEP_FUEL:,} steps of the lexer, the most allowed"),
)


class GrammarFinding(NamedTuple):
    """Results computed for the state of a grammar.

    Attributes:
        is_followed: whether the matcher has followed the output.
        in_free_text: like `GrammarState.in_free_text`; None if it was not determined.
        mask: the tokens that may come next, outside free text; None if it could not be computed.
    """

    is_followed: bool
    in_free_text: bool | None
    mask: Mask | None = None


class PendingFindings:
    """Results that another thread is computing for several states; waits for it once."""

    __slots__ = ("_found", "_future")

    def __init__(self, future: Future[list[GrammarFinding]]) -> None:
        self._future = future
        self._found: list[GrammarFinding] | None = None

    def __getitem__(self, place: int) -> GrammarFinding:
        # Kept, because a future's result takes a lock, and a step asks for that of every state.
        if self._found is None:
            self._found = self._future.result()
        return self._found[place]


def allows_free_text(matcher: Any, probes: Sequence[list[int]]) -> bool:
    """Return whether free text may come next, by `Vocabulary.probes`; the matcher may be in error afterwards."""
    return bool(probes) and all(matcher.validate_tokens(probe) for probe in probes)


class GrammarState:
    """The grammar of one sequence after its output so far.

    The matcher is made from the tokens alone, on first use, so that a preempted sequence can resume with all tokens
    that it has drawn. The matcher is never given an end-of-sequence token: nothing follows one, and llguidance does not
    count it in a rollback.

    Args:
        grammar: the grammar, which may still be compiling.
        token_ids: the sequence's output so far.
    """

    __slots__ = (
        "__weakref__",
        "_compiled",
        "_forces",
        "_grammar",
        "_in_free_text",
        "_mask",
        "_matcher",
        "_pending",
        "_place",
        "_since_mask",
        "token_ids",
    )

    def __init__(self, grammar: Future[CompiledGrammar], token_ids: Sequence[int] = ()) -> None:
        self._grammar = grammar
        self._compiled: CompiledGrammar | None = None
        self._matcher: Any = None
        self._forces = True
        self._in_free_text: bool | None = None
        self._since_mask = 0
        self._mask: Mask | None = None
        # Findings of another thread about several states, and this state's place among them. Until they are ready, the
        # matcher belongs to that thread.
        self._pending: PendingFindings | list[GrammarFinding] | None = None
        self._place = 0
        self.token_ids = list(token_ids)
        live_states.add(self)

    @property
    def matcher(self) -> Any:
        """llguidance's matcher after the output so far; waits for the grammar if it is still being compiled.

        Raises:
            GrammarBroken: the output does not match the grammar.
        """
        if self._pending is not None:
            self._take_findings()
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
        """The compiled grammar; waits if it is still being compiled."""
        # Cached, because a future's result takes a lock, and each draw needs it several times.
        if self._compiled is None:
            self._compiled = self._grammar.result()
        return self._compiled

    @property
    def is_valid(self) -> bool:
        """Whether the matcher has followed the output so far; otherwise it is rebuilt when the next mask is due."""
        return self._matcher is not None

    @property
    def mask(self) -> Mask | None:
        """The tokens that may come next, or None if not known; read-only."""
        if self._pending is not None:
            self._take_findings()
        return self._mask

    @property
    def in_free_text(self) -> bool:
        """Whether free text may come next, so that a mask would take long and allow nearly everything.

        Depends only on the output so far. If several letters may come next, nothing is forced.

        Raises:
            GrammarBroken: the output does not match the grammar.
        """
        if self._pending is not None:
            self._take_findings()
        if self._in_free_text is None:
            matcher = self.matcher
            self._in_free_text = allows_free_text(matcher, self.compiled.vocabulary.probes)
            if not self._in_free_text and matcher.is_error():
                self.failed()
        return self._in_free_text

    @property
    def eos_token_id(self) -> int:
        return self.compiled.vocabulary.eos_token_id

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.compiled.vocabulary.eos_token_ids

    def follow(self, first: int, token_ids: Sequence[int]) -> None:
        """Follow the output tokens from `first` on, skipping those already followed.

        If a fork drew another token than its parent, the tokens that differ are rolled back.
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
        """Roll back to the first `position` tokens of the output, because a fork does not inherit forced tokens."""
        if len(self.token_ids) > position:
            self._moved()
            surplus = self._without_end(self.token_ids[position:])
            del self.token_ids[position:]
            if self._matcher is not None and not self._matcher.rollback(len(surplus)):
                self._matcher = None

    def takes(self, token_id: int, *, follow: bool) -> bool:
        """Return whether a mask would allow a token in free text; with `follow`, advance by the token if so.

        This takes a hundredth of the time of a mask.
        """
        matcher, vocabulary = self.matcher, self.compiled.vocabulary
        if self._since_mask >= _MASK_EVERY:
            matcher.compute_bitmask()
            self._since_mask = 0
        if token_id in vocabulary.eos_token_ids:
            taken = bool(matcher.is_accepting())
        elif not vocabulary.spelling(token_id):
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

    def follow_draft(self, token_id: int) -> bool:
        """Follow a token that may be drawn next; False, without following, if it ends the output or is refused."""
        if token_id in self.eos_token_ids:
            return False
        try:
            return self.takes(token_id, follow=True)
        except GrammarBroken:
            return False  # reported when it draws

    def drew(self, token_id: int) -> None:
        """Record a drawn token, which the matcher has consumed unless it is an end-of-sequence token."""
        self._moved()
        self.token_ids.append(token_id)
        self._since_mask += 1

    def keep(self, mask: Mask) -> None:
        """Keep the mask of the tokens that may come next."""
        self._mask = mask
        self._since_mask = 0

    def find_later(self, findings: PendingFindings | list[GrammarFinding], place: int) -> None:
        """Take what was found out about what may come next; if it is pending, the matcher belongs to another thread."""
        self._pending, self._place = findings, place

    def _take_findings(self) -> None:
        pending, self._pending = self._pending, None
        assert pending is not None
        found = pending[self._place]
        if not found.is_followed:
            self.failed()
            return
        self._in_free_text = found.in_free_text
        if found.mask is not None:
            self.keep(found.mask)

    def failed(self) -> None:
        """Record that the matcher refused a token; it is rebuilt, and may report that, when the next mask is due."""
        self._matcher = None

    def give_up_forcing(self) -> bool:
        """Stop looking for forced tokens, which may never end; return False if that was done before."""
        gave_up, self._forces, self._matcher = self._forces, False, None
        return gave_up

    def fork(self) -> GrammarState:
        """Return a copy, for a forked sequence."""
        child = GrammarState(self._grammar, self.token_ids)
        child._mask = self.mask
        child._forces, child._in_free_text, child._since_mask = self._forces, self._in_free_text, self._since_mask
        if self._matcher is not None:
            child._matcher = self._matcher.deep_copy()
        return child

    def _moved(self) -> None:
        if self._pending is not None:
            self._take_findings()
        self._in_free_text = self._mask = None

    def _without_end(self, token_ids: Sequence[int]) -> list[int]:
        eos_token_ids = self.eos_token_ids
        return [token_id for token_id in token_ids if token_id not in eos_token_ids]
