"""Finds stop strings in streamed text, and holds back what may still become one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Passes text through, but holds back an end that may be the beginning of a stop string.

    Characters are looked at one by one, so neither where tokens begin and end nor how they are grouped changes which
    stop string is found: the one that is complete first, and of several complete at once the longest.

        stop "</s>"      in: "ab<"   "/x"     "c</"   "s>d"
                        out: "ab"    "</x"    "c"     ""       matched "</s>"; "d" was never looked at

    Each stop string has its own Knuth–Morris–Pratt automaton, O(1) a character: `state` is the length of its longest
    beginning that the text ends in.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.matched: str | None = None
        self._stop = list(stop)
        self._fallbacks = [_fallback(text) for text in stop]
        self._states = [0] * len(self._stop)
        self._held = ""

    def feed(self, text: str, *, may_match: bool = True) -> str:
        """Take in more text; return what can be given out now. After a match that is what came before it.

        Without `may_match`, stop strings that end in this text are passed over and given out.
        """
        if self.matched is not None:
            return ""
        if not self._stop:
            return text
        pending = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            longest = self._advance(character)
            if longest and may_match:
                self.matched = longest
                self._held = ""
                return pending[: end - len(longest)]
        safe = len(pending) - max(self._states)
        self._held = pending[safe:]
        return pending[:safe]

    def flush(self) -> str:
        """The text held back, once nothing follows that could complete a stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str:
        """Move each automaton by one character; returns the longest stop string that is complete with it, or ""."""
        longest = ""
        for i, stop in enumerate(self._stop):
            state = self._states[i]
            fallback = self._fallbacks[i]
            while state and stop[state] != character:
                state = fallback[state]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                if len(stop) > len(longest):
                    longest = stop
                state = fallback[state]
            self._states[i] = state
        return longest


def _fallback(stop: str) -> list[int]:
    """Entry n: length of the longest proper beginning of stop[:n] that is also its end (Knuth, Morris, Pratt 1977)."""
    table = [0, 0]
    for character in stop[1:]:
        length = table[-1]
        while length and stop[length] != character:
            length = table[length]
        table.append(length + (stop[length] == character))
    return table
