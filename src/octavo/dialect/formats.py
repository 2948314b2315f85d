"""The formats in which models write tool calls and reasoning, as data, and their detection in chat templates.

    hermes        <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
    qwen3_xml     <tool_call><function=f><parameter=a>1</parameter></function></tool_call>
    llama3_json   {"name": "f", "parameters": {"a": 1}}; …     also after <|python_tag|>
    mistral       [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, …]     or [TOOL_CALLS]f[ARGS]{"a": 1}
    pythonic      [f(a=1), …]

The names are those of vLLM's `--tool-call-parser` and `--reasoning-parser`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Calls as JSON objects, whose members may be in any order; unknown members are ignored.

    Attributes:
        arguments: names that the member with the arguments may have; the first is the model's own.
        brackets: the brackets around a run of calls.
        separator: separator between two calls of a run; "" if a run is one call.
    """

    arguments: tuple[str, ...]
    brackets: tuple[str, str] = ("", "")
    separator: str = ""


@dataclass(frozen=True, slots=True)
class NamedJsonCall:
    """Calls as `f[ARGS]{…}`: a name, a tag that may be missing, and the arguments as an object."""

    tag: str


@dataclass(frozen=True, slots=True)
class XmlCall:
    """Calls as `<function=f><parameter=a>1</parameter></function>`."""


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """Calls as `[f(a=1), g()]`."""


Body = JsonCalls | NamedJsonCall | XmlCall | PythonCalls


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes its calls.

    Attributes:
        opening: the mark before a run of calls; "" if there is none.
        bodies: forms that the calls may have; the first is enforced if the model must call a tool.
        closing: the mark after a run of calls.
        unmarked: whether a run may begin the answer without `opening`; such calls must name a tool of the request.
        marks_are_special: whether the marks are special tokens, which are left out of the text by default.
        id_length: length of a call's id, if the chat template requires one; otherwise None.
        template_marks: texts of which at least one is in the chat template of a model with this format.
    """

    name: str
    opening: str
    bodies: tuple[Body, ...]
    closing: str = ""
    unmarked: bool = False
    marks_are_special: bool = False
    id_length: int | None = None
    template_marks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around a model's reasoning."""

    name: str
    opening: str
    closing: str
    marks_are_special: bool = False


# In the order in which they are looked for in a template: the more specific marks first.
CALL_FORMATS = (
    CallFormat(
        "qwen3_xml",
        "<tool_call>",
        (XmlCall(),),
        "</tool_call>",
        template_marks=("<function=",),
    ),
    CallFormat(
        "hermes",
        "<tool_call>",
        (JsonCalls(("arguments",)),),
        "</tool_call>",
        template_marks=("<tool_call>",),
    ),
    CallFormat(
        "mistral",
        "[TOOL_CALLS]",
        (JsonCalls(("arguments",), ("[", "]"), ","), NamedJsonCall("[ARGS]")),
        marks_are_special=True,
        id_length=9,
        template_marks=("[TOOL_CALLS]",),
    ),
    CallFormat(
        "llama3_json",
        "<|python_tag|>",
        (JsonCalls(("parameters", "arguments"), separator=";"),),
        unmarked=True,
        template_marks=('{"name": function name, "parameters":', "<|python_tag|>"),
    ),
    CallFormat(
        "pythonic",
        "",
        (PythonCalls(),),
        unmarked=True,
        template_marks=("[func_name1(", "[func1("),
    ),
)
_OTHER_CALL_NAMES = {
    "qwen3_coder": "qwen3_xml",
    "qwen": "hermes",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
}

REASONING_FORMATS = (
    ReasoningFormat("qwen3", "<think>", "</think>"),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]", marks_are_special=True),
)
_OTHER_REASONING_NAMES = dict.fromkeys(("deepseek_r1", "deepseek_v3", "glm45", "think"), "qwen3")

TOOL_CALL_PARSERS = tuple(sorted([*(each.name for each in CALL_FORMATS), *_OTHER_CALL_NAMES]))
REASONING_PARSERS = tuple(sorted([*(each.name for each in REASONING_FORMATS), *_OTHER_REASONING_NAMES]))


def call_format(name: str, template: str | None) -> CallFormat | None:
    """Return the format called `name`, or the one found in the chat template if it is "auto"; None if there is none."""
    wanted = _OTHER_CALL_NAMES.get(name, name)
    if wanted == "auto":
        text = template or ""
        return next((each for each in CALL_FORMATS if any(mark in text for mark in each.template_marks)), None)
    return next((each for each in CALL_FORMATS if each.name == wanted), None)


def reasoning_format(name: str, template: str | None) -> ReasoningFormat | None:
    """Return the format of reasoning called `name`, or the one found in the template if it is "auto"; None if none."""
    wanted = _OTHER_REASONING_NAMES.get(name, name)
    if wanted == "auto":
        return next((each for each in REASONING_FORMATS if each.closing in (template or "")), None)
    return next((each for each in REASONING_FORMATS if each.name == wanted), None)
