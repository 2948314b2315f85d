"""The commands of `octavo`. A new command is a module with a `COMMAND` that is listed here."""

from __future__ import annotations

from octavo.commands import (
    bench,
    cache,
    calibrate,
    calibrate_speed,
    chat,
    completion,
    generate,
    plan,
    quality,
    serve,
    simulate,
    top,
)
from octavo.commands.base import Command, add_command

COMMANDS: tuple[Command, ...] = (
    serve.COMMAND,
    chat.COMMAND,
    generate.COMMAND,
    top.COMMAND,
    plan.COMMAND,
    simulate.COMMAND,
    bench.COMMAND,
    quality.COMMAND,
    calibrate.COMMAND,
    calibrate_speed.COMMAND,
    cache.COMMAND,
    completion.COMMAND,
)

__all__ = ["COMMANDS", "Command", "add_command"]
