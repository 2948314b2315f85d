"""Spreads a burst of work over several rounds of the event loop, so that other tasks run in between.

A round runs every callback that is ready. A thousand callbacks that become ready at once, because a thousand requests
arrived or were aborted, would all run before the next token of any stream is sent, and then all take their next step:

    round       | 1 2 3 … 1000 | stream | 1 2 3 … 1000 | stream |
    turnstile   | 1 2 3 4 | stream | 5 6 7 8 | stream | 9 …

Queued callbacks also wait until nothing urgent needs the interpreter: a step of the engine that gets it only now and
then, between many callbacks, takes ten times as long as alone. And while a step is computed, the queue rests for twice
as long as its last round used the processor: each of the step's threads computes a part of every matrix, so that one
thread that loses half of its core makes the step take twice as long.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

# How long a round is delayed at a time, and how often at most: some 40 ms in all, because epoll rounds every delay up
# to a millisecond. A step of many sequences may need the interpreter for that long if many callbacks run concurrently.
_WAIT_SECONDS = 0.0005
_MOST_WAITS = 40
# How long the queue rests while a step is computed, as a multiple of the last round's time; and the maximum in seconds.
_REST = 2.0
_MOST_REST_SECONDS = 0.01


class Turnstile:
    """Lets a limited number pass in each round of the event loop; the others wait. Used only from the event loop.

    Args:
        at_once: total size that may pass in a round; the last to pass may exceed it.

    Attributes:
        gives_way: returns whether the queue should wait now; after `_MOST_WAITS` waits a round runs anyway.
        shares: returns whether a step needs the processor, so that the queue should rest after a round.
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
        """Try to pass in this round; return False if the round is full or others wait."""
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
