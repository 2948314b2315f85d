"""Finds stop strings in streamed text, and holds back text that may still become one."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from functools import lru_cache


class StopAutomaton:
    """All stop strings of a request in one automaton (Aho and Corasick 1975), in O(1) per character.

    A state is the longest prefix of any stop string that the text ends with; state 0 is the empty prefix.

        stops "ab", "abc", "bd"      0 ─a─> 1 ─b─> 2 ("ab") ─c─> 3 ("abc")       on a character without transition:
                                     0 ─b─> 4 ─d─> 5 ("bd")                      2 falls back to 4, all others to 0

    Immutable, so that all sequences with the same stop strings share one.
    """

    __slots__ = ("_completes", "_depth", "_fallback", "_next", "begins_in")

    def __init__(self, stop: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._completes = [""]
        for text in stop:
            self._insert(text)
        self._fallback = [0] * len(self._next)
        self._link()
        # Whether, and where, a text has the first character of any of them.
        self.begins_in = re.compile("|".join(map(re.escape, self._next[0]))).search

    def read(self, state: int, text: str, *, may_match: bool) -> tuple[int, int]:
        """Read a text from a state on, up to the first character that completes a stop string, if it may match.

        Returns:
            The state reached, and how many characters were read.
        """
        following, fallback, completes, place = self._next, self._fallback, self._completes, 0
        while place < len(text):
            if not state:
                # Most text has no beginning of a stop string.
                if (found := self.begins_in(text, place)) is None:
                    return 0, len(text)
                place = found.start()
            character = text[place]
            place += 1
            while state and character not in following[state]:
                state = fallback[state]
            state = following[state].get(character, 0)
            if may_match and completes[state]:
                break
        return state, place

    def advance(self, state: int, character: str) -> int:
        """Return the state after one more character."""
        following = self._next
        while state and character not in following[state]:
            state = self._fallback[state]
        return following[state].get(character, 0)

    def completed(self, state: int) -> str:
        """Return the longest stop string that the text ends with, or ""."""
        return self._completes[state]

    def num_held(self, state: int) -> int:
        """Return how many characters at the end of the text may still become a stop string."""
        while state and not self._next[state]:
            state = self._fallback[state]  # a complete stop string that is not a prefix of another one
        return self._depth[state]

    def _insert(self, text: str) -> None:
        state = 0
        for character in text:
            found = self._next[state].get(character)
            if found is None:
                found = self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._completes.append("")
            state = found
        self._completes[state] = text

    def _link(self) -> None:
        """Compute the fallbacks by ascending depth, each from the fallback of its parent state."""
        pending = deque(self._next[0].values())
        while pending:
            state = pending.popleft()
            fallback = self._fallback[state]
            if not self._completes[state]:
                self._completes[state] = self._completes[fallback]
            for character, child in self._next[state].items():
                self._fallback[child] = self.advance(fallback, character)
                pending.append(child)


# Cached, because all sequences of a request ask for the same automaton.
automaton_of = lru_cache(maxsize=64)(StopAutomaton)


class StopStringMatcher:
    """Passes text through, but holds back an end that may be the beginning of a stop string.

    Characters are processed one by one, so neither token boundaries nor the grouping of tokens change which stop string
    is found: the one that is complete first, and of several complete at once the longest.

        stop "</s>"      in: "ab<"   "/x"     "c</"   "s>d"
                        out: "ab"    "</x"    "c"     ""       matched "</s>"; "d" was not processed

    Args:
        keep: whether to include the stop string in the text.
    """

    def __init__(self, stop: Sequence[str], *, keep: bool = False) -> None:
        self.matched: str | None = None
        self._keep = keep
        self._automaton = automaton_of(tuple(stop))
        self._state = 0
        self._held = ""

    def feed(self, text: str, *, may_match: bool = True) -> str:
        """Add text, and return the text that is safe to emit; with a match, the text up to it, and it if it is kept.

        Without `may_match`, stop strings that end within this text are ignored and treated as text.
        """
        if self.matched is not None:
            return ""
        automaton = self._automaton
        if not self._state and not automaton.begins_in(text):
            return text
        pending = self._held + text
        state, num_read = automaton.read(self._state, text, may_match=may_match)
        if may_match and num_read and (completed := automaton.completed(state)):
            self.matched = completed
            end = len(self._held) + num_read
            self._held = ""
            return pending[: end if self._keep else end - len(completed)]
        self._state = state
        safe = len(pending) - automaton.num_held(state)
        self._held = pending[safe:]
        return pending[:safe]

    def flush(self) -> str:
        """Return the text held back, when nothing follows that could complete a stop string."""
        held, self._held = self._held, ""
        return held
