from __future__ import annotations

import io
import signal
from typing import Any

import pytest

from octavo.commands.chat import Conversation
from octavo.sampling_params import SamplingParams
from tests.commands.conftest import OctavoCommand
from tests.commands.fake_llm import FakeLLM


def converse(*lines: str | type[KeyboardInterrupt], llm: Any = None, **keywords: Any) -> tuple[FakeLLM, str]:
    """Feed lines (an exception class is raised instead) until the end of input; (llm, what was printed)."""
    llm = llm or FakeLLM()
    out = io.StringIO()
    script = iter([*lines, EOFError])

    def read() -> str:
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
    llm, _ = converse("hi", "/reset", "again", system="Be brief.")
    assert [m["content"] for m in llm.conversations[1]] == ["Be brief.", "again"]


def test_exit_leaves_and_nothing_after_it_is_read() -> None:
    llm, _ = converse("/exit", "hi")
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
    assert fake_llm.last.params == [SamplingParams(temperature=0.0, max_tokens=None)]
