"""Fields of other servers' clients: what has another name here, what is harmless, and what cannot be served.

Clients of vLLM, llama.cpp and Ollama send fields of their own, most of them at values that change nothing. A field that
nobody here knows is ignored, and named in the answer's header; one that would change the answer is a 400.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from octavo.errors import RequestError, shortened

# llama.cpp's names; the longer one wins where both are given.
OTHER_NAMES = {"repeat_penalty": "repetition_penalty", "n_predict": "max_tokens"}
# Values by which llama.cpp and vLLM mean "not set".
_UNSET = {"max_tokens": -1, "max_completion_tokens": -1, "seed": -1}

# Known elsewhere, without effect here or at these values; at others they would change the answer.
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
    "lora": ([],),
    "image_data": ([],),
    "images": ([],),
    # vLLM's inputs besides text.
    "prompt_embeds": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "kv_transfer_params": ({},),
}
# Of no consequence whatever their value: they say how a server works, not what it answers.
HARMLESS = frozenset(
    {"cache_prompt", "id_slot", "keep_alive", "request_id", "spaces_between_special_tokens", "timings"}
)

# An error or a header names no more fields than that.
NAMED_FIELDS = 8


def translate(given: dict[str, Any], known: Iterable[str]) -> None:
    """Rename a body's fields in place, and drop those that say nothing: null, neutral and harmless ones.

    Args:
        known: the names of the fields that the body has.

    Raises:
        RequestError: a field of `NEUTRAL` asks for what is not there.
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
    """'a, b and 3 more': the first few of many names."""
    more = f" and {len(names) - NAMED_FIELDS} more" if len(names) > NAMED_FIELDS else ""
    return ", ".join(shortened(name) for name in names[:NAMED_FIELDS]) + more


def header_value(names: tuple[str, ...]) -> str:
    """Field names as a header may carry them: neither empty, nor with white space at an end."""
    plain = ["".join(c if "!" <= c <= "~" and c != "," else "?" for c in name) or "?" for name in names]
    return named(plain)
