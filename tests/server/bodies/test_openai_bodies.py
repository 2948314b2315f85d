"""The bodies' fields and what becomes of each: none is taken and then forgotten."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.errors import RequestError
from octavo.option import options_of
from octavo.sampling_params import SamplingParams
from octavo.server.app import create_app
from octavo.server.bodies import body_reader
from octavo.server.bodies.fields import RequestBody, fields_of
from octavo.server.bodies.openai_bodies import ChatBody, CompletionBody, GenerationBody
from tests.server.bodies.test_random_bodies import reader
from tests.server.fake_engine import FakeEngine

ENDPOINTS = create_app(FakeEngine()).state.endpoints
BODIES = list(dict.fromkeys(endpoint.body for endpoint in ENDPOINTS if endpoint.body))
# A server always turns tokens into text.
NOT_OFFERED = {"detokenize"}
# Texts that a description of the output bounds by its bytes (`check_structured_outputs`), and prompts by their tokens.
OTHERWISE_BOUNDED = {"guided_regex", "guided_grammar", "guided_whitespace_pattern", "grammar", "instructions"}
PROMPTS = {"prompt", "content", "system", "input_prefix", "input_suffix"}


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
def test_a_body_takes_every_sampling_parameter(body: type[GenerationBody]) -> None:
    assert fields_of(body).keys() >= options_of(SamplingParams).keys() - NOT_OFFERED


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_every_text_of_a_body_is_bounded(body: type[RequestBody]) -> None:
    """A new field that takes a text of any length must say which limit it falls under."""
    for name, field in fields_of(body).items():
        is_text = [each.name for each in field.types] == ["string"] and not field.types[0].choices
        assert not is_text or field.limit or name in OTHERWISE_BOUNDED | PROMPTS, name


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_every_field_says_what_it_is(body: type[RequestBody]) -> None:
    for name, field in fields_of(body).items():
        assert field.help, name


@pytest.mark.parametrize(("inside", "name"), [(None, "f0"), ("stream_options", "stream_options.f0")])
def test_thousands_of_unknown_fields_are_counted_before_the_body_is_validated(
    inside: str | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def filled(*args: Any) -> None:
        raise AssertionError("the fields were checked first")

    monkeypatch.setattr(body_reader, "filled", filled)
    unknown = {f"f{i}": 1 for i in range(5000)}
    raw = json.dumps({"prompt": "x", **({inside: unknown} if inside else unknown)}).encode()
    with pytest.raises(RequestError, match=rf"^{name}, .* and 4992 more are not fields of this request") as refusal:
        reader(strict=True).completion(raw)
    assert refusal.value.param == name
