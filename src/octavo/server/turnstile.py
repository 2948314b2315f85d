"""Spreads a crowd over several rounds of the event loop, so that others have their turns in between.

A round runs every callback that is ready. A thousand that become ready at once, because a thousand requests came or
were given up, would all run before the next token of anybody's stream is sent, and then all take their next step:

    round       | 1 2 3 … 1000 | stream | 1 2 3 … 1000 | stream |
    turnstile   | 1 2 3 4 | stream | 5 6 7 8 | stream | 9 …

Who stands in line also waits for a moment in which nothing urgent needs the interpreter: a step of the engine that gets
it only now and then, between the callbacks of a crowd, takes ten times as long as alone. And while a step is computed,
a crowd leaves the processor to it for twice as long as it has just used it: each of the step's threads has its part of
every matrix, so that one which loses half of its core makes the step take twice as long.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

# How long a round is put off at a time, and how often: at most some forty milliseconds, as long as a step of many
# sequences may need the interpreter beside a crowd.
_WAIT_SECONDS = 0.0005
_MOST_WAITS = 40
# How long a crowd rests while a step is computed, in times of the round before; and at most.
_REST = 2.0
_MOST_REST_SECONDS = 0.01


class Turnstile:
    """Lets so many pass in each round of the event loop; the others wait in line. Used only from the event loop.

    Args:
        at_once: how many pass in a round; one of size 3 counts as 3, and the last to pass may go beyond.

    Attributes:
        gives_way: whether who stands in line should wait now; asked a few times, and then no more.
        shares: whether a step needs the processor, so that a crowd should not have all of it.
    """

    def __init__(
        self, at_once: int, gives_way: Callable[[], bool] = lambda: False, shares: Callable[[], bool] = lambda: False
    ) -> None:
        self.gives_way = gives_way
        self.shares = shares
        self._num_waits = 0
        self._round_began = 0.0
        self._has_rested = False
        self._at_once = at_once
        self._left = at_once
        self._line: deque[tuple[int, Callable[[], None]]] = deque()
        self._counting = False

    def passes(self, size: int = 1) -> bool:
        """Whether one more may pass in this round, with nobody before it in line; if so, it has."""
        if self._left <= 0 or self._line:
            return False
        self._left -= size
        self._count_round()
        return True

    def queue(self, goes_on: Callable[[], None], size: int = 1) -> None:
        """Call `goes_on` in a later round, when it is its turn."""
        self._line.append((size, goes_on))
        self._count_round()

    async def turn(self, size: int = 1) -> None:
        """Wait for a turn, if this round has none left."""
        if self.passes(size):
            return
        turn = asyncio.get_running_loop().create_future()
        self.queue(lambda: None if turn.done() else turn.set_result(None), size)
        await turn

    def _count_round(self) -> None:
        if not self._counting:
            self._counting = True
            loop = asyncio.get_running_loop()
            self._round_began = loop.time()
            loop.call_soon(self._next_round)

    def _next_round(self) -> None:
        if self._line and not self._has_rested and self.shares():
            self._has_rested = True
            loop = asyncio.get_running_loop()
            loop.call_later(min(_REST * (loop.time() - self._round_began), _MOST_REST_SECONDS), self._next_round)
            return
        if self._line and self._num_waits < _MOST_WAITS and self.gives_way():
            self._num_waits += 1
            asyncio.get_running_loop().call_later(_WAIT_SECONDS, self._next_round)
            return
        self._counting = False
        self._num_waits = 0
        self._has_rested = False
        self._left = self._at_once
        while self._left > 0 and self._line:
            size, goes_on = self._line.popleft()
            self._left -= size
            goes_on()
        if self._left < self._at_once:
            self._count_round()
