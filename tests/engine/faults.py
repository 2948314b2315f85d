"""Exceptions injected into an engine's steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from octavo.engine.core import EngineCore
from octavo.request import RequestId
from octavo.scheduler.scheduler import Scheduler

Strikes = Callable[[set[str]], bool]
"""Given the ids of the requests concerned, whether to raise now."""


class InjectedError(RuntimeError):
    """What the injected faults raise."""


def times(count: int) -> Strikes:
    """Only the first `count` times."""
    left = iter(range(count))
    return lambda _: next(left, None) is not None


def whenever(request_id: str) -> Strikes:
    """Every time that this request takes part."""
    return lambda concerned: request_id in concerned


def _planned(core: EngineCore) -> Callable[..., set[str]]:
    """The requests of the plan whose result is awaited."""
    return lambda *_, **__: {seq.request.request_id for seq in core.scheduler.planned}


def _before(owner: Any, name: str, strikes: Strikes, concerned: Callable[..., set[str]]) -> Any:
    original = getattr(owner, name)

    def replaced(*args: Any, **options: Any) -> Any:
        if strikes(concerned(*args, **options)):
            raise InjectedError(f"in {name}")
        return original(*args, **options)

    return patch.object(owner, name, replaced)


def _after(owner: Any, name: str, strikes: Strikes, concerned: Callable[..., set[str]]) -> Any:
    original = getattr(owner, name)

    def replaced(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        if strikes(concerned(*args, **options)):
            raise InjectedError(f"after {name}")
        return result

    return patch.object(owner, name, replaced)


def _of_sequence(seq: Any, *_: Any, **__: Any) -> set[str]:
    return {seq.request.request_id}


def _everyone(core: EngineCore) -> Callable[..., set[str]]:
    """The requests that a plan may take: those that are not held back."""

    def concerned(*_: Any, **__: Any) -> set[str]:
        return {name for name in list(core.scheduler.live) if core._recovery.isolation.may_run(RequestId(name))}

    return concerned


PLACES: dict[str, Callable[[EngineCore, Strikes], Any]] = {
    "before planning": lambda core, strikes: _before(core.scheduler, "schedule", strikes, _everyone(core)),
    "after planning": lambda core, strikes: _after(core.scheduler, "schedule", strikes, _everyone(core)),
    "at an admission": lambda core, strikes: _after(core.scheduler.kv, "admit", strikes, _of_sequence),
    "before computing": lambda core, strikes: _before(core.runner, "execute", strikes, _planned(core)),
    "after computing": lambda core, strikes: _after(core.runner, "execute", strikes, _planned(core)),
    "before updating": lambda core, strikes: _before(core.scheduler, "update", strikes, _planned(core)),
}
"""Where a step can be repeated."""

ONCE_PLACES: dict[str, Callable[[EngineCore, Strikes], Any]] = {
    # Started over it needs no further block: however often this raises, it goes on.
    "half-way through planning": lambda core, strikes: _after(core.scheduler.kv, "extend", strikes, _of_sequence),
}

ENDING_PLACES: dict[str, Callable[[EngineCore, Strikes], Any]] = {
    "before a commit": lambda core, strikes: _before(core.scheduler.kv, "commit", strikes, _of_sequence),
    "after a commit": lambda core, strikes: _after(core.scheduler.kv, "commit", strikes, _of_sequence),
    "half-way through an update": lambda core, strikes: _after(
        Scheduler, "_append", strikes, lambda self, seqs, *rest: {seqs[0].request.request_id}
    ),
    "in its output": lambda core, strikes: _before(
        core.outputs, "_take_in", strikes, lambda tracked, update: {tracked.request.request_id}
    ),
    "in the making of its output": lambda core, strikes: _before(
        core.outputs, "_output", strikes, lambda tracked: {tracked.request.request_id}
    ),
}
"""Where a request's tokens are half taken in: it ends."""


@contextmanager
def injected(core: EngineCore, place: str, strikes: Strikes) -> Iterator[None]:
    """Let steps raise at a place whenever the strikes say so."""
    with (PLACES | ONCE_PLACES | ENDING_PLACES)[place](core, strikes):
        yield
