"""The formats of a server's model: what its chat template is given for a chat, and how its answer is parsed."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from octavo.dialect.constraint import calls_grammar
from octavo.dialect.detection import Render, TemplateCalls, template_calls
from octavo.dialect.formats import CallFormat, call_format, reasoning_format
from octavo.dialect.parser import Dialect
from octavo.dialect.writing import with_tools_described
from octavo.errors import FieldError
from octavo.server.bodies.tool_use import ToolUse
from octavo.structured_outputs import StructuredOutputsParams

# Number of characters at the end of a prompt that are searched for open reasoning.
_END_OF_PROMPT = 256


@dataclass(frozen=True, slots=True)
class Speech:
    """How an answer's text is parsed, and which parts are returned.

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
        num_added: number of messages added before those of the body.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    num_added: int = 0


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
        self._arguments_as_text = written.as_text
        self._reasoning = reasoning_format(reasoning_parser, template)
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
            reasoning=dialect.reasoning_part,
        )
        return StructuredOutputsParams(grammar=grammar)

    def chat(self, messages: list[dict[str, Any]], tools: ToolUse) -> RenderedChat:
        """Return the template's input; adapts it to templates without support for tools or the role `developer`."""
        if not self._template_knows_developers:
            messages = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]
        if not tools or self._calls is None or self._template_knows_tools:
            if self._arguments_as_text:
                messages = [_with_text_arguments(each) for each in messages]
            return RenderedChat(messages, tools.tools or None)
        described = with_tools_described(messages, tools.tools, self._calls)
        return RenderedChat(described, None, len(described) - len(messages))

    def of_answer(self, calls: CallFormat | None, tools: ToolUse, prompt: str) -> Dialect:
        """Return the dialect by which the answer to a rendered prompt is parsed."""
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
