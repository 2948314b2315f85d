"""`octavo chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from octavo.commands.base import Command
from octavo.commands.options import add_engine_options, add_sampling_options, engine_options, given_options
from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.outputs import RequestOutput
    from octavo.llm import LLM

_HELP = """\
/system TEXT  replace the system message      /reset  forget the conversation
/exit         leave; so does Ctrl-D           Ctrl-C  stop the answer; twice at the prompt: leave"""

# What makes no sense for one streamed answer, and the engine's own --seed.
_OMITTED = (
    "n",
    "best_of",
    "use_beam_search",
    "length_penalty",
    "early_stopping",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "detokenize",
)
# An answer may fill the context: a limit that suits completions would cut most answers short.
_DEFAULTS = {"max_tokens": None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--stats", action="store_true", help="tokens and tokens per second after each answer")
    add_sampling_options(parser, omit=_OMITTED, defaults=_DEFAULTS)
    add_engine_options(parser, positional_model=True)


def run(args: argparse.Namespace) -> int:
    params = SamplingParams(**{**_DEFAULTS, **given_options(args, SamplingParams, omit=_OMITTED)})

    from octavo import LLM

    with LLM(**engine_options(args)) as llm:
        Conversation(llm, params, system=args.system, stats=args.stats).loop()
    return 0


class Conversation:
    """The read-answer loop. The history holds every exchange except questions that the engine refused.

    Args:
        read: returns the next line, raises EOFError at the end; given whether a prompt is to be shown.
        out: where answers go.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        *,
        system: str | None = None,
        stats: bool = False,
        read: Callable[[], str] | None = None,
        out: TextIO | None = None,
    ) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._stats = stats
        self._read = read or _read_line
        self._out = out or sys.stdout
        self._history: list[dict[str, Any]] = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation as the model sees it."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *self._history]

    def loop(self) -> None:
        """Run until `/exit`, the end of the input, or Ctrl-C twice in a row at the prompt."""
        interrupted = False
        while True:
            try:
                line = self._read().strip()
            except EOFError:
                self._say("")
                return
            except KeyboardInterrupt:
                if interrupted:
                    self._say("")
                    return
                interrupted = True
                self._say("\n(Ctrl-C again, Ctrl-D or /exit leaves)")
                continue
            interrupted = False
            if line == "/exit":
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._ask(line)

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/reset":
            self._history.clear()
        elif name == "/system":
            self._system = rest.strip() or None
        elif name == "/help":
            self._say(_HELP)
        else:
            self._say(f"unknown command {name}\n{_HELP}")

    def _ask(self, question: str) -> None:
        self._history.append({"role": "user", "content": question})
        try:
            answer = self._answer()
        except RequestError as error:
            self._history.pop()
            self._say(f"error: {error} (/reset forgets the conversation)")
            return
        self._history.append({"role": "assistant", "content": answer})

    def _answer(self) -> str:
        """Stream one answer and return it; after Ctrl-C, the part that had arrived."""
        start = time.perf_counter()
        first = start
        num_tokens = 0
        parts: list[str] = []
        last: RequestOutput | None = None
        with (
            _interruptible() as was_interrupted,
            _closing(self._llm.stream_chat(self.messages, self._params)) as stream,
        ):
            for last in stream:
                delta = last.outputs[0] if last.outputs else None
                if delta is not None:
                    first = first if num_tokens else time.perf_counter()
                    num_tokens += len(delta.token_ids)
                    parts.append(delta.text)
                    print(delta.text, end="", file=self._out, flush=True)
                if was_interrupted():
                    break
        self._say(" …" if was_interrupted() else "")
        if self._stats and last is not None:
            self._say(_stats_line(last, num_tokens, first - start, time.perf_counter() - first))
        return "".join(parts)

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)


def _stats_line(output: RequestOutput, num_tokens: int, first_s: float, decode_s: float) -> str:
    """Time to first token (prefill) and the rate of the others (decode)."""
    pace = f"{(num_tokens - 1) / decode_s:.1f} tokens/s" if num_tokens > 1 and decode_s > 0 else "no pace"
    cached = f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens cached"
    return f"[{num_tokens} tokens, {pace}, first after {first_s:.2f} s, {cached}]"


def _read_line() -> str:
    return input("> " if sys.stdin.isatty() else "")


@contextmanager
def _closing(stream: Iterator[RequestOutput]) -> Generator[Iterator[RequestOutput]]:
    """Close a generator that is left early, which aborts its request and frees its blocks."""
    try:
        yield stream
    finally:
        if isinstance(stream, Generator):
            stream.close()


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Make the first Ctrl-C a question that the caller asks between tokens.

    A KeyboardInterrupt would come out of the middle of a step and leave the engine half changed. The second one does
    raise it, for an engine that does not come back.
    """
    interrupted = False

    def on_signal(signum: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    previous = signal.signal(signal.SIGINT, on_signal)
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, previous)


COMMAND = Command("chat", "chat with a model in the terminal", add_arguments, run)
