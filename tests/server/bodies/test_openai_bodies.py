"""The bodies' fields and what becomes of each: none is taken and then forgotten."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from octavo.sampling_params import SamplingParams
from octavo.server.bodies.openai_bodies import SAMPLING_FIELDS, ChatBody, CompletionBody, GenerationBody
from octavo.server.bodies.validation import parse_body
from octavo.server.errors import ApiError

# Of SamplingParams' fields: what the bodies spell or mean otherwise, and so hand over one by one.
TRANSLATED = {"logit_bias", "max_tokens", "logprobs", "structured_outputs"}
# A server always turns tokens into text.
NOT_OFFERED = {"detokenize"}


def test_every_sampling_parameter_of_a_body_reaches_the_engine() -> None:
    parameters = {field.name for field in fields(SamplingParams)}
    assert parameters == {*SAMPLING_FIELDS, *TRANSLATED, *NOT_OFFERED}
    assert set(SAMPLING_FIELDS) == (parameters & GenerationBody.model_fields.keys()) - TRANSLATED


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
def test_what_a_body_lists_by_name_are_its_fields(body: type[GenerationBody]) -> None:
    for names in (body.unsupported, body.names, body.bulky, TRANSLATED, SAMPLING_FIELDS):
        assert set(names) <= body.model_fields.keys()


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
def test_every_text_of_a_body_is_bounded(body: type[GenerationBody]) -> None:
    """A new field that takes a text of any length must say which limit it falls under."""
    texts = {name for name, field in body.model_fields.items() if field.annotation in (str, str | None)}
    by_grammar = {"guided_regex", "guided_grammar", "guided_whitespace_pattern"}  # `check_structured_outputs`
    assert texts == {*body.names, "cache_salt", *by_grammar}


@pytest.mark.parametrize(("inside", "name"), [(None, "f0"), ("stream_options", "stream_options.f0")])
def test_thousands_of_unknown_fields_are_counted_before_the_body_is_validated(
    inside: str | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def validated(*args: Any) -> None:
        raise AssertionError("an error would be made for each field")

    monkeypatch.setattr(CompletionBody, "model_validate", validated)
    unknown = {f"f{i}": 1 for i in range(5000)}
    raw = json.dumps({"prompt": "x", **({inside: unknown} if inside else unknown)}).encode()
    with pytest.raises(ApiError, match=rf"supplied: {name}, .* and 4992 more") as refusal:
        parse_body(CompletionBody, raw, strict=True)
    assert refusal.value.param == name
