"""A conversation with a model: reads lines, streams answers, and handles commands."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from octavo.errors import RequestError
from octavo.option import nearest
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.outputs import RequestOutput
    from octavo.llm import LLM

HELP = """\
/clear                     forget the conversation
/set system TEXT           replace the system message
/set parameter NAME VALUE  change a sampling parameter, such as temperature 0.2
/show                      model, context, parameters and system message
/bye                       leave; so do exit and Ctrl-D
/?                         this list
Lines between two \"\"\" are one message. Ctrl-C stops an answer; at the prompt, twice, it leaves."""
COMMANDS = ("/clear", "/set system ", "/set parameter ", "/show", "/bye", "/exit", "/help", "/?")

# Parameters that make no sense for one streamed answer.
OMITTED = (
    *("n", "best_of", "use_beam_search", "length_penalty", "early_stopping"),
    *("logprobs", "prompt_logprobs", "detokenize"),
)
_SETTABLE = tuple(option.name for option in fields(SamplingParams) if option.name not in OMITTED)
# Ollama's names of parameters.
_OTHER_NAMES = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
_FENCE = '"""'


class Conversation:
    """The read-answer loop. The history holds every exchange except questions that the engine refused.

    Args:
        read: called with the prompt to show; returns the next line, and raises EOFError at the end.
        out: where answers are written; standard output if None.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        *,
        system: str | None = None,
        stats: bool = False,
        read: Callable[[str], str] = input,
        out: TextIO | None = None,
    ) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._stats = stats
        self._read = read
        self._out = out or sys.stdout
        self._history: list[dict[str, Any]] = []
        self._num_tokens = 0  # length of the conversation as of the last answer

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation as the model sees it, with the system message."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *self._history]

    def loop(self) -> None:
        """Run until `/bye`, the end of the input, or Ctrl-C twice in a row at the prompt."""
        interrupted = False
        while True:
            try:
                message = self._read_message()
            except EOFError:
                self._say("")
                return
            except KeyboardInterrupt:
                if interrupted:
                    self._say("")
                    return
                interrupted = True
                self._say("\n(Ctrl-C again, Ctrl-D or /bye leaves)")
                continue
            interrupted = False
            if message in ("/bye", "/exit", "/quit", "exit", "quit"):
                return
            if message.startswith("/"):
                self._command(message)
            elif message:
                self._ask(message)

    def _read_message(self) -> str:
        """Read one line, or the lines between two fences."""
        line = self._read("> ").strip()
        if not line.startswith(_FENCE):
            return line
        text = line.removeprefix(_FENCE)
        while not text.rstrip().endswith(_FENCE):
            text += "\n" + self._read("… ")
        return text.rstrip().removesuffix(_FENCE).strip()

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name in ("/clear", "/reset"):
            self._history.clear()
            self._num_tokens = 0
        elif name == "/system":
            self._system = rest or None
        elif name == "/set":
            self._set(rest)
        elif name == "/show":
            self._show()
        elif name in ("/help", "/?"):
            self._say(HELP)
        else:
            self._say(f"unknown command {name}\n{HELP}")

    def _set(self, what: str) -> None:
        kind, _, rest = what.partition(" ")
        name, _, value = rest.strip().partition(" ")
        if kind == "system":
            self._system = rest.strip() or None
        elif kind == "parameter" and name and value:
            self._set_parameter(_OTHER_NAMES.get(name, name), value.strip())
        else:
            self._say("usage: /set system TEXT, or /set parameter NAME VALUE")

    def _set_parameter(self, name: str, text: str) -> None:
        if name not in _SETTABLE:
            self._say(f"unknown parameter {name}{nearest(name, _SETTABLE)}")
            return
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        try:
            self._params = replace(self._params, **{name: value})
        except RequestError as error:
            self._say(f"error: {error}")

    def _show(self) -> None:
        model, most = self._llm.config.model, self._llm.info.max_model_len
        self._say(f"model       {model}, {most:,} tokens of context, {self._num_tokens:,} of them in use")
        default = SamplingParams(max_tokens=None)
        given = {name: getattr(self._params, name) for name in _SETTABLE}
        changed = [f"{name} {value}" for name, value in given.items() if value != getattr(default, name)]
        self._say(f"parameters  {', '.join(changed) or 'none set'}")
        self._say(f"system      {self._system or '(none)'}")

    def _ask(self, question: str) -> None:
        self._history.append({"role": "user", "content": question})
        try:
            answer = self._answer()
        except RequestError as error:
            self._history.pop()
            self._say(f"error: {error} (/clear forgets the conversation)")
            return
        self._history.append({"role": "assistant", "content": answer})

    def _answer(self) -> str:
        """Stream one answer and return it; after Ctrl-C, return the part that had arrived."""
        start = time.perf_counter()
        first = start
        num_tokens = 0
        parts: list[str] = []
        last: RequestOutput | None = None
        with (
            _interruptible() as was_interrupted,
            closing(self._llm.stream_chat(self.messages, self._params)) as stream,  # which aborts its request
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
        if last is not None:
            self._num_tokens = len(last.prompt_token_ids) + num_tokens
            if self._stats:
                self._say(_stats_line(last, num_tokens, first - start, time.perf_counter() - first))
        return "".join(parts)

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)


def _stats_line(output: RequestOutput, num_tokens: int, first_s: float, decode_s: float) -> str:
    """Format the time to the first token (prefill) and the rate of the others (decode)."""
    pace = f"{(num_tokens - 1) / decode_s:.1f} tokens/s" if num_tokens > 1 and decode_s > 0 else "no pace"
    cached = f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens cached"
    return f"[{num_tokens} tokens, {pace}, first after {first_s:.2f} s, {cached}]"


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a flag that the caller checks between tokens.

    A KeyboardInterrupt would be raised in the middle of a step and leave the engine in an inconsistent state. A second
    Ctrl-C does raise it, in case the engine hangs.
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
