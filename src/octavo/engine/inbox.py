"""Messages from the event loop to the engine's thread, in one queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from octavo.engine.core import EngineCore
from octavo.request import Request, RequestId

_T = TypeVar("_T")


class Tally:
    """A count of requests and prompt tokens that only increases and has a single writer thread."""

    def __init__(self) -> None:
        self.requests = 0
        self.tokens = 0

    def add(self, request: Request) -> None:
        self.requests += 1
        self.tokens += len(request.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class Addition:
    """A request to queue."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """A request to abort."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class OutputFailed:
    """A request whose output could not be made."""

    request: Request
    error: Exception


class Question(Generic[_T]):
    """A call to run on the core between two steps, and the future for its result."""

    def __init__(self, ask: Callable[[EngineCore], _T], answer: asyncio.Future[_T]) -> None:
        self._ask = ask
        self._answer = answer

    def put_to(self, core: EngineCore) -> Callable[[], None]:
        """Run the call; returns a function that delivers the result in the event loop."""
        try:
            found = self._ask(core)
        except Exception as error:
            failure = error
            return lambda: None if self._answer.done() else self._answer.set_exception(failure)
        return lambda: None if self._answer.done() else self._answer.set_result(found)


Message = Addition | Abort | OutputFailed | Question[Any]
