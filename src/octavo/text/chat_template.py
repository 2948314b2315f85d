"""Render chat templates as transformers does: messages in, one prompt string out.

Templates come with models, so they run in jinja2's sandbox. Beyond jinja itself they may use what transformers offers
(utils/chat_template_utils.py): `raise_exception`, `strftime_now`, a `tojson` that escapes nothing, `break` and
`continue`, and `{% generation %}` blocks, which mark the assistant's output for training.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache, lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.parser
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.errors import ConfigError, FieldError, RequestError, shown

# Names that clients and templates have for the reasoning of a message.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# Exceptions of a template on unexpected messages, apart from its own errors. RuntimeError: it recurses too deeply.
_RENDERING_ERRORS = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError),
)
# Maximum number of characters of a rendered chat: several times the largest body.
MAX_RENDERED = 64 * 1024 * 1024


def render_chat(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """Render the prompt for `messages`. It has its own special tokens: encode it with add_special_tokens=False.

    Content given as parts, `[{"type": "text", "text": …}, …]`, becomes one string with a line break between parts.

    Args:
        variables: further variables of the template, such as `bos_token` or `enable_thinking`.

    Raises:
        RequestError: there is no template or no message, content is not text, or the template refused the messages,
            in which case the error has its message.
    """
    if template is None:
        raise RequestError(
            "this model has no chat template: send a plain prompt to /v1/completions instead", param="messages"
        )
    if not messages:
        raise FieldError("messages", "must not be empty")
    conversation = [_normalize(message, index) for index, message in enumerate(messages)]
    try:
        pieces = _compile(template).generate(
            messages=conversation,
            tools=None if tools is None else [dict(tool) for tool in tools],
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
        return _joined(pieces)
    except _RENDERING_ERRORS as error:
        raise RequestError(f"the model's chat template refused these messages: {error}", param="messages") from error


def check_template(template: str, name: str) -> None:
    """Raise `ConfigError` if a template has a syntax error."""
    try:
        _compile(template)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"chat_template: {name}, line {error.lineno}: {error.message}") from error


# The nodes of a plain template. The output of each is bounded by its operands.
_PLAIN = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.Name, nodes.Const, nodes.Getattr, nodes.Getitem),
    *(nodes.Slice, nodes.If, nodes.CondExpr, nodes.For, nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not),
    *(nodes.Add, nodes.Concat, nodes.Test, nodes.Filter, nodes.Assign, nodes.Call, nodes.Neg),
)
_PLAIN_FILTERS = frozenset({"trim", "length", "upper", "lower"})
_PLAIN_METHODS = frozenset({"strip", "lstrip", "rstrip", "startswith", "endswith"})
_LONGEST_PLAIN = 8192


def is_plain(template: str) -> bool:
    """Return whether rendering a template takes no longer than its length times that of the messages.

    So it is for those that walk once over the messages and print their fields. A template that may do more (nested
    loops, `range`, macros, `%`, which pads to any width, text that grows from one variable to the next) is not plain,
    though it may be harmless.
    """
    if len(template) > _LONGEST_PLAIN:
        return False
    try:
        tree = _environment().parse(template)
    except jinja2.TemplateSyntaxError:
        return False
    assigned = {each.target.name for each in tree.find_all(nodes.Assign) if isinstance(each.target, nodes.Name)}
    return all(_is_plain(node, assigned) for node in _descendants(tree))


def _is_plain(node: nodes.Node, assigned: set[str]) -> bool:
    match node:
        case nodes.Name():
            return node.name == "raise_exception" or node.name not in _environment().globals
        case nodes.For():
            inner = (each for each in _descendants(node) if each is not node)
            return not node.recursive and not any(isinstance(each, nodes.For) for each in inner)
        case nodes.Filter():
            return node.name in _PLAIN_FILTERS and not (node.args or node.kwargs or node.dyn_args or node.dyn_kwargs)
        case nodes.Call(node=nodes.Name(name=name)):
            return name == "raise_exception"
        case nodes.Call():
            return isinstance(node.node, nodes.Getattr) and node.node.attr in _PLAIN_METHODS
        case nodes.Assign():  # text that is put together from two variables may double with every assignment
            used = [name for name in node.node.find_all(nodes.Name) if name.name in assigned]
            return isinstance(node.target, nodes.Name) and len(used) <= 1
        case _:
            return isinstance(node, _PLAIN)


def _descendants(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    for child in node.iter_child_nodes():
        yield from _descendants(child)


def _joined(pieces: Iterable[str]) -> str:
    """Join the pieces of a rendered template; raise ValueError as soon as they are too long."""
    taken: list[str] = []
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > MAX_RENDERED:
            raise ValueError(f"its output exceeds {MAX_RENDERED} characters")
        taken.append(piece)
    return "".join(taken)


def _normalize(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return a message as templates expect it: keys without value removed, text parts joined, and reasoning under all
    names that templates use for it."""
    if not isinstance(message, Mapping):
        raise FieldError(f"messages[{index}]", f"must be an object, got {shown(message)}")
    present = {key: value for key, value in message.items() if value is not None}
    if "content" in present:
        present["content"] = _text(present["content"], index)
    reasoning = next((present[key] for key in REASONING_FIELDS if key in present), None)
    if reasoning is not None:
        present = {**dict.fromkeys(REASONING_FIELDS, reasoning), **present, "reasoning_content": reasoning}
    return present


def _text(content: Any, index: int) -> str:
    if isinstance(content, str):
        return content
    where = f"messages[{index}].content"
    if not isinstance(content, list | tuple):
        raise FieldError(where, f"must be a string or a list of parts, got {shown(content)}")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise FieldError(where, f"must contain parts of type 'text' only, got {shown(kind)}")
        texts.append(part["text"])
    return "\n".join(texts)


class _GenerationBlocks(jinja2.ext.Extension):
    """Ignores the tags `{% generation %}` and `{% endgeneration %}`, and keeps what they enclose."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    functions: dict[str, Callable[..., Any]] = {"raise_exception": _raise, "strftime_now": _strftime_now}
    environment.globals.update(functions)
    return environment


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
