from __future__ import annotations

import io
import signal
from pathlib import Path
from typing import Any

import pytest

from octavo.commands.conversation import Conversation
from octavo.commands.terminal import Terminal
from octavo.sampling_params import SamplingParams
from tests.commands.conftest import OctavoCommand
from tests.commands.fake_llm import FakeLLM


def converse(*lines: str | type[KeyboardInterrupt], llm: Any = None, **keywords: Any) -> tuple[FakeLLM, str]:
    """Feed lines (an exception class is raised instead) until the end of input; (llm, what was printed)."""
    llm = llm or FakeLLM()
    out = io.StringIO()
    script = iter([*lines, EOFError])

    def read(prompt: str) -> str:
        line = next(script)
        if isinstance(line, str):
            return line
        raise line

    Conversation(llm, SamplingParams(max_tokens=None), read=read, out=out, **keywords).loop()
    return llm, out.getvalue()


def test_an_answer_is_streamed_and_becomes_part_of_the_history() -> None:
    llm, out = converse("hi", "and?")
    assert out.startswith("Hello there!\n")
    assert llm.conversations[1] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello there!"},
        {"role": "user", "content": "and?"},
    ]


def test_the_system_message_comes_first_and_can_be_replaced() -> None:
    llm, _ = converse("hi", "/system Be kind.", "hi", "/system", "hi", system="Be brief.")
    heads = [conversation[0] for conversation in llm.conversations]
    assert heads[0] == {"role": "system", "content": "Be brief."}
    assert heads[1] == {"role": "system", "content": "Be kind."}
    assert heads[2]["role"] == "user"


def test_reset_forgets_the_conversation_but_not_the_system_message() -> None:
    for command in ("/clear", "/reset"):
        llm, _ = converse("hi", command, "again", system="Be brief.")
        assert [m["content"] for m in llm.conversations[1]] == ["Be brief.", "again"]


def test_exit_leaves_and_nothing_after_it_is_read() -> None:
    for command in ("/exit", "/bye", "/quit", "exit", "quit"):
        llm, _ = converse(command, "hi")
        assert llm.conversations == []


def test_an_unknown_command_is_not_sent_to_the_model() -> None:
    llm, out = converse("/rest", "")
    assert llm.conversations == []
    assert "unknown command /rest" in out


def test_a_question_the_engine_refuses_is_forgotten() -> None:
    llm, out = converse("refuse me", "hi")
    assert "error: too long" in out
    assert llm.conversations[1] == [{"role": "user", "content": "hi"}]


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said() -> None:
    llm = FakeLLM()
    llm.on_token = lambda index: signal.raise_signal(signal.SIGINT) if index == 1 else None
    llm, out = converse("hi", "/reset", "hi", llm=llm)
    assert out.startswith("Hello there …\n")
    assert llm.stream_closed
    assert len(llm.conversations) == 2


def test_a_second_ctrl_c_gives_up_on_an_engine_that_does_not_come_back() -> None:
    llm = FakeLLM()

    def twice(index: int) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    llm.on_token = twice
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        converse("hi", llm=llm)
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_twice_at_the_prompt_leaves_but_not_once() -> None:
    llm, _ = converse(KeyboardInterrupt, "hi", KeyboardInterrupt, KeyboardInterrupt, "never")
    assert len(llm.conversations) == 1


def test_stats_tell_tokens_pace_and_cache() -> None:
    _, out = converse("hi", stats=True)
    assert "[3 tokens, " in out
    assert "tokens/s" in out
    assert "1 of 4 prompt tokens cached]" in out


def test_the_command_reads_stdin_until_its_end(
    octavo_command: OctavoCommand, fake_llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    code, out, _ = octavo_command("chat", "some-model", "--temperature", 0, "--system", "Be brief.")
    assert (code, out) == (0, "Hello there!\n\n")
    assert fake_llm.last.config.model == "some-model"
    assert fake_llm.last.params == [SamplingParams(temperature=0.0, top_k=40, top_p=0.9, max_tokens=None)]


def test_what_neither_the_user_nor_the_model_says_of_sampling_is_as_in_ollama(
    octavo_command: OctavoCommand, fake_llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    ollamas: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
    for recommended in ({}, {"temperature": 0.3, "top_p": 0.5}):
        monkeypatch.setattr(fake_llm, "default_sampling", recommended)
        monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
        octavo_command("chat")
        assert fake_llm.last.params == [SamplingParams(**{**ollamas, **recommended}, max_tokens=None)]


def test_conversations_do_not_all_begin_with_the_same_answer(
    octavo_command: OctavoCommand, fake_llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, seed in (((), None), (("--seed", 7), 7)):
        monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
        octavo_command("chat", *options)
        assert fake_llm.last.config.seed == seed


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_greeted_and_its_lines_are_there_the_next_time(
    octavo_command: OctavoCommand, fake_llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    readline = pytest.importorskip("readline")
    readline.clear_history()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.stdin", FakeTerminal("hi\n"))
    _, out, _ = octavo_command("chat")
    summary, how, answer, *_ = out.splitlines()
    assert summary == "fake: 2,048 tokens of context"
    assert how == "Type a message; /? lists commands, Ctrl-C stops an answer, Ctrl-D or /bye leaves."
    assert answer == "> Hello there!"
    kept = tmp_path / "octavo" / "chat_history"
    assert kept.stat().st_mode & 0o777 == 0o600
    # input() adds lines to the history only where it reads a real terminal.
    kept.write_text("what was asked before\n")
    monkeypatch.setattr("sys.stdin", FakeTerminal(""))
    octavo_command("chat")
    assert readline.get_history_item(readline.get_current_history_length()) == "what was asked before"
    readline.clear_history()
    monkeypatch.setattr("sys.stdin", FakeTerminal(""))
    octavo_command("chat", "--no-history")
    assert readline.get_current_history_length() == 0
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("sys.stdin", FakeTerminal(""))
    code, _, err = octavo_command("chat")
    assert code == 0
    assert "chat_history cannot be kept: Not a directory)" in err


def test_the_tabulator_completes_commands() -> None:
    terminal = Terminal(commands=("/clear", "/set system ", "/set parameter "))
    assert [terminal._complete("/set", i) for i in range(3)] == ["/set system ", "/set parameter ", None]
    assert terminal._complete("", 0) is None


def test_lines_between_quotes_are_one_message() -> None:
    llm, _ = converse('"""one', "two", ' three"""', '"""four"""', '"""lost', KeyboardInterrupt, "five")
    assert [c[-1]["content"] for c in llm.conversations] == ["one\ntwo\n three", "four", "five"]


def test_parameters_change_for_the_answers_that_follow() -> None:
    lines = ("/set parameter temperature 0.2", "/set parameter num_predict 7", "/set parameter stop User:", "hi")
    llm, out = converse(*lines, "/show", "/set system Be brief.", "hi", "/show")
    assert llm.params[0] == SamplingParams(temperature=0.2, max_tokens=7, stop="User:")
    assert llm.conversations[1][0]["content"] == "Be brief."
    assert "2,048 tokens of context, 7 of them in use" in out
    assert "parameters  temperature 0.2, stop ('User:',), max_tokens 7" in out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set parameter temprature 1", "unknown parameter temprature; did you mean temperature?"),
        ("/set parameter n 2", "unknown parameter n"),
        ("/set parameter top_p 2", "error: top_p must be"),
        ("/set parameter top_p", "usage: /set system TEXT, or /set parameter NAME VALUE"),
        ("/set", "usage: /set system TEXT"),
    ],
)
def test_a_parameter_that_cannot_be_set_leaves_all_as_it_was(line: str, message: str) -> None:
    llm, out = converse(line, "hi")
    assert message in out
    assert llm.params == [SamplingParams(max_tokens=None)]
