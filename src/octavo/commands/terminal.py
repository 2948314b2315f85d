"""Lines from the terminal, with editing and a history.

The standard library's readline does it: it costs no start-up, and has the keys that the user's ~/.inputrc says.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Self

MAX_HISTORY = 1000


def history_file() -> Path:
    """By the XDG base directory specification: a state, which need not be backed up."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "octavo" / "chat_history"


class Terminal:
    """Reads lines; where standard input is no terminal, without prompts, editing and history.

    Args:
        history: where lines are kept from one time to the next; None: nowhere.
        commands: words that the tabulator key completes at the beginning of a line.
    """

    def __init__(self, history: Path | None = None, commands: Sequence[str] = ()) -> None:
        self.is_interactive = sys.stdin.isatty()
        self._history = history
        self._commands = commands
        self._readline: ModuleType | None = None

    def __enter__(self) -> Self:
        if not self.is_interactive:
            return self
        try:
            import readline
        except ImportError:  # a Python that was built without it
            return self
        self._readline = readline
        readline.set_history_length(MAX_HISTORY)
        readline.set_completer_delims("")
        readline.set_completer(self._complete)
        readline.parse_and_bind("tab: complete")
        if self._history is not None and self._history.is_file():
            self._of_history("read", readline.read_history_file)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._readline is None:
            return
        if self._history is not None:
            self._of_history("kept", self._write)
        self._readline.set_completer(None)

    def read(self, prompt: str) -> str:
        """The next line; raises EOFError at the end, KeyboardInterrupt on Ctrl-C."""
        return input(prompt if self.is_interactive else "")

    def _complete(self, text: str, state: int) -> str | None:
        found = [command for command in self._commands if text and command.startswith(text)]
        return found[state] if state < len(found) else None

    def _write(self, path: str) -> None:
        assert self._readline is not None
        folder = Path(path).parent
        folder.mkdir(parents=True, exist_ok=True)
        # What was said to a model is nobody else's business.
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        self._readline.write_history_file(path)

    def _of_history(self, done: str, action: object) -> None:
        assert callable(action)
        try:
            action(str(self._history))
        except OSError as error:
            print(f"(the history {self._history} cannot be {done}: {error.strerror})", file=sys.stderr)
