"""Parsers of the command line, which import a command's module when it is used."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn

from octavo.errors import shown
from octavo.option import nearest

EXIT_USAGE = 2

_MOST_IN_USAGE = 12
# Ollama's and vLLM's names for commands.
_OTHER_COMMANDS = {"run": "chat", "pull": "serve", "ps": "top", "complete": "generate"}
_ADVICE = {
    "list": "a server has one model, which GET /v1/models names",
    "limits": "`octavo bench cpu` measures them",
}
# vLLM's and llama.cpp's names for options, and Octavo's.
_OTHER_FLAGS = {
    "-m": "the model is an argument without a flag",
    "-p": "a prompt is an argument of `octavo generate`",
    "-c": "write --max-model-len",
    "--ctx-size": "write --max-model-len",
    "-tp": "write --tensor-parallel-size",
    "--pipeline-parallel-size": "Octavo serves on one device",
    "--trust-remote-code": "Octavo runs no code out of a model's folder; most models need none, so leave it out",
    **dict.fromkeys(
        ("--enable-lora", "--lora-modules", "--lora"), "adapters (LoRA) are not supported: merge them into the model"
    ),
    "-q": "write --quantization",
    "-hf": "the model is an argument without a flag, as in org/name:Q4_K_M",
    "--hf-repo": "the model is an argument without a flag, as in org/name:Q4_K_M",
    "--numa": "write --tensor-parallel-size auto for a rank on each NUMA node, or --cpu-list with the CPUs of one",
    "--cpu-range": "write --cpu-list",
    "--num-devices": "write --tensor-parallel-size",
}
# Matches argparse's own message.
_INVALID_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)$")


class _ShortHelp(argparse.HelpFormatter):
    """Appends an option's default, unless its help mentions one.

    The usage line leaves the options out if there are many; they are listed below it anyway.
    """

    def add_usage(self, usage: str | None, actions: Any, groups: Any, prefix: str | None = None) -> None:
        needed = [action for action in actions if not action.option_strings or action.required]
        if usage is None and len(actions) > _MOST_IN_USAGE:
            text = self._format_usage(None, needed, [], prefix)
            self._add_item(lambda: text.replace(self._prog, f"{self._prog} [options]", 1), [])
        else:
            super().add_usage(usage, actions, groups, prefix)

    def _get_help_string(self, action: argparse.Action) -> str:
        help, default = action.help or "", action.default
        if "default" in help or default == argparse.SUPPRESS or type(default) not in (int, float, str):
            return help
        return f"{help} (default: {default:g})" if isinstance(default, float) else f"{help} (default: %(default)s)"


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports wrong usage in one line: what is wrong, and where to look it up."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"formatter_class": _ShortHelp, "allow_abbrev": False, **kwargs})

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            # Use the command's own parser if there is one, so that the error names the command and its --help.
            parser = getattr(parsed, "command_parser", self)
            parser.error(_unknown(unknown[0], parser))
        return parsed

    def error(self, message: str) -> NoReturn:
        if (wrong := _INVALID_CHOICE.search(message)) is not None:
            if (advice := _ADVICE.get(wrong[1])) is not None:
                self.exit(EXIT_USAGE, f"{self.prog}: error: there is no command {wrong[1]!r}: {advice}\n")
            hint = nearest(_OTHER_COMMANDS.get(wrong[1], wrong[1]), re.findall(r"[^\s',]+", wrong[2]))
            message = message[: wrong.start(2) - len(" (choose from ")] + hint if "did you mean" in hint else message
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class CommandParser(OneLineParser):
    """The parser of one command, to which its module adds the arguments when it is first used.

    Args:
        module: name of the command's module.
        summary: the description, unless the module has a `DESCRIPTION`.
    """

    def __init__(self, *, module: str, summary: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._module: str | None = module
        self._summary = summary

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.load()
        return super().parse_known_args(args, namespace)

    def load(self) -> None:
        """Import the command's module, unless that was done."""
        if self._module is None:
            return
        module = import_module(self._module)
        self._module = None
        self.description = getattr(module, "DESCRIPTION", f"{self._summary[0].upper()}{self._summary[1:]}.")
        module.add_arguments(self)
        if hasattr(module, "run"):  # `octavo bench` has only those of its benchmarks
            self.set_defaults(run=module.run, command_parser=self)


def add_commands(parser: argparse.ArgumentParser, commands: Mapping[str, str], package: str, **titles: str) -> None:
    """Add subcommands, each a module of `package`, by name and summary."""
    subparsers = parser.add_subparsers(**titles, required=True, parser_class=CommandParser)
    for name, summary in commands.items():
        module = f"{package}.{name.replace('-', '_')}"
        subparsers.add_parser(name, help=summary, module=module, summary=summary)


def load_commands(parser: argparse.ArgumentParser) -> None:
    """Import the modules of all commands of a parser, and of theirs."""
    for action in parser._actions:
        for command in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
            command.load()
            load_commands(command)


def _unknown(word: str, parser: argparse.ArgumentParser) -> str:
    """Return the error message for an unknown argument; for a flag, with the one that was probably meant."""
    from octavo.config import EngineConfig
    from octavo.server.config import ServerConfig

    message = f"unknown argument {shown(word)}"
    if (advice := _OTHER_FLAGS.get(word.partition("=")[0])) is not None:
        return f"{message}: {advice}"
    if not word.startswith("--"):
        return message
    name = word[2:].partition("=")[0]
    removed = {**EngineConfig.REMOVED, **ServerConfig.REMOVED}
    if (replaced := removed.get(name.replace("-", "_"))) is not None:
        return f"{message}; it was removed: {replaced}"
    known = [flag[2:] for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    meant = difflib.get_close_matches(name[:80], known, n=1)
    return f"{message}; did you mean --{meant[0]}?" if meant else message
