"""The commands of `octavo`. A new command is a module with a `COMMAND`, listed here."""

from __future__ import annotations

from octavo.commands import bench, chat, completion, generate, plan, serve
from octavo.commands.base import Command, add_command

COMMANDS: tuple[Command, ...] = (
    serve.COMMAND,
    generate.COMMAND,
    chat.COMMAND,
    bench.COMMAND,
    plan.COMMAND,
    completion.COMMAND,
)

__all__ = ["COMMANDS", "Command", "add_command"]
