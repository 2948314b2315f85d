"""The commands of `octavo`. A new command is a module with a `COMMAND`, listed here."""

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
    generate.COMMAND,
    chat.COMMAND,
    bench.COMMAND,
    plan.COMMAND,
    quality.COMMAND,
    calibrate.COMMAND,
    simulate.COMMAND,
    calibrate_speed.COMMAND,
    top.COMMAND,
    cache.COMMAND,
    completion.COMMAND,
)

__all__ = ["COMMANDS", "Command", "add_command"]
