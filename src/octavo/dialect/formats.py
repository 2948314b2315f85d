"""The formats in which models write tool calls and reasoning, each one declaration.

    opening          before    head   between          arguments   after   closing
    <tool_call>      {"name": "  f    ", "arguments":  {"a": 1}    }       </tool_call>         hermes
    <tool_call>      <function=  f    >                tags        </function>  </tool_call>    qwen3_xml
    [TOOL_CALLS]                 f    [ARGS]           {"a": 1}                                 mistral
    <|tool_call>     call:       f                     {a:1}               <tool_call|>         gemma4
    [                            f    (                a=1         )       ]                    pythonic

From a declaration come what is written in prompts, the grammar of answers that must call, the parser, and how a chat
template's format is found. Line breaks at the ends of marks are written, but may be missing or other spaces in what
is read. Names are those of vLLM's `--tool-call-parser` and `--reasoning-parser` where it has the format.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

from octavo.dialect.notations import JSON_OBJECT, BareKeys, Keywords, Notation, Tags

_NAME = r"(?P<name>[^\s\[\]{}<>|\"]+)"


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a call is written, and the calls of a run.

    Attributes:
        before, between, after: marks before the function's name, between it and the arguments, and after those.
        head: what stands for the name: with `{id}` if the call's id is written beside it, with `{index}` if the whole
            is the id and ends with the number of the call.
        arguments: their notation.
        members: if a call is a JSON object, the names of the members with the function's name and with the arguments,
            for which further names are understood. Members may be in any order; unknown ones are ignored.
        brackets: around the calls of a run.
        separator: between two calls of a run; None if a run is one call.
    """

    before: str = ""
    between: str = ""
    after: str = ""
    head: str = "{name}"
    arguments: Notation = JSON_OBJECT
    members: tuple[str, ...] = ()
    brackets: tuple[str, str] = ("", "")
    separator: str | None = None

    def may_begin(self, first: str) -> bool:
        """Return whether a run of calls in this form may begin with the character `first`."""
        mark = self.brackets[0] or self.before
        return first == mark[0] if mark else first.isidentifier()

    def head_parts(self, head: str) -> tuple[str, str]:
        """Return the function's name and the call's id, if it has one, from what stands for the name."""
        for pattern in (self.head, *(["{name}"] if self.head.startswith("{name}") else [])):
            regex = re.escape(pattern).replace(r"\{name\}", _NAME).replace(r"\{id\}", r"(?P<id>\S*)")
            if found := re.fullmatch(regex.replace(r"\{index\}", r"\d+"), head.strip()):
                return found["name"], head.strip() if "{index}" in pattern else found.groupdict().get("id", "")
        return "", ""


def json_calls(
    *arguments: str, name: str = "name", brackets: tuple[str, str] = ("", ""), separator: str | None = None
) -> CallForm:
    """Return the form of calls that are JSON objects.

    Args:
        arguments: names that the member with the arguments may have; the first is the model's own.
        name: name of the member with the function's name.
    """
    return CallForm(
        before=f'{{"{name}": "',
        between=f'", "{arguments[0]}": ',
        after="}",
        members=(name, *arguments),
        brackets=brackets,
        separator=separator,
    )


def json_list(*arguments: str, name: str = "name") -> CallForm:
    """Return the form of a list of calls that are JSON objects."""
    return json_calls(*arguments, name=name, brackets=("[", "]"), separator=", ")


PYTHON_LIST = CallForm(between="(", after=")", arguments=Keywords(), brackets=("[", "]"), separator=", ")


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The format of a model's tool calls.

    Attributes:
        opening: the mark before a run of calls; "" if there is none.
        form: of the calls.
        closing: the mark after a run of calls.
        between_runs: what stands between two runs.
        unmarked: whether a run may begin the answer without `opening`; such calls must name a tool of the request.
        marks_are_special: whether the marks are special tokens, which are left out of the text by default.
        id_length: length of a call's id, if the chat template requires one; otherwise None.
        template_marks: texts of which at least one is in a chat template that describes this format, but need not
            write calls in it; if there are none, `opening` is.
        dropped: marks that are left out of the answer's text.
        channels: whether an answer is harmony's messages, each for a channel (`parser.py`).
        other_form: a second form that is read too.
    """

    name: str
    opening: str
    form: CallForm
    closing: str = ""
    between_runs: str = "\n"
    unmarked: bool = False
    marks_are_special: bool = False
    id_length: int | None = None
    template_marks: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    channels: bool = False
    other_form: CallForm | None = None

    @property
    def forms(self) -> tuple[CallForm, ...]:
        return (self.form,) if self.other_form is None else (self.form, self.other_form)

    @property
    def mark(self) -> str:
        """`opening`, as it is read."""
        return self.opening.strip()

    def may_be_in(self, template: str) -> bool:
        """Return whether a chat template has a mark of this format."""
        return any(mark in template for mark in self.template_marks or (self.mark,) if mark)

    @property
    def around_run(self) -> tuple[str, str]:
        """What is written before and after a run of calls."""
        before, after = self.form.brackets
        return ("" if self.unmarked else self.opening) + before, after + self.closing


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around a model's reasoning.

    Attributes:
        message: mark before what follows, an answer or calls.
        answer: mark before an answer, after `message`.
        sign: text by which a template that has this format is known; "" if it is `closing`.
        dropped, channels: see `CallFormat`.
    """

    name: str
    opening: str
    closing: str
    marks_are_special: bool = False
    message: str = ""
    answer: str = ""
    sign: str = ""
    dropped: tuple[str, ...] = ()
    channels: bool = False


_COHERE_ANSWER = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
_SOLAR_ANSWER = ("<|begin|>assistant", "<|content|>")


def _tags(before: str, between: str, after: str, tags: Tags, separator: str | None = None) -> CallForm:
    return CallForm(before, between, after, arguments=tags, separator=separator)


def _invoke(prefix: str = "", before: str = "", after: str = "", *, typed: bool = False) -> CallForm:
    """Return the form of calls as `<invoke name="f"><parameter name="a">1</parameter></invoke>`."""
    tags = Tags(f'<{prefix}parameter name="', ('"' if typed else '">',), f"</{prefix}parameter>", typed=typed)
    return _tags(f'{before}<{prefix}invoke name="', '">\n', f"</{prefix}invoke>{after}", tags, "\n")


def _argument_tags(suffix: str = "") -> Tags:
    return Tags(f"<arg_key{suffix}>", (f"</arg_key{suffix}>", f"<arg_value{suffix}>"), f"</arg_value{suffix}>")


def _bare(quote: str) -> CallForm:
    return CallForm("call:", arguments=BareKeys(quote))


_FUNCTION_TAGS = _tags("<function=", ">\n", "</function>", Tags(padded=True))
_FUNCTION_TAGS_IN_LINE = _tags("<function=", ">\n", "</function>", Tags())
_MISTRAL_NAMED = CallForm(between="[ARGS]", head="{name}[CALL_ID]{id}")
_HUNYUAN = _tags(
    "<tool_call:opensource>",
    "<tool_sep:opensource>\n",
    "</tool_call:opensource>",
    _argument_tags(":opensource"),
    "\n",
)
_COHERE_CALLS = json_list("parameters", name="tool_name")
_MINICPM = _tags("", '">', "", Tags('<param name="', ('">',), "</param>", raw=("<![CDATA[", "]]>")))
# A format whose marks are special tokens.
_special = partial(CallFormat, marks_are_special=True)

# Where several formats would read a call, the first is taken: those with closing marks come before those without.
CALL_FORMATS = (
    CallFormat("qwen3_xml", "<tool_call>\n", _FUNCTION_TAGS, "\n</tool_call>", template_marks=("<function=",)),
    CallFormat("seed_oss", "<seed:tool_call>\n", _FUNCTION_TAGS_IN_LINE, "\n</seed:tool_call>"),
    CallFormat(
        "glm45", "<tool_call>", _tags("", "\n", "", _argument_tags()), "</tool_call>", template_marks=("<arg_key>",)
    ),
    CallFormat("minimax_m2", "<minimax:tool_call>\n", _invoke(), "\n</minimax:tool_call>"),
    CallFormat("dots", "<dots_function_call>\n", _invoke(), "\n</dots_function_call>"),
    CallFormat("hermes", "<tool_call>\n", json_calls("arguments"), "\n</tool_call>"),
    CallFormat("longcat", "<longcat_tool_call>\n", json_calls("arguments"), "\n</longcat_tool_call>"),
    _special("mistral", "[TOOL_CALLS]", json_list("arguments"), id_length=9, other_form=_MISTRAL_NAMED),
    _special(
        "deepseek_v3",
        "<｜tool▁calls▁begin｜>",
        CallForm(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>", separator="\n"
        ),
        "<｜tool▁calls▁end｜>",
    ),
    _special(
        "deepseek_v31",
        "<｜tool▁calls▁begin｜>",
        CallForm("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", separator=""),
        "<｜tool▁calls▁end｜>",
    ),
    *(
        _special(name, f"<{prefix}{mark}>\n", _invoke(prefix, typed=True), f"\n</{prefix}{mark}>")
        for name, prefix, mark in (
            ("deepseek_v32", "｜DSML｜", "function_calls"),
            ("deepseek_v4", "｜DSML｜", "tool_calls"),
            ("deepseek_v41", "｜DSML｜ ", "calls"),
        )
    ),
    _special(
        "step3",
        "<｜tool_calls_begin｜>\n",
        _invoke("steptml:", "<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>"),
        "\n<｜tool_calls_end｜>",
    ),
    _special("gemma4", "<|tool_call>", _bare('<|"|>'), "<tool_call|>", dropped=("<|tool_response>",)),
    _special("functiongemma", "<start_function_call>", _bare("<escape>"), "<end_function_call>"),
    _special(
        "kimi_k2",
        "<|tool_calls_section_begin|>",
        CallForm(
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            head="functions.{name}:{index}",
            separator="",
        ),
        "<|tool_calls_section_end|>",
    ),
    _special(
        "solar_open",
        "<|tool_calls|>",
        CallForm(
            "<|tool_call:begin|>",
            "<|tool_call:args|>",
            "<|tool_call:end|>",
            head="{id}<|tool_call:name|>{name}",
            separator="",
        ),
        "<|calls|>",
        id_length=10,
        dropped=_SOLAR_ANSWER,
    ),
    _special(
        "apertus",
        "<|tools_prefix|>",
        CallForm('{"', '": ', "}", brackets=("[", "]"), separator=", "),
        "<|tools_suffix|>",
    ),
    _special(
        "plamo3",
        "<|plamo:begin_tool_requests:plamo|>",
        CallForm(
            "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>",
            "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>",
            "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",
            separator="",
        ),
        "<|plamo:end_tool_requests:plamo|>",
    ),
    _special("hy_v3", "<tool_calls:opensource>\n", _HUNYUAN, "\n</tool_calls:opensource>"),
    _special(
        "openai",
        "<|channel|>commentary to=functions.",
        CallForm(between=" <|constrain|>json<|message|>"),
        "<|call|>",
        between_runs="<|start|>assistant",
        template_marks=("<|channel|>commentary",),
        channels=True,
    ),
    _special("cohere_command3", "<|START_ACTION|>", _COHERE_CALLS, "<|END_ACTION|>", dropped=_COHERE_ANSWER),
    CallFormat(
        "command_r",
        "Action:\n```json\n",
        _COHERE_CALLS,
        "\n```",
        template_marks=("Action: ```json", "Action:\\n```json", "Action:\n```json"),
    ),
    _special("internlm", "<|action_start|><|plugin|>\n", json_calls("parameters", "arguments"), "<|action_end|>"),
    _special("gigachat3", "function call<|role_sep|>\n", json_calls("arguments"), dropped=("<|message_sep|>",)),
    _special("gigachat31", "<|function_call|>", json_calls("arguments"), dropped=("<|message_sep|>",)),
    CallFormat("jamba", "<tool_calls>", json_list("arguments"), "</tool_calls>"),
    CallFormat("minimax_m1", "<tool_calls>\n", json_calls("arguments", separator="\n"), "\n</tool_calls>"),
    CallFormat("nemotron_json", "<TOOLCALL>", json_list("arguments"), "</TOOLCALL>"),
    _special(
        "phi4_mini_json",
        "<|tool_call|>",
        json_list("arguments"),
        "<|/tool_call|>",
        template_marks=("<|/tool_call|>", "<|/tool|>"),
    ),
    _special("granite", "<|tool_call|>", json_list("arguments")),
    CallFormat("granite-20b-fc", "<function_call> ", json_calls("arguments")),
    CallFormat("functools", "functools", json_list("arguments"), template_marks=("functools[",)),
    CallFormat("minicpm5", '<function name="', _MINICPM, "</function>"),
    CallFormat("functionary_v31", "<function=", CallForm(between=">"), "</function>"),
    _special(
        "lfm2",
        "<|tool_call_start|>",
        PYTHON_LIST,
        "<|tool_call_end|>",
        template_marks=("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: ["),
    ),
    CallFormat(
        "olmo3",
        "<function_calls>\n",
        CallForm(between="(", after=")", arguments=Keywords(), separator="\n"),
        "\n</function_calls>",
    ),
    CallFormat(
        "llama3_json",
        "<|python_tag|>",
        json_calls("parameters", "arguments", separator="; "),
        unmarked=True,
        template_marks=('{"name": function name, "parameters":', "<|python_tag|>"),
    ),
    CallFormat("pythonic", "", PYTHON_LIST, unmarked=True, template_marks=("[func_name1(", "[func1(")),
    CallFormat("xlam", "", json_list("arguments"), unmarked=True, template_marks=('[{"name": "tool_call_name"',)),
)
_OTHER_CALL_NAMES = {
    **dict.fromkeys(("qwen3_coder", "step3p5", "step5", "mimo"), "qwen3_xml"),
    **dict.fromkeys(("glm47", "poolside_v1", "ling3"), "glm45"),
    **dict.fromkeys(("qwen", "qwen3_json", "ernie45", "granite4"), "hermes"),
    "deepseek_r1": "deepseek_v3",
    "gpt_oss": "openai",
    "hunyuan_a13b": "jamba",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
}

REASONING_FORMATS = (
    ReasoningFormat(
        "openai_gptoss",
        "<|channel|>analysis<|message|>",
        "<|end|>",
        marks_are_special=True,
        message="<|start|>assistant",
        answer="<|channel|>final<|message|>",
        sign="<|channel|>analysis",
        channels=True,
    ),
    ReasoningFormat(
        "cohere_command3",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        marks_are_special=True,
        dropped=_COHERE_ANSWER,
    ),
    ReasoningFormat(
        "solar_open",
        "<|think|>",
        "<|end|>",
        marks_are_special=True,
        message="<|begin|>assistant",
        answer="<|content|>",
        sign="<|begin|>assistant<|think|>",
        dropped=_SOLAR_ANSWER,
    ),
    ReasoningFormat("plamo3", "<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>", marks_are_special=True),
    ReasoningFormat("gemma4", "<|channel>thought", "<channel|>", marks_are_special=True),
    ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
    ReasoningFormat("hy_v3", "<think:opensource>", "</think:opensource>", marks_are_special=True),
    ReasoningFormat("minimax_m3", "<mm:think>", "</mm:think>", marks_are_special=True),
    ReasoningFormat("apriel", "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]", marks_are_special=True),
    ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
    # The answer of these has marks too; Granite 3.3 is the one whose template names them.
    *(
        ReasoningFormat(name, "<think>", "</think>", sign=f"<{mark}></{mark}>", dropped=(f"<{mark}>", f"</{mark}>"))
        for name, mark in (("ernie45", "response"), ("hunyuan_a13b", "answer"))
    ),
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
        return next((each for each in REASONING_FORMATS if (each.sign or each.closing) in (template or "")), None)
    return next((each for each in REASONING_FORMATS if each.name == wanted), None)
