"""Which formats a server's model speaks: what a chat becomes for its template, and how its answer is read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from octavo.dialect.constraint import calls_grammar
from octavo.dialect.formats import CallFormat, call_format, reasoning_format
from octavo.dialect.parser import Dialect
from octavo.dialect.writing import with_tools_described
from octavo.errors import RequestError
from octavo.server.tool_use import ToolUse
from octavo.structured_outputs import StructuredOutputsParams

# Characters at a prompt's end in which open reasoning is looked for.
_END_OF_PROMPT = 256


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """What a template is given.

    Attributes:
        tools: None where there are none, or the messages tell of them.
        num_added: messages that precede those of the body.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    num_added: int = 0


class Dialects:
    """The formats of one model.

    Args:
        template: the model's chat templates.
        tool_call_parser, reasoning_parser: names of formats; "auto": by the template; "none". A model whose template
            knows no tools is told of them in the system message, by "auto" in the format of Hermes.
    """

    def __init__(self, template: str, tool_call_parser: str, reasoning_parser: str) -> None:
        self._calls = call_format(tool_call_parser, template)
        self._reasoning = reasoning_format(reasoning_parser, template)
        self._template_knows_tools = re.search(r"\btools\b", template) is not None
        if tool_call_parser == "auto" and not self._template_knows_tools:
            self._calls = self._calls or call_format("hermes", template)

    def calls_for(self, tools: ToolUse) -> CallFormat | None:
        """The format of the calls that an answer may make; raises `RequestError` where it can make none."""
        if not tools:
            return None
        if self._calls is None:
            raise RequestError(
                "tools are not supported with this model: its chat template names tools, but in no known format of "
                "calls, or the server was started with --tool-call-parser none. Start it with --tool-call-parser NAME, "
                'or with --chat-template FILE; tool_choice "none" passes',
                param="tools",
            )
        return self._calls

    @staticmethod
    def constraint(dialect: Dialect, tools: ToolUse, *, parallel: bool) -> StructuredOutputsParams | None:
        """What holds the answer to calling, where it must."""
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
        """The messages and tools for the template, which may know nothing of tools."""
        if not tools or self._calls is None or self._template_knows_tools:
            return RenderedChat(messages, tools.tools or None)
        described = with_tools_described(messages, tools.tools, self._calls)
        return RenderedChat(described, None, len(described) - len(messages))

    def of_answer(self, calls: CallFormat | None, tools: ToolUse, prompt: str) -> Dialect:
        """How an answer to the rendered prompt is read."""
        reasoning = self._reasoning
        in_reasoning = has_reasoned = False
        if reasoning is not None:
            end = prompt[-_END_OF_PROMPT:]
            in_reasoning = end.rfind(reasoning.opening) > end.rfind(reasoning.closing)
            has_reasoned = end.rstrip().endswith(reasoning.closing)
        return Dialect(calls, reasoning, in_reasoning, tools.parameter_types, has_reasoned)
