"""What is asked of llguidance."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from octavo.grammar import source
from octavo.structured_outputs import StructuredOutputsParams

_texts = st.sampled_from(
    ["a", "x" * 4095, "x" * 4097, "[a-z]{2,5000}", "a{1}{\n5000}", "{", '{"', '"', "\\", "{}", "é{ 9999"]
)
_schemas = st.recursive(
    st.builds(lambda text: {"type": "string", "pattern": text}, _texts),
    lambda inner: (
        st.builds(lambda name, each: {"type": "object", "properties": {name: each}}, _texts, inner)
        | st.builds(lambda each, more: {"anyOf": [each, more]}, inner, inner)
    ),
    max_leaves=4,
)


@given(schema=_schemas)
@example(schema={"const": "{"})
def test_long_runs_are_found_whether_a_glance_rules_them_out_or_not(schema: dict[str, Any]) -> None:
    wanted = StructuredOutputsParams(json=schema)
    texts = list(source._strings(schema))
    expected = any(len(text) > source._LONGEST_RUN or source._repetitions(text) > source._LONGEST_RUN for text in texts)
    assert source.may_force_long_runs(wanted) == expected


def test_a_large_schema_of_short_strings_is_seen_at_a_glance() -> None:
    names = {f"field_{i:04}": {"type": "string", "maxLength": 40} for i in range(500)}
    wanted = StructuredOutputsParams(json={"type": "object", "properties": names})
    assert isinstance(wanted.json, str)
    assert source._has_short_strings(wanted.json)


def test_only_formats_that_annotate_are_left_out() -> None:
    schema = {"properties": {"at": {"type": "string", "format": "uuid"}, "to": {"type": "string", "format": "color"}}}
    lark = source.to_lark(StructuredOutputsParams(json=schema))
    assert '"format": "uuid"' in lark
    assert "color" not in lark


def test_objects_are_closed_where_that_is_asked_for() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {}}}}
    lark = source.to_lark(StructuredOutputsParams(json=schema, disable_additional_properties=True))
    assert lark.count('"additionalProperties": false') == 2
    assert "additionalProperties" not in source.to_lark(StructuredOutputsParams(json=schema))
