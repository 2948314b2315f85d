"""The input of `octavo generate`: prompts from arguments, lines of text or JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from octavo.errors import ConfigError, FieldError, RequestError, shown
from octavo.sampling_params import SamplingParams
from octavo.text_file import read_text

_KINDS = ("prompt", "prompt_token_ids", "messages")


@dataclass(frozen=True, slots=True)
class PromptInput:
    """One request of a batch.

    Attributes:
        given: the prompt as it was given: text, token ids or messages.
        source: where it was read, such as 'prompts.jsonl, line 3'; empty for an argument.
        messages: the conversation; None if the prompt is not one.
    """

    given: str | list[int] | list[dict[str, Any]]
    params: SamplingParams
    source: str = ""
    messages: list[dict[str, Any]] | None = None

    @property
    def engine_prompt(self) -> dict[str, Any]:
        """The prompt in the form that `LLM.generate` takes."""
        return {"prompt" if isinstance(self.given, str) else "prompt_token_ids": self.given}


def prompts_from_arguments(texts: Sequence[str], options: Mapping[str, Any]) -> list[PromptInput]:
    """Return one prompt per text, all with the same sampling options."""
    params = SamplingParams(**options)
    return [PromptInput(text, params) for text in texts]


def read_prompts(path: str, options: Mapping[str, Any]) -> list[PromptInput]:
    """Read the prompts of a text or JSONL file ('-' is stdin); `options` are defaults that a line may override.

    Stdin has no name that shows its format, so it is JSONL if its first line begins with '{'. Empty lines are skipped.

    Raises:
        ConfigError: the file cannot be read, or lines are bad; the first bad line is described, the others counted.
    """
    text = sys.stdin.read() if path == "-" else read_text(path)
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    name = "stdin" if path == "-" else path
    is_jsonl = path.endswith(".jsonl") or (path == "-" and bool(lines) and lines[0][1].lstrip().startswith("{"))
    if not is_jsonl:
        params = SamplingParams(**options)
        return [PromptInput(line, params, f"{name}, line {number}") for number, line in lines]
    prompts: list[PromptInput] = []
    bad: list[str] = []
    for number, line in lines:
        source = f"{name}, line {number}"
        try:
            prompts.append(_parse_json_line(line, options, source))
        except (RequestError, json.JSONDecodeError) as error:
            bad.append(f"{source}: {error}")
    if bad:
        others = f" (and {len(bad) - 1} more bad lines)" if len(bad) > 1 else ""
        raise ConfigError(bad[0] + others)
    return prompts


def _parse_json_line(line: str, options: Mapping[str, Any], source: str) -> PromptInput:
    entry = json.loads(line)
    if not isinstance(entry, dict):
        raise RequestError(f"expected a JSON object, got {line.strip()[:40]}")
    kinds = [kind for kind in _KINDS if kind in entry]
    if len(kinds) != 1:
        raise RequestError(f"needs exactly one of {', '.join(_KINDS)}; it has {' and '.join(kinds) or 'none'}")
    given = entry.pop(kinds[0])
    known = [field.name for field in fields(SamplingParams)]
    if unknown := sorted(set(entry) - set(known)):
        raise RequestError(f"unknown field {unknown[0]!r}; known: {', '.join((*_KINDS, *known))}")
    _check_shape(kinds[0], given)
    params = _line_params({**options, **entry})
    return PromptInput(given, params, source, messages=given if kinds[0] == "messages" else None)


def _check_shape(kind: str, given: object) -> None:
    if kind == "prompt":
        good, wanted = isinstance(given, str), "a string"
    elif kind == "prompt_token_ids":
        good, wanted = isinstance(given, list) and all(type(token) is int for token in given), "a list of integers"
    else:
        good = isinstance(given, list) and bool(given) and all(isinstance(message, dict) for message in given)
        wanted = "a list of messages"
    if not good:
        raise FieldError(kind, f"must be {wanted}, got {shown(given)}")


def _line_params(options: dict[str, Any]) -> SamplingParams:
    try:
        return SamplingParams(**options)
    except TypeError as error:
        raise RequestError(f"sampling options of a wrong type: {error}") from error
