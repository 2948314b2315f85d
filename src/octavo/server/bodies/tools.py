"""The forms a chat's answer may take: its tools and response format, and how the model writes calls and reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from octavo.dialect.constraint import calls_grammar
from octavo.dialect.detection import Render, TemplateCalls, reasoning_marks, takes_system_messages, template_calls
from octavo.dialect.formats import CallFormat, call_format, reasoning_format
from octavo.dialect.parser import Dialect
from octavo.dialect.writing import (
    with_calls_written,
    with_single_calls,
    with_tools_described,
    without_system_messages,
)
from octavo.errors import FieldError, shown
from octavo.request_limits import RequestLimits
from octavo.server.bodies.fields import Declared, taken
from octavo.structured_outputs import StructuredOutputsParams
from octavo.text.chat_template import REASONING_FIELDS

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that a chat may call.

    Attributes:
        tools: OpenAI's tool objects, as chat templates expect them.
        required: whether the answer must call a tool.
        named: name of the only tool that the answer may, and must, call; None if there is no such restriction.
    """

    tools: list[dict[str, Any]] = field(default_factory=list)
    required: bool = False
    named: str | None = None

    def __bool__(self) -> bool:
        return bool(self.tools)

    @property
    def parameter_types(self) -> dict[str, dict[str, str]]:
        """The types of each tool's parameters, for parameters whose schema names one type."""
        return {tool["function"]["name"]: _types(tool["function"].get("parameters")) for tool in self.tools}

    @property
    def callable(self) -> list[dict[str, Any]]:
        """The functions that the answer may call."""
        functions = [tool["function"] for tool in self.tools]
        return [each for each in functions if self.named in (None, each["name"])]


def checked_tools(tools: list[dict[str, Any]] | None, choice: Any, limits: RequestLimits) -> ToolUse:
    """Return the tools that a body offers; raise `RequestError` naming a tool that cannot be used."""
    choice, allowed = _allowed_tools(choice)
    named, required = _choice(choice)
    if not tools:
        if required or named is not None:
            raise FieldError("tool_choice", f'must be "none" or "auto" without tools, got {shown(choice)}')
        return ToolUse()
    limits.check_tools(len(tools), tools)
    names = [_checked_name(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise FieldError(f"tools[{i}].function.name", f"must differ from other tools' names, got {shown(name)}")
    if named is not None and named not in names:
        raise FieldError("tool_choice", f"must name one of the tools, got {shown(named)}")
    if unknown := [name for name in allowed or () if name not in names]:
        raise FieldError("tool_choice", f"must name tools of this request, got {shown(unknown[0])}")
    if choice == "none":
        return ToolUse()
    offered = [tool for tool, name in zip(tools, names, strict=True) if allowed is None or name in allowed]
    return ToolUse(offered, required or named is not None, named)


def _allowed_tools(choice: Any) -> tuple[Any, list[str] | None]:
    """Resolve OpenAI's `allowed_tools`: return the mode as the choice, and the names of the allowed tools."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return choice, None
    # Nested in chat completions, flat in responses.
    allowed = choice.get("allowed_tools", choice)
    mode, tools = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
    named = [_choice(tool)[0] for tool in tools] if isinstance(tools, list) else []
    if mode not in ("auto", "required") or not named:
        raise FieldError(
            "tool_choice", 'of type "allowed_tools" needs a mode, "auto" or "required", and a list of tools'
        )
    return mode, [name for name in named if name is not None]


def _choice(choice: Any) -> tuple[str | None, bool]:
    """Return the name of the tool that must be called, if given, and whether any tool must be called."""
    if choice is None or choice in ("none", "auto"):
        return None, False
    if choice == "required":
        return None, True
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else choice.get("name")
        if isinstance(name, str) and name:
            return name, True
    raise FieldError(
        "tool_choice",
        'must be "none", "auto", "required" or {"type": "function", "function": {"name": "…"}}, '
        f"got {shown(choice)}",
    )


def _checked_name(tool: dict[str, Any], where: str) -> str:
    if tool.get("type", "function") != "function":
        raise FieldError(where, f"of type {shown(tool.get('type'))} is not supported by this server, only 'function'")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise FieldError(f"{where}.function", f"must be an object, got {shown(function)}")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise FieldError(f"{where}.function.name", f"must be 1 to 128 letters, digits, _, ., : or -, got {shown(name)}")
    if not isinstance(description := function.get("description"), str | None):
        raise FieldError(f"{where}.function.description", f"must be a string, got {shown(description)}")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise FieldError(f"{where}.function.parameters", f"must be a JSON Schema, got {shown(parameters)}")
    return name


def _types(schema: Any) -> dict[str, str]:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    return {
        name: kind
        for name, part in properties.items()
        if isinstance(part, Mapping) and isinstance(kind := part.get("type"), str)
    }


def checked_calls(calls: Any, where: str, limits: RequestLimits) -> list[dict[str, Any]]:
    """Return the calls of an assistant's message with their arguments as objects, as templates expect."""
    if not isinstance(calls, list):
        raise FieldError(where, f"must be a list of tool calls, got {shown(calls)}")
    limits.check_messages(len(calls), "tool calls in one message")
    return [_checked_call(call, f"{where}[{i}]", limits) for i, call in enumerate(calls)]


def _checked_call(call: Any, where: str, limits: RequestLimits) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise FieldError(where, f"must be a call of a function with a name, got {shown(call)}")
    limits.check_name(f"{where}.function.name", name)
    if isinstance(identifier := call.get("id"), str):
        limits.check_name(f"{where}.id", identifier)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            # The model's output was cut off or is not JSON: pass it to the template as it is.
            arguments = {"arguments": arguments}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise FieldError(f"{where}.function.arguments", f"must be a JSON object, got {shown(arguments)}")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


_FORMATS = ("text", "json_object", "json_schema")
_GUIDED = "guided_"


@dataclass(kw_only=True)
class Guided(Declared):
    """vLLM's older names of the fields of `structured_outputs`."""

    guided_json: dict[str, Any] | str | None = taken("a JSON Schema of the answer", bulky=True)
    guided_regex: str | None = taken("a regular expression that the answer matches", bulky=True)
    guided_choice: list[str] | None = taken("the answers to choose from", bulky=True)
    guided_grammar: str | None = taken("a grammar of the answer", bulky=True)
    guided_whitespace_pattern: str | None = taken("the white space in JSON", bulky=True)
    guided_decoding_backend: str | None = taken("has no effect", limit="max_name_length")


_OPTIONS = {each.name: each.name.removeprefix(_GUIDED) for each in fields(Guided) if each.metadata["taken"]["bulky"]}


def structured_outputs_of(
    body: Guided, response_format: dict[str, Any] | None, described: Mapping[str, Any] | None
) -> StructuredOutputsParams | None:
    """Return the structured output that a body asks for, or None.

    Args:
        described: its field `structured_outputs`.

    Raises:
        RequestError: a description is invalid, or the body has several.
    """
    found = {
        "response_format": _of_response_format(response_format),
        "structured_outputs": StructuredOutputsParams.of(described) if described else None,
        "guided_*": _of_guided(body),
    }
    given = [name for name, wanted in found.items() if wanted is not None]
    if len(given) > 1:
        raise FieldError(given[1], f"cannot be combined with {given[0]}")
    return found[given[0]] if given else None


def _of_response_format(given: Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    if given is None or given.get("type") == "text":
        return None
    # llama.cpp's form: the schema next to the type.
    direct = given.get("schema") if "json_schema" not in given else None
    if given.get("type") == "json_object" and not direct:
        return StructuredOutputsParams(json_object=True)
    if given.get("type") not in ("json_object", "json_schema"):
        raise FieldError(
            "response_format",
            f"of type {shown(given.get('type'))} is not supported by this server, only "
            + " and ".join(map(repr, _FORMATS)),
        )
    described = given.get("json_schema") if direct is None else {"schema": direct}
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(described, dict) or not isinstance(schema, (dict, bool)):
        raise FieldError("response_format.json_schema", 'must be {"schema": {…}}, got ' + shown(described))
    strict = described.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise FieldError("response_format.json_schema.strict", f"must be true or false, got {shown(strict)}")
    # Strict by default, as in vLLM: a client that sends a schema expects it to hold.
    return StructuredOutputsParams(json=schema, strict=strict is not False)


def _of_guided(body: Guided) -> StructuredOutputsParams | None:
    given = {option: value for name, option in _OPTIONS.items() if (value := getattr(body, name)) not in (None, "", [])}
    return StructuredOutputsParams(**given) if given else None


# Number of characters at the end of a prompt that are searched for open reasoning.
_END_OF_PROMPT = 256


@dataclass(frozen=True, slots=True)
class Speech:
    """Parsing of an answer's text, and the parts to return.

    Attributes:
        one_call: report only the first of several calls (`parallel_tool_calls: false`).
        tells_reasoning: whether reasoning is returned or left out.
    """

    dialect: Dialect = field(default_factory=Dialect)
    one_call: bool = False
    tells_reasoning: bool = True

    def __bool__(self) -> bool:
        return bool(self.dialect)


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The input of a chat template.

    Attributes:
        tools: the tools to pass to the template; None if there are none, or if the messages describe them.
        places: the index in `messages` of each message of the body.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    places: Sequence[int]


class Dialects:
    """The formats of one model.

    Args:
        template: the model's chat templates, concatenated.
        tool_call_parser: name of the format of tool calls, "auto" to find out how the template writes them, or "none".
            If it does not support tools, or in an unknown format, "auto" describes them in the system message, as
            "hermes" has them.
        render: renders a chat with the template; None if there is none.
        reasoning_parser: name of the format of reasoning, "auto" to detect it in the template, or "none".

    Attributes:
        has_template: whether the model has a chat template.
    """

    def __init__(
        self, template: str, tool_call_parser: str, reasoning_parser: str, render: Render | None = None
    ) -> None:
        written = template_calls(render, template) if template and render is not None else TemplateCalls()
        self._arguments_as_text, self._calls_are_dropped = written.as_text, written.are_dropped
        self._one_call_a_message = written.one_a_message
        self._takes_system_messages = render is None or not template or takes_system_messages(render)
        marks = reasoning_marks(render, template) if template and render is not None else template
        self._reasoning = reasoning_format(reasoning_parser, marks)
        self.has_template = bool(template)
        self._template_knows_developers = "developer" in template
        self._template_knows_tools = re.search(r"\btools\b", template) is not None
        self._calls = call_format(tool_call_parser)
        if tool_call_parser == "auto":
            self._calls = written.format or call_format("hermes")
            self._template_knows_tools = self._template_knows_tools and written.format is not None

    @property
    def has_calls(self) -> bool:
        """Whether the format of tool calls is known."""
        return self._calls is not None

    @property
    def has_reasoning(self) -> bool:
        """Whether the format of reasoning is known."""
        return self._reasoning is not None

    def calls_for(self, tools: ToolUse) -> CallFormat | None:
        """Return the format of an answer's calls, or None if it has no tools; raise `RequestError` if none is known."""
        if not tools:
            return None
        if self._calls is None:
            raise FieldError(
                "tools",
                "are not supported: the server was started with --tool-call-parser none. Start it with "
                '--tool-call-parser auto, or send tool_choice "none"',
            )
        return self._calls

    @staticmethod
    def constraint(dialect: Dialect, tools: ToolUse, *, parallel: bool) -> StructuredOutputsParams | None:
        """Return the constraint that makes an answer call a tool, or None if it need not."""
        if not tools.required or dialect.calls is None:
            return None
        grammar = calls_grammar(
            dialect.calls,
            tools.callable,
            parallel=parallel and tools.named is None,
            reasoning=dialect.reasoning_part(calls=True),
        )
        return StructuredOutputsParams(grammar=grammar)

    def chat(self, messages: list[dict[str, Any]], tools: ToolUse) -> RenderedChat:
        """Return the template's input; adapts it to templates without support for tools, or for the roles `developer`
        or `system`."""
        if not self._template_knows_developers:
            messages = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]
        if self._calls is not None and self._calls.channels:
            messages = [_with_one_analysis(each) for each in messages]
        passed, added = tools.tools or None, 0
        split: Sequence[int] = range(len(messages))
        if tools and self._calls is not None and not self._template_knows_tools:
            described = with_tools_described(messages, tools.tools, self._calls)
            messages, passed, added = described, None, len(described) - len(messages)
        elif self._calls_are_dropped and self._calls is not None:
            messages = with_calls_written(messages, self._calls)
        else:
            if self._one_call_a_message:
                messages, split = with_single_calls(messages)
            if self._arguments_as_text:
                messages = [_with_text_arguments(each) for each in messages]
        places: Sequence[int] = range(len(messages))
        if not self._takes_system_messages:
            messages, places = without_system_messages(messages)
        return RenderedChat(messages, passed, [places[added + each] for each in split])

    def of_answer(self, calls: CallFormat | None, tools: ToolUse, prompt: str) -> Dialect:
        """Return the dialect that parses the answer to a rendered prompt."""
        reasoning = self._reasoning
        in_reasoning = has_reasoned = False
        if reasoning is not None:
            end = prompt[-_END_OF_PROMPT:]
            in_reasoning = end.rfind(reasoning.opening) > end.rfind(reasoning.closing)
            has_reasoned = end.rstrip().endswith(reasoning.closing)
        return Dialect(calls, reasoning, in_reasoning, tools.parameter_types, has_reasoned)


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have their arguments as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _with_one_analysis(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message for harmony's template, which takes content or reasoning beside a call, and refuses both."""
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name)), None)
    if not (message.get("tool_calls") and message["content"] and reasoning):
        return message
    kept = {name: value for name, value in message.items() if name not in REASONING_FIELDS}
    return {**kept, "content": f"{reasoning}\n\n{message['content']}"}
