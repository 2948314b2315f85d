"""Reads lines from the terminal, with editing and a history.

Uses the standard library's readline, which takes no start-up time and respects the user's ~/.inputrc.
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
    """Return the path of the history, following the XDG base directory specification."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "octavo" / "chat_history"


class Terminal:
    """Reads lines; without prompts, editing and history if standard input is not a terminal.

    Args:
        history: file in which lines are kept between sessions; None to keep none.
        commands: words that the Tab key completes at the beginning of a line.
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
        except ImportError:  # Python was built without readline
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
        """Return the next line; raise EOFError at the end, and KeyboardInterrupt on Ctrl-C."""
        return input(prompt if self.is_interactive else "")

    def _complete(self, text: str, state: int) -> str | None:
        found = [command for command in self._commands if text and command.startswith(text)]
        return found[state] if state < len(found) else None

    def _write(self, path: str) -> None:
        assert self._readline is not None
        folder = Path(path).parent
        folder.mkdir(parents=True, exist_ok=True)
        # Conversations are private, so only the user may read the file.
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        self._readline.write_history_file(path)

    def _of_history(self, done: str, action: object) -> None:
        assert callable(action)
        try:
            action(str(self._history))
        except OSError as error:
            print(f"(the history {self._history} cannot be {done}: {error.strerror})", file=sys.stderr)
