"""JSON of answers: encoded in pieces, and in a thread where it takes long, so that streams go on meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # it imports numpy, and commands that only need their options import this
    from octavo.engine.outputs import RequestOutput

# Number of small objects of a completion, apart from its tokens.
_COMPLETION_WEIGHT = 8
# An answer of at least this many small objects, about a millisecond of work, is assembled in a thread.
HEAVY = 512
# Number of list elements that are encoded at a time; with twenty alternatives each they take a millisecond.
_ENCODED_AT_ONCE = 64

Result = TypeVar("Result")

# Made once, because json.dumps with these arguments makes an encoder for every call.
_to_ascii_json = json.JSONEncoder(separators=(",", ":")).encode
_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event(content: str) -> str:
    """Format one server-sent event."""
    return f"data: {content}\n\n"


def dumps(value: Any) -> str:
    """Encode JSON for events, in ASCII, because many clients wrongly split lines at U+2028 and the like."""
    return _to_ascii_json(value)


async def offload(weight: int, work: Callable[[], Result]) -> Result:
    """Call `work`, in a thread if it is heavy, so that other streams continue meanwhile."""
    return work() if weight < HEAVY else await asyncio.to_thread(work)


def weight_of(output: RequestOutput) -> int:
    """Estimate how many small objects the JSON of an output will have."""
    weight = _COMPLETION_WEIGHT * len(output.outputs)
    for logprobs in (output.prompt_logprobs, *(completion.logprobs for completion in output.outputs)):
        if logprobs:
            weight += len(logprobs) * (1 + len(logprobs[-1].top if logprobs[-1] is not None else ()))
    return weight + sum(len(completion.token_ids) for completion in output.outputs) // 8


def free(lists: Iterable[list[Any]]) -> None:
    """Empty long lists of small objects a few at a time, so that other threads can run in between.

    Dropping the last reference to 4,000 tokens with twenty alternatives each frees 84,000 dicts at once: 11 ms.
    """
    for values in lists:
        while values:
            del values[-_ENCODED_AT_ONCE:]


def json_bytes(value: Any) -> bytes:
    """Encode JSON for whole responses, in UTF-8."""
    return _to_json(value).encode("utf-8", "replace")


def ascii_bytes(value: Any) -> bytes:
    """Encode JSON for events; see `dumps`."""
    return dumps(value).encode()


def json_pieces(response: dict[str, Any], encode: Callable[[Any], bytes] = json_bytes) -> list[bytes]:
    """Encode JSON in pieces, because the interpreter's lock is held while a piece is encoded."""
    pieces: list[bytes] = []
    _append_pieces(response, pieces, encode)
    return pieces


def _append_pieces(fields: dict[str, Any], pieces: list[bytes], encode: Callable[[Any], bytes]) -> None:
    if not any(isinstance(value, dict | list) and value for value in fields.values()):
        pieces.append(encode(fields))
        return
    separator = b"{"
    for name, value in fields.items():
        pieces.append(separator + encode(name) + b":")
        separator = b","
        if isinstance(value, dict) and value:
            _append_pieces(value, pieces, encode)
        elif _is_encoded_singly(name, value):
            for index, element in enumerate(value):
                pieces.append(b"," if index else b"[")
                _append_pieces(element, pieces, encode)
            pieces.append(b"]")
        elif isinstance(value, list) and len(value) > _ENCODED_AT_ONCE:
            parts = (value[start : start + _ENCODED_AT_ONCE] for start in range(0, len(value), _ENCODED_AT_ONCE))
            # Strip the brackets around each part.
            pieces.extend((b"," if index else b"[") + encode(part)[1:-1] for index, part in enumerate(parts))
            pieces.append(b"]")
        else:
            pieces.append(encode(value))
    pieces.append(b"}" if fields else b"{}")


def _is_encoded_singly(name: str, value: Any) -> bool:
    """Return whether a member is a list of objects that may be long: choices, or a response's items and their parts."""
    # Clients choose names too (`metadata`), so the values are inspected.
    listed = isinstance(value, list) and value and all(isinstance(element, dict) for element in value)
    return bool(listed) and (name in ("choices", "output") or (name == "content" and len(value) == 1))
