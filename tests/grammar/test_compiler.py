"""Grammars compiled for a model."""

from __future__ import annotations

import logging

import pytest

from octavo.checkpoint.model_source import resolve_model
from octavo.config import EngineConfig
from octavo.engine.builder import build_engine
from octavo.errors import RequestError
from octavo.grammar.compiler import GrammarCompiler
from octavo.structured_outputs import StructuredOutputsParams
from octavo.text.tokenizer import Tokenizer
from tests.engine.tiny_engine import VOCAB_SIZE, tiny_model

WANTED = StructuredOutputsParams(choice=["yes", "no"])


def test_the_tokenizer_is_read_once_ahead_of_the_first_grammar() -> None:
    read = []

    def load() -> Tokenizer:
        read.append(1)
        return Tokenizer.from_source(resolve_model(str(tiny_model())))

    compiler = GrammarCompiler(load, VOCAB_SIZE, frozenset({2}), 10_000)
    assert not read
    compiler.prepare()
    assert len(read) == 1
    assert not compiler.compile(WANTED).matcher.is_error()
    assert len(read) == 1


@pytest.mark.parametrize("prepare", [False, True])
def test_an_engine_that_serves_reads_the_tokenizer_for_grammars_while_it_loads(
    prepare: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[GrammarCompiler] = []
    monkeypatch.setattr(GrammarCompiler, "prepare", lambda compiler: prepared.append(compiler))
    config = EngineConfig(model=str(tiny_model()), dtype="float32", num_threads=1, num_blocks=20)
    core = build_engine(config, prepare_grammars=prepare)
    core.close()
    assert prepared == ([core.inputs.grammars] if prepare else [])


def test_a_model_without_a_tokenizer_refuses_grammars_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "octavo")
    compiler = GrammarCompiler(lambda: None, VOCAB_SIZE, frozenset({2}), 10_000)
    compiler.prepare()
    assert "no structured outputs: structured output needs a tokenizer" in caplog.text
    with pytest.raises(RequestError, match="needs a tokenizer"):
        compiler.compile(WANTED)


def test_a_grammar_whose_first_token_may_be_read_in_too_many_ways_is_refused() -> None:
    tokenizer = Tokenizer.from_source(resolve_model(str(tiny_model())))
    compiler = GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, frozenset({2}), 10_000)
    with pytest.raises(RequestError, match="Current row has 601 items; max is 500"):
        compiler.compile(StructuredOutputsParams(choice=["yes"] * 600))
    assert compiler.compile(StructuredOutputsParams(choice=["yes"] * 400))


def test_a_large_schema_leaves_the_interpreter_to_others_while_it_is_compiled() -> None:
    import threading

    compiler = GrammarCompiler(
        lambda: Tokenizer.from_source(resolve_model(str(tiny_model()))), VOCAB_SIZE, frozenset({2}), 60_000
    )
    compiler.prepare()
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
