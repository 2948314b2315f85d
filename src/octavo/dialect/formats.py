"""The formats in which models write tool calls and reasoning, as data; and which of them a chat template speaks.

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
    """Calls as objects, in any order of their members; others than these are passed over.

    Attributes:
        arguments: the names that the arguments may have; the first is the model's own.
        brackets: what opens and closes the run of calls.
        separator: what stands between two calls of a run; "" where a run is one call.
    """

    arguments: tuple[str, ...]
    brackets: tuple[str, str] = ("", "")
    separator: str = ""


@dataclass(frozen=True, slots=True)
class NamedJsonCall:
    """`f[ARGS]{…}`: a name, a tag that may be missing, and the arguments as an object."""

    tag: str


@dataclass(frozen=True, slots=True)
class XmlCall:
    """`<function=f><parameter=a>1</parameter></function>`."""


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """`[f(a=1), g()]`."""


Body = JsonCalls | NamedJsonCall | XmlCall | PythonCalls


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes its calls.

    Attributes:
        opening: the text before a run of calls; "" where nothing precedes it.
        bodies: what may follow it; the first is what a model is held to that must call.
        closing: the text after a run of calls.
        unmarked: a run may begin the answer without `opening`. What names no tool of the request is no call then.
        marks_are_special: the marks are special tokens, which text leaves out unless it is asked not to.
        id_length: characters of a call's id, where the chat template insists on a number.
        template_marks: of these texts one is in the chat template of a model that writes so.
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
    """What stands around a model's reasoning."""

    name: str
    opening: str
    closing: str
    marks_are_special: bool = False


# In the order in which a template is asked: the more special marks first.
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
    """The format called `name`; "auto": the one that the chat template speaks; None if there is none."""
    wanted = _OTHER_CALL_NAMES.get(name, name)
    if wanted == "auto":
        text = template or ""
        return next((each for each in CALL_FORMATS if any(mark in text for mark in each.template_marks)), None)
    return next((each for each in CALL_FORMATS if each.name == wanted), None)


def reasoning_format(name: str, template: str | None) -> ReasoningFormat | None:
    """The same for reasoning."""
    wanted = _OTHER_REASONING_NAMES.get(name, name)
    if wanted == "auto":
        return next((each for each in REASONING_FORMATS if each.closing in (template or "")), None)
    return next((each for each in REASONING_FORMATS if each.name == wanted), None)
