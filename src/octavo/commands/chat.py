"""`octavo chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from octavo.commands.conversation import COMMANDS, OMITTED, Conversation
from octavo.commands.interrupt import remembered_interrupt
from octavo.commands.options import add_options, add_sampling_options, given_options
from octavo.commands.terminal import Terminal, history_file
from octavo.config import EngineConfig
from octavo.sampling_params import SamplingParams
from octavo.server.apis import OLLAMA_DEFAULTS

if TYPE_CHECKING:
    from octavo.llm import LLM

# --seed and --kv-budget are options of the engine already.
_OMITTED = (*OMITTED, "seed", "kv_budget")
# An answer may fill the context: the default limit of completions would cut most answers short. How tokens are drawn is
# Ollama's way; it applies if neither the model's makers nor the user say otherwise.
_DEFAULTS: dict[str, Any] = {"max_tokens": None, **OLLAMA_DEFAULTS}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--stats", action="store_true", help="print tokens and tokens per second after each answer")
    parser.add_argument("--no-history", action="store_true", help=f"do not save what you type in {_shown_history()}")
    add_sampling_options(parser, omit=_OMITTED, defaults=_DEFAULTS)
    add_options(parser, EngineConfig, positional_model=True)


def run(args: argparse.Namespace) -> int:
    given = given_options(args, SamplingParams, omit=_OMITTED)
    SamplingParams(**{**_DEFAULTS, **given})  # validates the options before a model is loaded
    # Otherwise every conversation would begin with the same answer.
    options = {"seed": None, **given_options(args, EngineConfig)}
    with remembered_interrupt() as interrupt:
        with interrupt.held():
            from octavo import LLM

        llm = LLM(**options)
    with llm, Terminal(None if args.no_history else history_file(), COMMANDS) as terminal:
        interrupt.check()
        if terminal.is_interactive:
            print(greeting(llm), flush=True)
        params = SamplingParams(**{**_DEFAULTS, **llm.info.default_sampling, **given})
        Conversation(llm, params, system=args.system, stats=args.stats, read=terminal.read).loop()
    return 0


def greeting(llm: LLM) -> str:
    """Return the first lines: what is loaded, what fits, and how to leave."""
    return f"{llm.summary}\nType a message; /? lists commands, Ctrl-C stops an answer, Ctrl-D or /bye leaves."


def _shown_history() -> str:
    """Return the path of the history for `--help`, with ~ for the user's home."""
    return str(history_file()).replace(str(history_file().home()), "~")
