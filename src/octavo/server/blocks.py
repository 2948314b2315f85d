"""An answer as a row of blocks, as Anthropic's API and OpenAI's responses have it: reasoning, text, calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from octavo.dialect.events import Arguments, CallBegins, Event, Reasoning
from octavo.server.choices import CallIds


class BlockKind(StrEnum):
    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """One part of an answer.

    Attributes:
        name, call_id: of a call.
        pieces: its text, or a call's arguments.
    """

    index: int
    kind: BlockKind
    name: str = ""
    call_id: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Opened:
    block: Block


@dataclass(frozen=True, slots=True)
class Grew:
    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    block: Block


Change = Opened | Grew | Closed


class Blocks:
    """Collects an answer's blocks: one is open at a time."""

    def __init__(self, ids: CallIds) -> None:
        self._ids = ids
        self._open: Block | None = None
        self.all: list[Block] = []

    def take(self, events: Iterable[Event]) -> Iterator[Change]:
        """What the next events change."""
        for event in events:
            if isinstance(event, CallBegins):
                yield from self._begin(BlockKind.CALL, event.name)
                continue
            if isinstance(event, Arguments):
                kind = BlockKind.CALL
            else:
                kind = BlockKind.REASONING if isinstance(event, Reasoning) else BlockKind.TEXT
            if self._open is None or self._open.kind is not kind:
                yield from self._begin(kind)
            assert self._open is not None
            self._open.pieces.append(event.text)
            yield Grew(self._open, event.text)

    def end(self) -> Iterator[Change]:
        """Nothing follows."""
        if self._open is not None:
            yield Closed(self._open)
            self._open = None

    def _begin(self, kind: BlockKind, name: str = "") -> Iterator[Change]:
        yield from self.end()
        self._open = Block(len(self.all), kind, name, self._ids.new() if kind is BlockKind.CALL else "")
        self.all.append(self._open)
        yield Opened(self._open)
