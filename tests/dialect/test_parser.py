"""The parser on every format: whole, at every split, cut off anywhere, and on what only looks like a call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.dialect.events import Arguments, CallBegins, Content, Reasoning
from octavo.dialect.formats import (
    CALL_FORMATS,
    PYTHON_LIST,
    CallForm,
    CallFormat,
    call_format,
    json_calls,
    reasoning_format,
)
from octavo.dialect.parser import Dialect, OutputParser
from octavo.dialect.writing import write_calls

TOOLS = {
    "get_weather": {"city": "string", "days": "integer", "where": "object"},
    "stop": {},
    "write": {"text": "string", "lines": "array", "strict": "boolean"},
}
Call = tuple[str, dict[str, Any]]


def dialect(name: str, reasoning: str = "none", *, in_reasoning: bool = False) -> Dialect:
    return Dialect(call_format(name), reasoning_format(reasoning, None), in_reasoning, TOOLS)


class Told:
    """What a parser's events add up to."""

    def __init__(self, written: str) -> None:
        self.written = written
        self.content = self.reasoning = ""
        self.names: list[str] = []
        self.arguments: list[str] = []

    def add(self, events: list[Any]) -> None:
        for event in events:
            match event:
                case Content(text, end):
                    self.content += text
                    assert self.written[end - len(text) : end] == text
                case Reasoning(text, end):
                    self.reasoning += text
                    assert self.written[end - len(text) : end] == text
                case CallBegins(index, name, _):
                    assert index == len(self.names)
                    self.names.append(name)
                    self.arguments.append("")
                case Arguments(index, text):
                    assert index == len(self.names) - 1
                    assert text
                    self.arguments[index] += text

    @property
    def calls(self) -> list[Call]:
        return [(name, json.loads(text)) for name, text in zip(self.names, self.arguments, strict=True)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Told) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return repr(vars(self))


def parsed(spoken: Dialect, *pieces: str) -> Told:
    parser, told = OutputParser(spoken), Told("".join(pieces))
    for piece in pieces:
        told.add(parser.feed(piece))
    told.add(parser.finish())
    assert parser.num_calls == len(told.names)
    return told


def written(name: str, calls: list[Call]) -> str:
    """As a model of that format writes calls."""
    objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
    if name == "hermes":
        return "\n".join(f"<tool_call>\n{json.dumps(each)}\n</tool_call>" for each in objects)
    if name == "qwen3_xml":
        return "\n".join(
            f"<tool_call>\n<function={called}>\n"
            + "".join(f"<parameter={key}>\n{_xml(value)}\n</parameter>\n" for key, value in arguments.items())
            + "</function>\n</tool_call>"
            for called, arguments in calls
        )
    if name == "mistral":
        return f"[TOOL_CALLS]{json.dumps(objects)}"
    if name == "mistral_named":
        return "".join(f"[TOOL_CALLS]{called}[ARGS]{json.dumps(arguments)}" for called, arguments in calls)
    if name == "llama3_json":
        return "; ".join(json.dumps({"name": called, "parameters": arguments}) for called, arguments in calls)
    if name in _WRITE_ONE:
        opening, write, separator, closing = _WRITE_ONE[name]
        return opening + separator.join(write(called, arguments) for called, arguments in calls) + closing
    assert name == "pythonic"
    return "[" + ", ".join(f"{called}({_keywords(arguments)})" for called, arguments in calls) + "]"


def _dsml(called: str, arguments: dict[str, Any]) -> str:
    values = (
        f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">{_xml(value)}'
        "</｜DSML｜parameter>\n"
        for key, value in arguments.items()
    )
    return f'<｜DSML｜invoke name="{called}">\n{"".join(values)}</｜DSML｜invoke>\n'


def _gemma(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


_SEP = "<｜tool▁sep｜>"
# Opening, one call, separator and closing, as the models' chat templates write them.
_WRITE_ONE: dict[str, tuple[str, Any, str, str]] = {
    "glm45": (
        "<tool_call>",
        lambda called, arguments: (
            f"{called}\n"
            + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{_xml(v)}</arg_value>\n" for k, v in arguments.items())
        ),
        "</tool_call>\n<tool_call>",
        "</tool_call>",
    ),
    "seed_oss": (
        "<seed:tool_call>\n",
        lambda called, arguments: (
            f"<function={called}>\n"
            + "".join(f"<parameter={k}>{_xml(v)}</parameter>\n" for k, v in arguments.items())
            + "</function>\n"
        ),
        "</seed:tool_call>\n<seed:tool_call>\n",
        "</seed:tool_call>",
    ),
    "minimax_m2": (
        "<minimax:tool_call>\n",
        lambda called, arguments: (
            f'<invoke name="{called}">\n'
            + "".join(f'<parameter name="{k}">{_xml(v)}</parameter>\n' for k, v in arguments.items())
            + "</invoke>\n"
        ),
        "",
        "</minimax:tool_call>",
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        lambda called, arguments: f"function{_SEP}{called}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>",
        "\n<｜tool▁call▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜>",
        lambda called, arguments: f"<｜tool▁call▁begin｜>{called}{_SEP}{json.dumps(arguments)}<｜tool▁call▁end｜>",
        "",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": ("<｜DSML｜function_calls>\n", _dsml, "", "</｜DSML｜function_calls>"),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        lambda called, arguments: (
            f"<|tool_call_begin|>functions.{called}:3<|tool_call_argument_begin|>"
            f"{json.dumps(arguments)}<|tool_call_end|>"
        ),
        "",
        "<|tool_calls_section_end|>",
    ),
    "cohere_command3": (
        "<|START_ACTION|>[\n",
        lambda called, arguments: json.dumps({"tool_call_id": "0", "tool_name": called, "parameters": arguments}),
        ",\n",
        "\n]<|END_ACTION|>",
    ),
    "granite": (
        "<|tool_call|>[",
        lambda called, arguments: json.dumps({"name": called, "arguments": arguments}),
        ", ",
        "]",
    ),
    "lfm2": (
        "<|tool_call_start|>[",
        lambda called, arguments: f"{called}({_keywords(arguments)})",
        ", ",
        "]<|tool_call_end|>",
    ),
    "gemma4": (
        "<|tool_call>",
        lambda called, arguments: f"call:{called}{_gemma(arguments)}",
        "<tool_call|><|tool_call>",
        "<tool_call|>",
    ),
    "openai": (
        "<|channel|>commentary to=functions.",
        lambda called, arguments: f"{called} <|constrain|>json<|message|>{json.dumps(arguments)}",
        "<|call|><|start|>assistant<|channel|>commentary to=functions.",
        "<|call|>",
    ),
}


def _xml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _keywords(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


XML = "<tool_call><function={}><parameter={}>{}</parameter></function></tool_call>"
NAMES = ["hermes", "qwen3_xml", "mistral", "mistral_named", "llama3_json", "pythonic", *_WRITE_ONE]
EXAMPLES: list[list[Call]] = [
    [("get_weather", {"city": "Paris", "days": 3, "where": {"lat": 48.5, "tags": ["a", None, True]}})],
    [("stop", {}), ("write", {"text": 'say "hi"\n<b>{x}</b> \\ \U0001f989', "lines": [], "strict": False})],
]


def spoken(name: str) -> Dialect:
    return dialect(name.removesuffix("_named"))


UNQUOTED = ("qwen3_xml", "glm45", "seed_oss", "minimax_m2", "deepseek_v32", "gemma4", "pythonic", "lfm2")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("calls", EXAMPLES)
def test_calls_are_read_alike_at_every_split(name: str, calls: list[Call]) -> None:
    text = written(name, calls)
    whole = parsed(spoken(name), text)
    assert whole.calls == calls
    assert whole.content == ""
    for cut in range(len(text) + 1):
        assert parsed(spoken(name), text[:cut], text[cut:]) == whole
    assert parsed(spoken(name), *text) == whole


@pytest.mark.parametrize("name", ["hermes", "qwen3_xml", "mistral", "mistral_named"])
def test_text_around_marked_calls_is_content_without_the_spaces_beside_them(name: str) -> None:
    text = "Let me look: <tool [TOOL 1 < 2\n\n" + written(name, EXAMPLES[1]) + "\n"
    whole = parsed(spoken(name), text)
    assert (whole.calls, whole.content) == (EXAMPLES[1], "Let me look: <tool [TOOL 1 < 2")
    for cut in range(len(text) + 1):
        assert parsed(spoken(name), text[:cut], text[cut:]) == whole
    after = parsed(spoken(name), text + "That was it.")
    assert (after.calls, after.content) == (EXAMPLES[1], whole.content + "\nThat was it.")


@pytest.mark.parametrize("name", NAMES)
def test_arguments_come_as_they_are_read(name: str) -> None:
    text = written(name, [("write", {"text": "a long text " * 20})])
    parser, told = OutputParser(spoken(name)), Told(text)
    for piece in (text[: len(text) // 2], text[len(text) // 2 :]):
        told.add(parser.feed(piece))
        assert told.names == ["write"]
        assert "a long text a long" in told.arguments[0]
    assert parser.finish() == []


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_is_cut_off_anywhere_is_read_without_a_loss(name: str) -> None:
    """What has begun is a call with what there was of its arguments; what has not is content, whole."""
    text = written(name, EXAMPLES[0])
    complete = parsed(spoken(name), text).arguments[0]
    for cut in range(len(text)):
        told = parsed(spoken(name), text[:cut])
        if told.names:
            assert told.names == ["get_weather"]
            assert told.content == ""
            given = told.arguments[0].replace(" ", "")
            # A message without arguments, which harmony's closing mark may have ended, is a call without any.
            assert complete.startswith(given) or name in UNQUOTED or (name, given) == ("openai", "{}")
        elif name != "openai":  # harmony's headers are no content
            assert told.content == text[:cut]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>not json</tool_call>"),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f" "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '  <tool_call>\n {"name": "f", "arguments": "no object"}'),
        ("hermes", "<tool_call><tool_call"),
        ("qwen3_xml", "<tool_call>\n<function stop>\n</tool_call>"),
        ("qwen3_xml", "<tool_call>\n<function=a\nb></function></tool_call>"),
        ("mistral", "[TOOL_CALLS] {}"),
        ("mistral", "[TOOL_CALLS][1]"),
        ("mistral", "[TOOL_CALLS]f[OTHER]{}"),
        ("mistral", "[TOOL_CALLS]f and more"),
        ("llama3_json", '{"name": "Bob", "parameters": {}}'),
        ("llama3_json", '{"age": 3}'),
        ("llama3_json", '{"name": "stop", "parameters"'),
        ("llama3_json", 'Look: {"name": "stop", "parameters": {}}'),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[unknown(a=1)]"),
        ("pythonic", "[stop, stop]"),
        ("pythonic", "Look: [stop()]"),
        ("pythonic", "[" * 200),
    ],
)
def test_text_that_is_not_a_call_is_content_and_none_of_it_is_lost(name: str, text: str) -> None:
    for told in (parsed(dialect(name), text), parsed(dialect(name), *text)):
        assert (told.names, told.content) == ([], text)


@pytest.mark.parametrize(
    ("name", "text", "arguments", "content"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>', '{"a":', " oops}}</tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}} and so', '{"a":1}', " and so"),
        ("hermes", '<tool_call>{"name":"f","arguments":{"a":' + "[" * 65, '{"a":' + "[" * 63, "[["),
        ("qwen3_xml", "<tool_call><function=f><parameter=a>1</parameter>oops", '{"a":1', "oops"),
        ("pythonic", "[stop(1)]", "", "1)]"),
        ("llama3_json", '{"name": "stop", "parameters": {}} Done.', "{}", "Done."),
    ],
)
def test_where_arguments_break_off_the_rest_is_content(name: str, text: str, arguments: str, content: str) -> None:
    for told in (parsed(dialect(name), text), parsed(dialect(name), *text)):
        assert told.arguments == [arguments]
        assert told.content == content


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "id": 7, "name": "f"}</tool_call>', [("f", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", {})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", {})]),
        ("hermes", '<tool_call>{"name":"f","arguments":{"a":"\n\\ud83e\\udd89\\ud800"}}', [("f", {"a": "\n\U0001f989\ufffd"})]),  # noqa: E501
        ("hermes", '<tool_call>{x<tool_call>{"name": "f"}</tool_call>', [("f", {})]),
        ("qwen3_xml", XML.format("f", "a", "True"), [("f", {"a": True})]),
        ("qwen3_xml", XML.format("f", "a", "NaN"), [("f", {"a": "NaN"})]),
        ("qwen3_xml", XML.format("write", "text", "1"), [("write", {"text": "1"})]),
        ("mistral", '[TOOL_CALLS]f{"a": 1}', [("f", {"a": 1})]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}', [("f", {"a": 1})]),
        ("minicpm5", '<function name="f"><param name="a"><![CDATA[<b>]]></param></function>', [("f", {"a": "<b>"})]),
        ("hermes", '<tool_call>{"name": "f"}\n{"name": "stop"}</tool_call>', [("f", {}), ("stop", {})]),
        ("llama3_json", '{"name": "stop", "parameters": {}}{"name": "stop"}', [("stop", {}), ("stop", {})]),
        ("olmo3", "<function_calls>\nstop()\nf(a=1)\n</function_calls>", [("stop", {}), ("f", {"a": 1})]),
        ("llama3_json", '<|python_tag|>{"name": "other", "parameters": {}}', [("other", {})]),
        ("llama3_json", '{"type": "function", "name": "stop", "parameters": {}}', [("stop", {})]),
        ("pythonic", "[write(text='it\\'s \\d', lines=(1, 2,),)]", [("write", {"text": "it's \\d", "lines": [1, 2]})]),
    ],
)  # fmt: skip
def test_what_models_write_beside_the_rule_is_read_all_the_same(name: str, text: str, calls: list[Call]) -> None:
    for told in (parsed(dialect(name), text), parsed(dialect(name), *text)):
        assert told.calls == calls


@pytest.mark.parametrize("in_reasoning", [False, True])
def test_reasoning_is_told_apart_at_every_split(in_reasoning: bool) -> None:
    text = "\nHm, <b> </thin k. \n</think>\n\nYes.\n" + written("hermes", EXAMPLES[0])
    text = text if in_reasoning else "<think>" + text
    speaks = dialect("hermes", "deepseek_r1", in_reasoning=in_reasoning)
    whole = parsed(speaks, text)
    assert (whole.reasoning, whole.content, whole.calls) == ("Hm, <b> </thin k.", "Yes.", EXAMPLES[0])
    for cut in range(len(text) + 1):
        assert parsed(speaks, text[:cut], text[cut:]) == whole


@pytest.mark.parametrize(
    ("name", "text", "call_id"),
    [
        ("kimi_k2", written("kimi_k2", EXAMPLES[0]), "functions.get_weather:3"),
        ("mistral", '[TOOL_CALLS]stop[CALL_ID]123456789[ARGS]{"a": 1}', "123456789"),
        ("solar_open", "<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>stop<|tool_call:args|>{}", "a1"),
        ("hermes", '<tool_call>{"id": "1", "name": "f"}</tool_call>', ""),
    ],
)
def test_the_id_that_a_model_writes_beside_a_name_is_the_calls(name: str, text: str, call_id: str) -> None:
    begun = [event for event in OutputParser(dialect(name)).feed(text) if isinstance(event, CallBegins)]
    assert [event.id for event in begun] == [call_id]


def test_a_mark_that_ends_reasoning_before_any_is_no_content() -> None:
    assert parsed(dialect("none", "qwen3"), "</think>Yes.").content == "Yes."
    assert parsed(dialect("none", "qwen3"), "<think></think>Yes.").content == "Yes."


def test_a_model_that_does_not_reason_may_call_at_once() -> None:
    text = written("hermes", EXAMPLES[0])
    assert parsed(dialect("hermes", "qwen3"), text).calls == EXAMPLES[0]
    assert parsed(dialect("none", "qwen3"), "<thin ice").content == "<thin ice"
    assert parsed(dialect("none", "qwen3", in_reasoning=True), "to no end").reasoning == "to no end"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
names = st.sampled_from(sorted(TOOLS))
keys = st.from_regex(r"[a-z_]{1,6}", fullmatch=True)
random_calls = st.lists(st.tuples(names, st.dictionaries(keys, json_values, max_size=3)), min_size=1, max_size=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hermes", "mistral", "mistral_named", "llama3_json", "pythonic"])
@given(calls=random_calls, data=st.data())
def test_random_calls_come_back_as_they_were(name: str, calls: list[Call], data: st.DataObject) -> None:
    text = written(name, calls)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(spoken(name), *pieces).calls == calls


plain = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=10)
xml_calls = st.lists(
    st.tuples(st.just("write"), st.fixed_dictionaries({"text": plain, "lines": st.lists(st.integers(), max_size=3)})),
    min_size=1,
    max_size=2,
)


@given(calls=xml_calls)
def test_random_calls_in_xml_come_back_as_they_were(calls: list[Call]) -> None:
    assert parsed(dialect("qwen3_xml"), written("qwen3_xml", calls)).calls == calls


MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>", '{"name": "stop", ',
         '"arguments": {', '"parameters": ', "<function=stop>", "<parameter=a>", "</parameter>", "[ARGS]", "[stop(",
         "a=", "}", "]", ")", '"', "\\", "\n", " ", "1", "x"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("each", {each.form: each for each in CALL_FORMATS}.values(), ids=lambda each: each.name)
@given(parts=st.lists(st.sampled_from(MARKS), max_size=14), cut=st.integers(0, 200))
def test_an_answer_parsed_in_pieces_equals_the_answer_parsed_whole(
    each: CallFormat, parts: list[str], cut: int
) -> None:
    text = "".join(parts)
    speaks = dialect(each.name, "qwen3")
    whole = parsed(speaks, text)
    assert parsed(speaks, *text) == whole
    assert parsed(speaks, text[:cut], text[cut:]) == whole
    if not whole.names and not whole.reasoning and "think>" not in text:
        assert whole.content == text


XML_FORM = CALL_FORMATS[0].form
marks = st.text("<>[]|/ab", min_size=1, max_size=6)
forms = st.sampled_from([XML_FORM, PYTHON_LIST, CallForm(between="[ARGS]"), CallForm(between="|")]) | st.builds(
    json_calls,
    st.sampled_from(["arguments", "parameters"]),
    brackets=st.sampled_from([("", ""), ("[", "]"), ("(", ")")]),
    separator=st.sampled_from([None, "", ",", ";"]),
)
formats = st.builds(
    CallFormat,
    name=st.just("random"),
    opening=marks,
    form=forms,
    other_form=st.none() | forms,
    closing=st.just("") | marks,
    unmarked=st.booleans(),
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(each=formats, data=st.data())
def test_random_formats_are_read_alike_at_every_split(each: CallFormat, data: st.DataObject) -> None:
    whole_calls = [written(name, EXAMPLES[1]) for name in NAMES]
    pieces = st.sampled_from([each.opening, each.closing, each.opening[:1], " ", "\n", *whole_calls, *MARKS])
    text = "".join(data.draw(st.lists(pieces, max_size=5)))[:200]
    speaks = Dialect(each, reasoning_format("qwen3", None), data.draw(st.booleans()), TOOLS)
    whole = parsed(speaks, text)
    for cut in range(1, len(text)):
        assert parsed(speaks, text[:cut], text[cut:]) == whole


json_formats = st.builds(
    CallFormat,
    name=st.just("random"),
    opening=marks,
    form=st.sampled_from(["arguments", "parameters"]).map(json_calls),
    closing=marks,
)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(each=json_formats, calls=random_calls)
def test_what_is_written_in_a_random_format_is_read_back(each: CallFormat, calls: list[Call]) -> None:
    text = write_calls(each, calls)
    told = parsed(Dialect(each, tools=TOOLS), *text)
    assert (told.calls, told.content) == (calls, "")


HARMONY = dialect("openai", "openai_gptoss")
ANALYSIS = "<|channel|>analysis<|message|>They ask <for> it.<|end|>"


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>It is 4.", "They ask <for> it.", "It is 4.", []),
        ("<|channel|>final<|message|>Yes.<|return|>", "", "Yes.", []),
        (f"{ANALYSIS}<|start|>assistant{written('openai', EXAMPLES[0])}", "They ask <for> it.", "", EXAMPLES[0]),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.stop<|channel|>commentary "
            "json<|message|>{}<|call|>",
            "",
            "I look.",
            [("stop", {})],
        ),
        ("<|channel|>commentary to=functions.stop<|message|>", "", "", [("stop", {})]),
        ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", "1 + 1", "", []),
        ("No channel at all.", "", "No channel at all.", []),
        (f"{ANALYSIS}<|start|>assistant<|channel|>fin", "They ask <for> it.", "", []),
    ],
)
def test_harmony_tells_channels_apart_at_every_split(
    text: str, reasoning: str, content: str, calls: list[Call]
) -> None:
    whole = parsed(HARMONY, text)
    assert (whole.reasoning, whole.content, whole.calls) == (reasoning, content, calls)
    for cut in range(len(text) + 1):
        assert parsed(HARMONY, text[:cut], text[cut:]) == whole


@pytest.mark.parametrize(
    ("reasoning", "text"),
    [
        ("cohere_command3", "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes <b>.<|END_RESPONSE|>"),
        ("solar_open", "<|think|>Hm.<|end|><|begin|>assistant<|content|>Yes <b>."),
        ("hunyuan_a13b", "<think>\nHm.\n</think>\n<answer>\nYes <b>.\n</answer>"),
        ("granite", "Here is my thought process:\nHm.\nHere is my response:\nYes <b>."),
    ],
)
def test_marks_around_an_answer_are_left_out_of_it(reasoning: str, text: str) -> None:
    speaks = dialect("cohere_command3", reasoning)
    whole = parsed(speaks, text)
    assert (whole.reasoning, whole.content) == ("Hm.", "Yes <b>.")
    assert parsed(speaks, *text) == whole


@pytest.mark.parametrize("kind", [Content, Reasoning])
def test_spaces_are_held_back_one_by_one(kind: type[Content] | type[Reasoning]) -> None:
    """Joining them with each more took 2 s for 20,000."""
    parser = OutputParser(dialect("hermes", "qwen3", in_reasoning=kind is Reasoning))
    parser.feed("a" + " \n" * 500)
    assert parser._chars.taken == list(" \n" * 500)
    # What follows the spaces may begin a mark, and what follows that may not.
    parser.feed(" <" + " " * 500)
    assert parser._chars.taken == [" "] * 500
    events = [*parser.feed("b"), *parser.finish()]
    assert [type(event) for event in events] == [kind]
    assert events[0].text == " " * 500 + "b"
