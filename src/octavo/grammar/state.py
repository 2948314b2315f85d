"""How far a sequence has followed its grammar: what `SamplingTable` keeps for it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any
from weakref import WeakSet

from octavo.errors import OctavoError
from octavo.grammar.compiler import CompiledGrammar

# Tokens that follow one drawn token at once. A grammar may force thousands: the rest follow the next one.
MOST_FORCED = 32

live_states: WeakSet[GrammarState] = WeakSet()
"""Every state that somebody holds, for tests that none is left behind."""


class GrammarBroken(OctavoError):  # noqa: N818  not raised to callers: the sampler names the request
    """A grammar cannot be followed any further: it has become too complex, or a token does not match it."""


class GrammarState:
    """The grammar of one sequence after its output so far.

    Made from the tokens alone, on first use: a sequence that was preempted and comes back begins with all it has drawn.
    The matcher is never given an end-of-sequence: nothing follows one, and llguidance does not count it in a rollback.

    Args:
        grammar: may still be compiled.
        token_ids: the sequence's output so far.
    """

    __slots__ = ("__weakref__", "_forces", "_grammar", "_matcher", "token_ids")

    def __init__(self, grammar: Future[CompiledGrammar], token_ids: Sequence[int] = ()) -> None:
        self._grammar = grammar
        self._matcher: Any = None
        self._forces = True
        self.token_ids = list(token_ids)
        live_states.add(self)

    @property
    def matcher(self) -> Any:
        """llguidance's, after the output so far; waits for the grammar where it is still compiled.

        Raises:
            GrammarBroken: the output does not match the grammar.
        """
        if self._matcher is None:
            grammar = self._grammar.result()
            matcher = (grammar.matcher if self._forces else grammar.without_forcing).deep_copy()
            if self.token_ids and not matcher.consume_tokens(self._without_end(self.token_ids)):
                if self.give_up_forcing():
                    return self.matcher
                raise GrammarBroken(matcher.get_error())
            self._matcher = matcher
        return self._matcher

    @property
    def eos_token_id(self) -> int:
        return self._grammar.result().eos_token_id

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._grammar.result().eos_token_ids

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
            self.token_ids += token_ids[agreed:]
            rest = self._without_end(token_ids[agreed:])
            if self._matcher is not None and not self._matcher.consume_tokens(rest):
                self.failed()

    def return_to(self, position: int) -> None:
        """Roll back to the first `position` tokens of the output: what was forced for a parent is not a fork's."""
        if len(self.token_ids) > position:
            surplus = self._without_end(self.token_ids[position:])
            del self.token_ids[position:]
            if self._matcher is not None and not self._matcher.rollback(len(surplus)):
                self._matcher = None

    def drew(self, token_id: int) -> None:
        """A token was drawn; the matcher has been given it, unless it is an end-of-sequence."""
        self.token_ids.append(token_id)

    def failed(self) -> None:
        """The matcher refused a token. It is made anew when the next mask is due, which says so if it must."""
        self._matcher = None

    def force(self, most: int) -> list[int]:
        """Take in the tokens that must come next, one way only, and return them.

        Each is the one token that a mask would have allowed in its place.
        """
        matcher = self.matcher
        forced: list[int] = []
        for _ in range(min(most, MOST_FORCED)):
            following = [self.eos_token_id] if matcher.is_stopped() else matcher.compute_ff_tokens()
            # One at a time: what is forced after a token is not always what was foreseen before it.
            forced += following[:1]
            if not following or following[0] in self.eos_token_ids:
                break
            if not matcher.consume_token(following[0]):
                self.failed()
                break
        self.token_ids += forced
        return forced

    def give_up_forcing(self) -> bool:
        """Go on without looking at what must come next, which may be endless; False: that has been done already."""
        gave_up, self._forces, self._matcher = self._forces, False, None
        return gave_up

    def fork(self) -> GrammarState:
        """A copy, for a forked sequence."""
        child = GrammarState(self._grammar, self.token_ids)
        child._forces = self._forces
        if self._matcher is not None:
            child._matcher = self._matcher.deep_copy()
        return child

    def _without_end(self, token_ids: Sequence[int]) -> list[int]:
        eos_token_ids = self.eos_token_ids
        return [token_id for token_id in token_ids if token_id not in eos_token_ids]
