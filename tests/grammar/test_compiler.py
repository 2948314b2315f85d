"""Grammars compiled for a model."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import normalizers

from octavo.checkpoint.model_source import resolve_model
from octavo.errors import RequestError
from octavo.grammar import trial
from octavo.grammar.compiler import GrammarCompiler
from octavo.grammar.source import to_lark
from octavo.grammar.trial import TrialFailedError
from octavo.structured_outputs import StructuredOutputsParams
from octavo.text.tokenizer import Tokenizer
from tests.engine.tiny_engine import VOCAB_SIZE, tiny_model


def tiny_tokenizer() -> Tokenizer:
    return Tokenizer.from_source(resolve_model(str(tiny_model())))


WANTED = StructuredOutputsParams(choice=["yes", "no"])


def test_the_tokenizer_is_read_once_ahead_of_the_first_grammar() -> None:
    read = []

    def load() -> Tokenizer:
        read.append(1)
        return Tokenizer.from_source(resolve_model(str(tiny_model())))

    compiler = GrammarCompiler(load, VOCAB_SIZE, frozenset({2}), 10_000)
    assert not read
    for prepared in [compiler.prepare() for _ in range(3)]:
        prepared.result()
    assert len(read) == 1
    assert not compiler.compile(WANTED).matcher.is_error()
    assert len(read) == 1


def with_a_space_before_texts(tokenizer: Tokenizer) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(" ")])
    return Tokenizer(backend)


@pytest.mark.parametrize("change", [lambda tokenizer: tokenizer, with_a_space_before_texts])
def test_llguidance_reads_what_it_would_read_in_the_tokenizers_json(change: Callable[[Tokenizer], Tokenizer]) -> None:
    tokenizer = change(tiny_tokenizer())
    compiler = GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, frozenset({2}), 10_000)
    compiler.prepare().result()
    read = compiler._vocabulary.tokenizer
    expected = LLTokenizer(tokenizer.to_json(), n_vocab=VOCAB_SIZE, eos_token=[2])
    for token_id in range(VOCAB_SIZE):
        assert read.decode_bytes([token_id]) == expected.decode_bytes([token_id])
        assert read.is_special_token(token_id) == expected.is_special_token(token_id)
    for text in ("a", '{"name": "Ünïcode"}', " \n\t[1, 2]", "<|endoftext|>"):
        assert read.tokenize_str(text) == expected.tokenize_str(text)
    assert (read.eos_tokens, read.is_canonical) == (expected.eos_tokens, expected.is_canonical)


def test_a_model_without_a_tokenizer_refuses_grammars_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "octavo")
    compiler = GrammarCompiler(lambda: None, VOCAB_SIZE, frozenset({2}), 10_000)
    compiler.prepare().result()
    assert "no structured outputs: structured output needs a tokenizer" in caplog.text
    with pytest.raises(RequestError, match="needs a tokenizer"):
        compiler.compile(WANTED)


# Their intersections take llguidance minutes, whatever its limits.
ENDLESS = [
    StructuredOutputsParams(json={"type": "string", "allOf": [{"pattern": f"{c}.{{{i}}}b"} for i in range(1, 40)]})
    for c in "acd"
]


@pytest.mark.slow
def test_grammars_that_would_take_minutes_keep_neither_a_thread_nor_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine, the niced processes take tens of seconds to start.
    monkeypatch.setattr("octavo.grammar.compiler.PATIENCE", 600.0)
    compiler = GrammarCompiler(tiny_tokenizer, VOCAB_SIZE, frozenset({2}), 100)
    for wanted in ENDLESS:  # more than there are threads
        with pytest.raises(RequestError, match="takes more than 100 ms, the most allowed"):
            compiler.compile(wanted)
    # Had they gone on, this would wait for a thread for minutes.
    compiler._max_ms = 60_000
    assert not compiler.compile(WANTED).matcher.is_error()


def test_a_process_that_takes_too_long_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_idle", [])
    trial.try_compiling('start: "a"', 60.0)
    (process,) = trial._idle
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == min(19, own + trial.NICENESS)
    with pytest.raises(TrialFailedError) as failed:
        trial.try_compiling(to_lark(ENDLESS[0]), 0.1)
    assert failed.value.too_slow
    assert trial._idle == []
    assert not process.is_usable
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_time_without_the_processor_counts_up_to_ten_times_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_idle", [])
    trial.try_compiling('start: "a"', 60.0)
    (process,) = trial._idle
    os.kill(process.pid, signal.SIGSTOP)
    threading.Timer(1.2, os.kill, (process.pid, signal.SIGCONT)).start()
    trial.try_compiling('start: "b"', 1.0)
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(TrialFailedError) as failed:
        trial.try_compiling('start: "c"', 0.01)
    assert failed.value.too_slow


def test_a_process_that_takes_too_much_memory_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # Doubled sixty times; llguidance's own limit would meet it at 100 MB.
    lark = "start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(60)) + '\nR60: "a"\n'
    monkeypatch.setattr(trial, "MEMORY", 1 << 20)
    monkeypatch.setattr(trial, "_idle", [])
    compiler = GrammarCompiler(tiny_tokenizer, VOCAB_SIZE, frozenset({2}), 60_000)
    with pytest.raises(RequestError, match="takes more than 512 MiB of memory"):
        compiler.compile(StructuredOutputsParams(grammar=lark))


def test_a_tenants_grammars_are_compiled_anew_for_others() -> None:
    compiler = GrammarCompiler(tiny_tokenizer, VOCAB_SIZE, frozenset({2}), 60_000)
    tried: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("octavo.grammar.compiler.try_compiling", lambda lark, seconds: tried.append(lark))
        first = compiler.begin(WANTED, "ada").result()
        assert compiler.known(WANTED, "ada") is first
        assert compiler.known(WANTED, "ben") is None
        assert compiler.begin(WANTED, "ben").result() is first  # one in memory, though it took its time
    assert len(tried) == 2
    assert compiler.in_use(WANTED).result() is first


def test_a_grammar_that_was_refused_for_its_time_may_be_tried_again() -> None:
    compiler = GrammarCompiler(tiny_tokenizer, VOCAB_SIZE, frozenset({2}), 60_000)
    begun: list[str] = []

    def fails(lark: str, seconds: float) -> None:
        begun.append(lark)
        if len(begun) == 1:
            raise TrialFailedError(too_slow=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("octavo.grammar.compiler.try_compiling", fails)
        with pytest.raises(RequestError, match="takes more than 60000 ms"):
            compiler.compile(WANTED)
        assert compiler.compile(WANTED)
    assert len(begun) == 2


def test_a_grammar_whose_first_token_may_be_read_in_too_many_ways_is_refused(compiler: GrammarCompiler) -> None:
    def rules(count: int) -> StructuredOutputsParams:
        names = [f"a{i}" for i in range(count)]
        lines = ["start: " + " | ".join(names), *(f'{name}: "yes" {name}' for name in names)]
        return StructuredOutputsParams(grammar="\n".join(lines))

    with pytest.raises(RequestError, match=r"Current row has \d+ items; max is 250"):
        compiler.compile(rules(300))
    assert compiler.compile(StructuredOutputsParams(choice=[f"word {i}" for i in range(3000)]))


def matches(compiler: GrammarCompiler, schema: dict[str, Any], value: object) -> bool:
    matcher = compiler.compile(StructuredOutputsParams(json=schema)).matcher.deep_copy()
    encoded = compiler._vocabulary.tokenizer.tokenize_str(json.dumps(value))
    return bool(matcher.consume_tokens(encoded)) and bool(matcher.is_accepting())


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tiny_tokenizer, VOCAB_SIZE, frozenset({2}), 60_000)


@given(value=st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=-9, minutes=-30))])))
@settings(max_examples=30)
@example(value=datetime(2024, 2, 29, tzinfo=UTC))
@example(value=datetime(1, 1, 1, tzinfo=UTC))
def test_every_date_and_time_that_python_writes_may_be_written(compiler: GrammarCompiler, value: datetime) -> None:
    assert matches(compiler, {"format": "date-time"}, value.isoformat())
    assert matches(compiler, {"format": "date"}, value.date().isoformat())
    assert matches(compiler, {"format": "time"}, value.timetz().isoformat())


@pytest.mark.parametrize(
    ("form", "value"),
    [
        ("date", "2023-02-29"),
        ("date", "1900-02-29"),
        ("date", "0000-01-01"),
        ("date", "2023-04-31"),
        ("date-time", "2023-02-29T00:00:00Z"),
        ("date-time", "2023-01-01T10:11:60Z"),
        ("date-time", "2023-01-01T10:11:12"),
        ("time", "24:00:00Z"),
        ("time", "10:11:60Z"),
    ],
)
def test_no_date_or_time_is_written_that_does_not_exist(compiler: GrammarCompiler, form: str, value: str) -> None:
    schema = {"type": "object", "properties": {"at": {"type": "string", "format": form}}, "required": ["at"]}
    assert not matches(compiler, schema, {"at": value})
    assert matches(compiler, {"const": {"format": form}}, {"format": form})


def test_a_pattern_holds_beside_a_format(compiler: GrammarCompiler) -> None:
    schema = {"type": "string", "format": "date", "pattern": "^19", "allOf": [{"pattern": "7$"}]}
    values = ["1990-01-07", "2990-01-07", "1990-01-08", "1990-02-37"]
    assert [value for value in values if matches(compiler, schema, value)] == ["1990-01-07"]


def test_a_large_schema_leaves_the_interpreter_to_others_while_it_is_compiled() -> None:
    import threading

    compiler = GrammarCompiler(
        lambda: Tokenizer.from_source(resolve_model(str(tiny_model()))), VOCAB_SIZE, frozenset({2}), 60_000
    )
    compiler.prepare().result()
    names = {f"field_{i:04}": {"type": "string", "maxLength": 40} for i in range(900)}
    # So many that may be left out could not be followed.
    schema = {"type": "object", "properties": names, "required": list(names)}
    future = compiler.begin(StructuredOutputsParams(json=schema))
    turns = 0
    pause = threading.Event()
    while not future.done():
        pause.wait(0.0005)
        turns += 1
    assert future.result().matcher is not None
    assert turns > 5  # of this thread, which would have had none
