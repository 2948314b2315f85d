"""Answers that must call: what a model of random weights says under each format's grammar is a call, always."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from octavo.dialect.constraint import calls_grammar
from octavo.dialect.events import Arguments, CallBegins, Content, Reasoning
from octavo.dialect.formats import CALL_FORMATS, CallFormat, call_format, reasoning_format
from octavo.dialect.parser import Dialect, OutputParser
from octavo.engine.core import EngineCore
from octavo.request import FinishReason
from octavo.sampling_params import SamplingParams
from octavo.structured_outputs import StructuredOutputsParams
from tests.engine.tiny_engine import assert_drained, tiny_core

CITIES = ["Paris", "New York"]
WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"$ref": "#/$defs/city"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "where": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        },
        "required": ["days"],
        "additionalProperties": False,
        "$defs": {"city": {"enum": CITIES}},
    },
}
STOP = {"name": "stop"}
TYPES: dict[str, dict[str, str]] = {"get_weather": {"days": "integer", "where": "array"}, "stop": {}}


# One format of each form; their marks are in `tests/dialect/test_detection.py`.
FORMATS = list({(each.form, each.unmarked): each for each in reversed(CALL_FORMATS)}.values())


@pytest.fixture(scope="module")
def core() -> Iterator[EngineCore]:
    with tiny_core() as core:
        yield core


def said(core: EngineCore, grammar: str, seed: int) -> tuple[str, FinishReason | None]:
    params = SamplingParams(max_tokens=400, seed=seed, structured_outputs=StructuredOutputsParams(grammar=grammar))
    core.add(core.inputs.make([1, 2, 3], params))
    while core.has_work:
        for output in core.step():
            if output.finished:
                assert_drained(core)
                return output.outputs[0].text, output.outputs[0].finish_reason
    raise AssertionError("it never ended")


def calls_in(text: str, dialect: Dialect) -> tuple[list[tuple[str, dict[str, Any]]], str]:
    """The calls of a text, and its reasoning; there is nothing else in it."""
    parser = OutputParser(dialect)
    names, arguments, reasoning = [], [], ""
    for event in [*parser.feed(text), *parser.finish()]:
        assert not isinstance(event, Content), (text, event)
        if isinstance(event, CallBegins):
            names.append(event.name)
            arguments.append("")
        elif isinstance(event, Arguments):
            arguments[-1] += event.text
        elif isinstance(event, Reasoning):
            reasoning += event.text
    return [(name, json.loads(given)) for name, given in zip(names, arguments, strict=True)], reasoning


def check(name: str, arguments: dict[str, Any]) -> None:
    if name == "stop":
        assert arguments == {}
        return
    assert name == "get_weather"
    assert set(arguments) <= {"city", "days", "where"}
    assert 1 <= arguments["days"] <= 9
    assert arguments.get("city", "Paris") in CITIES
    assert all(isinstance(each, bool) for each in arguments.get("where", []))


@pytest.mark.parametrize("parallel", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("calls", FORMATS, ids=lambda each: each.name)
def test_an_answer_that_must_call_does_and_nothing_else(core: EngineCore, calls: CallFormat, parallel: bool) -> None:
    grammar = calls_grammar(calls, [WEATHER, STOP], parallel=parallel)
    for seed in range(4):
        text, reason = said(core, grammar, seed)
        if parallel and reason is FinishReason.LENGTH:
            continue  # one call after the other, until it was cut off
        assert reason is FinishReason.STOP
        found, _ = calls_in(text, Dialect(calls, tools=TYPES))
        assert found
        assert parallel or len(found) == 1
        for name, arguments in found:
            check(name, arguments)


@pytest.mark.parametrize("calls", FORMATS, ids=lambda each: each.name)
def test_a_named_call_is_of_that_tool(core: EngineCore, calls: CallFormat) -> None:
    text, _ = said(core, calls_grammar(calls, [STOP], parallel=False), 0)
    assert calls_in(text, Dialect(calls, tools=TYPES))[0] == [("stop", {})]


@pytest.mark.slow
@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize(("name", "thinks"), [("qwen3_xml", "qwen3"), ("solar_open",) * 2, ("openai", "openai_gptoss")])
def test_reasoning_comes_before_a_call_that_must_be_made(
    core: EngineCore, name: str, thinks: str, is_open: bool
) -> None:
    calls, reasoning = call_format(name), reasoning_format(thinks, None)
    assert calls is not None
    speaks = Dialect(calls, reasoning, in_reasoning=is_open and not calls.channels, tools=TYPES)
    grammar = calls_grammar(calls, [STOP], parallel=False, reasoning=speaks.reasoning_part(calls=True))
    for seed in range(4):
        text, reason = said(core, grammar, seed)
        found, _ = calls_in(text, speaks)
        assert (found == [("stop", {})]) is (reason is FinishReason.STOP)


JSON_AFTER = StructuredOutputsParams(json={"enum": [1, 22]}, disable_any_whitespace=True)


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize(
    ("wanted", "answer"),
    [
        (JSON_AFTER, "22"),
        (StructuredOutputsParams(regex="[ab]{3}"), "abb"),
        (StructuredOutputsParams(choice=["yes", "no"]), "no"),
        (StructuredOutputsParams(grammar='start: "(" start ")" | "x"'), "((x))"),
        (StructuredOutputsParams(json_object=True), '{"a": {}}'),
    ],
)
@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_the_grammar_of_an_answer_begins_after_its_reasoning(
    core: EngineCore, wanted: StructuredOutputsParams, answer: str, kind: str, is_open: bool
) -> None:
    thinks = reasoning_format(kind, None)
    assert thinks is not None
    part = Dialect(None, thinks, in_reasoning=is_open).reasoning_part()
    grammar = core.inputs.grammars.begin(replace(wanted, reasoning=part))

    def fits(text: str) -> bool:
        token_ids = core.tokenizer.encode(text, add_special_tokens=False)
        matcher = grammar.result().matcher.deep_copy()
        return bool(matcher.consume_tokens(token_ids)) and bool(matcher.is_accepting())

    begin = "" if is_open else thinks.opening
    assert fits(f"{begin}\nHm, <b> </thin [k. {{}}\n{thinks.closing}\n\n{answer}")
    assert fits(f"{begin}{thinks.closing}{answer}")
    assert fits(answer) is not is_open
    assert not fits(f"{begin}Hm.{thinks.closing}Well, {answer}")
    assert not fits(f"{begin}Hm. {answer}")


def test_an_answer_whose_reasoning_is_over_has_none() -> None:
    assert Dialect(None, reasoning_format("qwen3", None), has_reasoned=True).reasoning_part() is None
    assert Dialect().reasoning_part() is None
