"""What the parser finds in an answer, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for whoever asked."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model tells itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """The model calls a tool; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the JSON of a call's arguments."""

    index: int
    text: str


Event = Content | Reasoning | CallBegins | Arguments
