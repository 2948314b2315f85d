"""An answer as a sequence of blocks (reasoning, text, calls), as in Anthropic's API and OpenAI's responses API."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from octavo.dialect.events import Arguments, CallBegins, Event, Reasoning
from octavo.server.answers.choices import CallIds


class BlockKind(StrEnum):
    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """One part of an answer.

    Attributes:
        name: the name of the called tool; empty for other kinds.
        call_id: the id of the call; empty for other kinds.
        pieces: the block's text, or the arguments of a call.
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
    """A block has become longer.

    Attributes:
        end: number of characters that the model wrote up to the end of `text`; 0 for a call.
    """

    block: Block
    text: str
    end: int = 0


@dataclass(frozen=True, slots=True)
class Closed:
    block: Block


Change = Opened | Grew | Closed


class Blocks:
    """Collects an answer's blocks, of which at most one is open."""

    def __init__(self, ids: CallIds) -> None:
        self._ids = ids
        self._open: Block | None = None
        self.all: list[Block] = []

    def take(self, events: Iterable[Event]) -> Iterator[Change]:
        """Add events and yield the changes to the blocks."""
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
            yield Grew(self._open, event.text, 0 if isinstance(event, Arguments) else event.end)

    def end(self) -> Iterator[Change]:
        """Close the open block, if any."""
        if self._open is not None:
            yield Closed(self._open)
            self._open = None

    def _begin(self, kind: BlockKind, name: str = "") -> Iterator[Change]:
        yield from self.end()
        self._open = Block(len(self.all), kind, name, self._ids.new() if kind is BlockKind.CALL else "")
        self.all.append(self._open)
        yield Opened(self._open)
