"""Request fields of other servers' clients: those that have another name here, harmless ones, and unsupported ones.

Clients of vLLM, llama.cpp and Ollama send fields of their own, most of them with values that change nothing. Unknown
fields are ignored and named in a response header; fields that would change the answer are refused with a 400.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from octavo.errors import FieldError, shown
from octavo.server.bodies.fields import named
from octavo.server.bodies.openai_bodies import OF_ONE_ANSWER

# llama.cpp's names of fields; if both are given, Octavo's name wins.
OTHER_NAMES = {
    "repeat_penalty": "repetition_penalty",
    "n_predict": "max_tokens",
    "grammar": "guided_grammar",
    "json_schema": "guided_json",
}
_OTHERWISE = ("max_tokens", "repetition_penalty", "structured_outputs")
# Ollama's `options` that are fields of a request here; all others, such as `num_ctx`, belong to the server's start.
OLLAMA_OPTIONS = {
    **{name: name for name in (*OF_ONE_ANSWER, "typical_p", "tfs_z", "mirostat") if name not in _OTHERWISE},
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
}
# Values by which llama.cpp and vLLM mean "not set".
_UNSET = {"max_tokens": -1, "max_completion_tokens": -1, "seed": -1}

# Fields that have no effect at these values, and would change the answer at others.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # llama.cpp's samplers that Octavo does not have.
    "mirostat": (0,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "dynatemp_range": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "top_n_sigma": (0, -1),
    "n_keep": (0, -1),
    # OpenAI's older form of `tool_choice`, harmless without `functions`.
    "function_call": ("none", "auto"),
    "lora": ([],),
    "image_data": ([],),
    "images": ([],),
    # vLLM's inputs besides text.
    "prompt_embeds": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "kv_transfer_params": ({},),
}
# Fields that are harmless at any value: they affect how a server works, not what it answers.
HARMLESS = frozenset(
    {"cache_prompt", "id_slot", "keep_alive", "request_id", "spaces_between_special_tokens", "timings"}
)


def translate(given: dict[str, Any], known: Iterable[str]) -> None:
    """Rename a body's fields in place, and drop those without effect: null, neutral and harmless ones.

    Ollama's `options`, `format` and `think` become the fields that stand for them.

    Args:
        known: the names of the fields that the body's type declares.

    Raises:
        RequestError: a field of `NEUTRAL` asks for an unsupported feature.
    """
    known = frozenset(known)
    _translate_ollama(given, known)
    for other, name in OTHER_NAMES.items():
        if other in given and other not in known and name in known:
            value = given.pop(other)
            if given.get(name) is None:
                given[name] = value
    for name, unset in _UNSET.items():
        if name in known and type(given.get(name)) is int and given[name] == unset:
            given[name] = None
    for name, neutral in NEUTRAL.items():
        value = None if name in known else given.pop(name, None)
        if value is not None and value not in neutral:
            raise FieldError(name, "is not supported by this server")
    for name in HARMLESS & given.keys() - known:
        del given[name]


def _translate_ollama(given: dict[str, Any], known: frozenset[str]) -> None:
    options = given.get("options")
    if isinstance(options, dict) and "temperature" in known:
        rest = {name: value for name, value in options.items() if name not in OLLAMA_OPTIONS and value is not None}
        del given["options"]
        given |= {f"options.{name}": value for name, value in rest.items()}
        # The field itself wins, as a client that sends both means it for this server.
        for option, name in OLLAMA_OPTIONS.items():
            if options.get(option) is not None and given.get(name) is None:
                given[name] = options[option]
        limit = options.get("num_predict")
        if isinstance(limit, int | float) and limit <= 0 and given.get("max_tokens") == limit:
            given["max_tokens"] = None  # as in Ollama, where -1 and -2 say so
    if "response_format" in known and "format" in given:
        _translate_format(given, given.pop("format"))
    if "chat_template_kwargs" in known and "think" in given and "think" not in known:
        _translate_think(given, given.pop("think"))


def _translate_format(given: dict[str, Any], form: Any) -> None:
    if form is None or form == "":
        return
    if given.get("response_format") is not None:
        raise FieldError("format", "cannot be combined with response_format")
    if form == "json":
        given["response_format"] = {"type": "json_object"}
    elif isinstance(form, dict):
        given["response_format"] = {"type": "json_schema", "json_schema": {"schema": form}}
    else:
        raise FieldError("format", f'must be "json" or a JSON Schema, got {shown(form)}')


def _translate_think(given: dict[str, Any], think: Any) -> None:
    if isinstance(think, bool):
        variables = given.get("chat_template_kwargs")
        given["chat_template_kwargs"] = {"enable_thinking": think, **(variables if isinstance(variables, dict) else {})}
    elif isinstance(think, str):
        if given.get("reasoning_effort") is None:
            given["reasoning_effort"] = think
    elif think is not None:
        raise FieldError("think", f'must be true, false, or a level such as "low", got {shown(think)}')


def header_value(names: tuple[str, ...]) -> str:
    """Join field names as a header value, with '?' for characters that may not appear in one."""
    plain = ["".join(c if "!" <= c <= "~" and c != "," else "?" for c in name) or "?" for name in names]
    return named(plain)
