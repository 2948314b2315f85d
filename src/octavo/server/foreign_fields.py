"""Request fields of other servers' clients: those that have another name here, harmless ones, and unsupported ones.

Clients of vLLM, llama.cpp and Ollama send fields of their own, most of them with values that change nothing. Unknown
fields are ignored and named in a response header; fields that would change the answer are refused with a 400.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from octavo.errors import RequestError, shortened

# llama.cpp's names of fields; if both are given, Octavo's name wins.
OTHER_NAMES = {
    "repeat_penalty": "repetition_penalty",
    "n_predict": "max_tokens",
    "grammar": "guided_grammar",
    "json_schema": "guided_json",
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

# Maximum number of fields that an error or a header names.
NAMED_FIELDS = 8


def translate(given: dict[str, Any], known: Iterable[str]) -> None:
    """Rename a body's fields in place, and drop those without effect: null, neutral and harmless ones.

    Args:
        known: the names of the fields that the body's type declares.

    Raises:
        RequestError: a field of `NEUTRAL` asks for an unsupported feature.
    """
    known = frozenset(known)
    for other, name in OTHER_NAMES.items():
        if other in given and other not in known and name in known:
            value = given.pop(other)
            given.setdefault(name, value)
    for name, unset in _UNSET.items():
        if name in known and type(given.get(name)) is int and given[name] == unset:
            given[name] = None
    for name, neutral in NEUTRAL.items():
        value = None if name in known else given.pop(name, None)
        if value is not None and value not in neutral:
            raise RequestError(f"{name} is not supported by this server", param=name)
    for name in HARMLESS & given.keys() - known:
        del given[name]


def named(names: list[str]) -> str:
    """Join names as in 'a, b and 3 more', with at most `NAMED_FIELDS` of them."""
    more = f" and {len(names) - NAMED_FIELDS} more" if len(names) > NAMED_FIELDS else ""
    return ", ".join(shortened(name) for name in names[:NAMED_FIELDS]) + more


def header_value(names: tuple[str, ...]) -> str:
    """Join field names as a header value, with '?' for characters that may not appear in one."""
    plain = ["".join(c if "!" <= c <= "~" and c != "," else "?" for c in name) or "?" for name in names]
    return named(plain)
