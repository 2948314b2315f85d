"""The formats in which models write tool calls and reasoning, as data.

    hermes        <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
    qwen3_xml     <tool_call><function=f><parameter=a>1</parameter></function></tool_call>
    glm45         <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
    llama3_json   {"name": "f", "parameters": {"a": 1}}; …     also after <|python_tag|>
    mistral       [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, …]     or [TOOL_CALLS]f[ARGS]{"a": 1}
    deepseek_v31  <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>…
    openai        <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>     (harmony)
    apertus       <|tools_prefix|>[{"f": {"a": 1}}, …]<|tools_suffix|>
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
        name: name of the member with the function's name.
    """

    arguments: tuple[str, ...]
    brackets: tuple[str, str] = ("", "")
    separator: str = ""
    name: str = "name"


@dataclass(frozen=True, slots=True)
class NamedJsonCall:
    """Calls as a name, a tag, and the arguments as an object: `f[ARGS]{…}`.

    Attributes:
        tag: it may be missing where `before` is empty.
        before, after: marks around each call; where there are any, one run has all calls.
        separator: between two calls of a run.
        numbered: whether a name ends with the number of its call, as in `f:0`.
    """

    tag: str
    before: str = ""
    after: str = ""
    separator: str = ""
    numbered: bool = False


@dataclass(frozen=True, slots=True)
class XmlCall:
    """Calls in tags, whose values have no quotes. The defaults are `<function=f><parameter=a>1</parameter></function>`.

    Attributes:
        name: marks around the function's name; () if it has none, and no closing tag.
        key: mark before a parameter's name.
        between: marks between a parameter's name and its value.
        value_end, end: marks after a value, and after the last parameter.
        padded: whether values stand on lines of their own.
        typed: whether `string="true"` or `string="false"` follows a parameter's name.
    """

    name: tuple[str, str] | tuple[()] = ("<function=", ">")
    key: str = "<parameter="
    between: tuple[str, ...] = (">",)
    value_end: str = "</parameter>"
    end: str = "</function>"
    padded: bool = True
    typed: bool = False


@dataclass(frozen=True, slots=True)
class BareCall:
    """Calls as `call:f{a:1,b:<|"|>text<|"|>}`: keys have no quotes, and strings have markers instead.

    Attributes:
        quote: the mark around a string.
    """

    quote: str


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """Calls as `[f(a=1), g()]`."""


Body = JsonCalls | NamedJsonCall | XmlCall | BareCall | PythonCalls


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The format of a model's tool calls.

    Attributes:
        opening: the mark before a run of calls; "" if there is none.
        bodies: forms that the calls may have; the first is enforced if the model must call a tool.
        closing: the mark after a run of calls.
        unmarked: whether a run may begin the answer without `opening`; such calls must name a tool of the request.
        marks_are_special: whether the marks are special tokens, which are left out of the text by default.
        id_length: length of a call's id, if the chat template requires one; otherwise None.
        template_marks: texts of which at least one is in a chat template that describes this format, but need not
            write calls in it.
        dropped: marks that are left out of the answer's text.
        channels: whether an answer is harmony's messages, each for a channel (`parser.py`).
    """

    name: str
    opening: str
    bodies: tuple[Body, ...]
    closing: str = ""
    unmarked: bool = False
    marks_are_special: bool = False
    id_length: int | None = None
    template_marks: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    channels: bool = False

    @property
    def is_one_run(self) -> bool:
        """Whether all calls of an answer share one pair of marks."""
        body = self.bodies[0]
        return isinstance(body, PythonCalls) or bool(
            body.brackets[0] if isinstance(body, JsonCalls) else isinstance(body, NamedJsonCall) and body.before
        )

    @property
    def padding(self) -> str:
        """Separators that a model writes between the marks and a call that stands alone."""
        body = self.bodies[0]
        return "\n" if isinstance(body, JsonCalls) or (isinstance(body, XmlCall) and body.name) else ""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around a model's reasoning.

    Attributes:
        answer: mark before the answer that follows.
        dropped, channels: see `CallFormat`.
    """

    name: str
    opening: str
    closing: str
    marks_are_special: bool = False
    answer: str = ""
    dropped: tuple[str, ...] = ()
    channels: bool = False


_COHERE_ANSWER = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
_FUNCTION_LIST = ("[", "]")

# Where several formats would read a call, the first is taken: those with closing marks come before those without.
CALL_FORMATS = (
    CallFormat("qwen3_xml", "<tool_call>", (XmlCall(),), "</tool_call>", template_marks=("<function=",)),
    CallFormat(
        "seed_oss",
        "<seed:tool_call>",
        (XmlCall(padded=False),),
        "</seed:tool_call>",
        template_marks=("<seed:tool_call>",),
    ),
    CallFormat(
        "glm45",
        "<tool_call>",
        (XmlCall((), "<arg_key>", ("</arg_key>", "<arg_value>"), "</arg_value>", "", padded=False),),
        "</tool_call>",
        template_marks=("<arg_key>",),
    ),
    CallFormat(
        "minimax_m2",
        "<minimax:tool_call>",
        (XmlCall(('<invoke name="', '">'), '<parameter name="', ('">',), end="</invoke>", padded=False),),
        "</minimax:tool_call>",
        template_marks=("<minimax:tool_call>",),
    ),
    CallFormat("hermes", "<tool_call>", (JsonCalls(("arguments",)),), "</tool_call>", template_marks=("<tool_call>",)),
    CallFormat(
        "mistral",
        "[TOOL_CALLS]",
        (JsonCalls(("arguments",), _FUNCTION_LIST, ","), NamedJsonCall("[ARGS]")),
        marks_are_special=True,
        id_length=9,
        template_marks=("[TOOL_CALLS]",),
    ),
    CallFormat(
        "deepseek_v3",
        "<｜tool▁calls▁begin｜>",
        (NamedJsonCall("\n```json\n", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```<｜tool▁call▁end｜>"),),
        "<｜tool▁calls▁end｜>",
        marks_are_special=True,
    ),
    CallFormat(
        "deepseek_v31",
        "<｜tool▁calls▁begin｜>",
        (NamedJsonCall("<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),),
        "<｜tool▁calls▁end｜>",
        marks_are_special=True,
    ),
    *(
        CallFormat(
            name,
            f"<｜DSML｜{mark}>",
            (
                XmlCall(
                    ('<｜DSML｜invoke name="', '">'),
                    '<｜DSML｜parameter name="',
                    ('"',),
                    "</｜DSML｜parameter>",
                    "</｜DSML｜invoke>",
                    padded=False,
                    typed=True,
                ),
            ),
            f"</｜DSML｜{mark}>",
            marks_are_special=True,
        )
        for name, mark in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls"))
    ),
    *(
        CallFormat(name, opening, (BareCall(quote),), closing, marks_are_special=True, template_marks=(opening,))
        for name, opening, quote, closing in (
            ("gemma4", "<|tool_call>", '<|"|>', "<tool_call|>"),
            ("functiongemma", "<start_function_call>", "<escape>", "<end_function_call>"),
        )
    ),
    CallFormat(
        "kimi_k2",
        "<|tool_calls_section_begin|>",
        (
            NamedJsonCall(
                "<|tool_call_argument_begin|>", "<|tool_call_begin|>functions.", "<|tool_call_end|>", numbered=True
            ),
        ),
        "<|tool_calls_section_end|>",
        marks_are_special=True,
    ),
    CallFormat(
        "apertus",
        "<|tools_prefix|>[",
        (NamedJsonCall('": ', '{"', "}", ","),),
        "]<|tools_suffix|>",
        marks_are_special=True,
    ),
    CallFormat(
        "hy_v3",
        "<tool_calls:opensource>",
        (
            XmlCall(
                ("<tool_call:opensource>", "<tool_sep:opensource>"),
                "<arg_key:opensource>",
                ("</arg_key:opensource>", "<arg_value:opensource>"),
                "</arg_value:opensource>",
                "</tool_call:opensource>",
                padded=False,
            ),
        ),
        "</tool_calls:opensource>",
        marks_are_special=True,
    ),
    CallFormat(
        "openai",
        "<|channel|>commentary to=functions.",
        (NamedJsonCall(" <|constrain|>json<|message|>"),),
        "<|call|>",
        marks_are_special=True,
        template_marks=("<|channel|>commentary",),
        channels=True,
    ),
    CallFormat(
        "cohere_command3",
        "<|START_ACTION|>",
        (JsonCalls(("parameters",), _FUNCTION_LIST, ",", "tool_name"),),
        "<|END_ACTION|>",
        marks_are_special=True,
        template_marks=("<|START_ACTION|>",),
        dropped=_COHERE_ANSWER,
    ),
    CallFormat(
        "command_r",
        "Action:\n```json",
        (JsonCalls(("parameters",), _FUNCTION_LIST, ",", "tool_name"),),
        "```",
        template_marks=("Action: ```json", "Action:\\n```json", "Action:\n```json"),
    ),
    *(
        CallFormat(name, opening, (JsonCalls(("arguments",)),), marks_are_special=True, dropped=("<|message_sep|>",))
        for name, opening in (("gigachat3", "function call<|role_sep|>"), ("gigachat31", "<|function_call|>"))
    ),
    CallFormat("jamba", "<tool_calls>", (JsonCalls(("arguments",), _FUNCTION_LIST, ","),), "</tool_calls>"),
    CallFormat("nemotron_json", "<TOOLCALL>", (JsonCalls(("arguments",), _FUNCTION_LIST, ","),), "</TOOLCALL>"),
    CallFormat(
        "phi4_mini_json",
        "<|tool_call|>",
        (JsonCalls(("arguments",), _FUNCTION_LIST, ","),),
        "<|/tool_call|>",
        marks_are_special=True,
        template_marks=("<|/tool_call|>", "<|/tool|>"),
    ),
    CallFormat(
        "granite",
        "<|tool_call|>",
        (JsonCalls(("arguments",), _FUNCTION_LIST, ","),),
        marks_are_special=True,
        template_marks=("<|tool_call|>",),
    ),
    CallFormat(
        "lfm2",
        "<|tool_call_start|>",
        (PythonCalls(),),
        "<|tool_call_end|>",
        marks_are_special=True,
        template_marks=("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: ["),
    ),
    CallFormat(
        "llama3_json",
        "<|python_tag|>",
        (JsonCalls(("parameters", "arguments"), separator=";"),),
        unmarked=True,
        template_marks=('{"name": function name, "parameters":', "<|python_tag|>"),
    ),
    CallFormat("pythonic", "", (PythonCalls(),), unmarked=True, template_marks=("[func_name1(", "[func1(")),
)
_OTHER_CALL_NAMES = {
    "qwen3_coder": "qwen3_xml",
    "glm47": "glm45",
    "deepseek_r1": "deepseek_v3",
    "gpt_oss": "openai",
    "qwen": "hermes",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
}

REASONING_FORMATS = (
    ReasoningFormat(
        "openai_gptoss",
        "<|channel|>analysis<|message|>",
        "<|end|>",
        marks_are_special=True,
        answer="<|start|>assistant<|channel|>final<|message|>",
        channels=True,
    ),
    ReasoningFormat(
        "cohere_command3",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        marks_are_special=True,
        dropped=_COHERE_ANSWER,
    ),
    ReasoningFormat("gemma4", "<|channel>thought", "<channel|>", marks_are_special=True),
    ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
    ReasoningFormat("hy_v3", "<think:opensource>", "</think:opensource>", marks_are_special=True),
    ReasoningFormat("minimax_m3", "<mm:think>", "</mm:think>", marks_are_special=True),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]", marks_are_special=True),
    ReasoningFormat("qwen3", "<think>", "</think>"),
)
_OTHER_REASONING_NAMES = {
    **dict.fromkeys(("deepseek_r1", "deepseek_v3", "glm45", "kimi_k2", "think"), "qwen3"),
    "gpt_oss": "openai_gptoss",
}

TOOL_CALL_PARSERS = tuple(sorted([*(each.name for each in CALL_FORMATS), *_OTHER_CALL_NAMES]))
REASONING_PARSERS = tuple(sorted([*(each.name for each in REASONING_FORMATS), *_OTHER_REASONING_NAMES]))


def call_format(name: str) -> CallFormat | None:
    """Return the format called `name`; None if there is none."""
    wanted = _OTHER_CALL_NAMES.get(name, name)
    return next((each for each in CALL_FORMATS if each.name == wanted), None)


def reasoning_format(name: str, template: str | None) -> ReasoningFormat | None:
    """Return the format of reasoning called `name`, or the one found in the template if it is "auto"; None if none."""
    wanted = _OTHER_REASONING_NAMES.get(name, name)
    if wanted == "auto":
        text = template or ""
        # Harmony's closing mark ends other templates' messages too.
        marks = ((each, "<|channel|>analysis" if each.channels else each.closing) for each in REASONING_FORMATS)
        return next((each for each, mark in marks if mark in text), None)
    return next((each for each in REASONING_FORMATS if each.name == wanted), None)
