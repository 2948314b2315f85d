"""The events into which the parser turns an answer."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer itself, a contiguous piece of what the model wrote.

    Attributes:
        end: number of characters that the model wrote up to the end of this piece.
    """

    text: str
    end: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning; as `Content`."""

    text: str
    end: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class CallBegins:
    """The beginning of a tool call; its arguments follow.

    Attributes:
        id: the id that the model gave the call; "" if it gave none.
    """

    index: int
    name: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the JSON of a call's arguments."""

    index: int
    text: str


Event = Content | Reasoning | CallBegins | Arguments
