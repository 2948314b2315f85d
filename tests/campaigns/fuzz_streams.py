"""Joins streams, to compare them with the same answers in one piece. Part of `fuzz_bodies.py`.

body ──┬── "stream": true  ──> pieces ──joined──┐
       └── "stream": false ──> answer ──────────┴── equal, but for ids, times and what came from the cache
"""

from __future__ import annotations

import json
from typing import Any

from octavo.server.bodies.messages_body import arguments_object
from tests.campaigns.fuzz_fields import CHAT, COMPLETIONS, MESSAGES, OLLAMA, RESPONSES
from tests.campaigns.fuzz_values import body_schema

LLAMACPP = "/completion", "/completions", "/infill"
STREAMED = {COMPLETIONS, CHAT, RESPONSES, MESSAGES, *OLLAMA, *LLAMACPP}
# Strings of which a stream sends one part after the other.
_TEXTS = {"text", "content", "reasoning_content", "reasoning", "thinking", "refusal", "arguments", "response"}
# What two answers to one body may have different.
_OWN = {
    *("id", "item_id", "call_id", "tool_call_id", "created", "created_at", "completed_at", "object", "timings"),
    *("completion_tokens_details", "prompt_tokens_details", "input_tokens_details", "cache_read_input_tokens"),
    "cache_creation_input_tokens",
    *(
        "octavo",
        "stream",
        "stream_options",
        "kv_transfer_params",
        "cache_creation",
        "tokens_cached",
        "tokens_evaluated",
    ),
    *("total_duration", "load_duration", "prompt_eval_duration", "eval_duration", "prompt_eval_count"),
    *("prompt_token_ids", "generation_settings", "prompt_progress", "prompt", "signature", "input_tokens"),
}


def twins(path: str, given: bytes) -> tuple[bytes, bytes] | None:
    """Return a body that asks for a stream, and one that asks for the same in one piece; None if it may not say so."""
    body, fields = json.loads(given), body_schema(path)["properties"]
    if not isinstance(body, dict):
        return None
    if "seed" in fields:
        body["seed"] = body.get("seed") or 7
    elif not isinstance(options := body.setdefault("options", {}), dict):
        return None
    else:
        options["seed"] = 7
    if "return_token_ids" in fields:
        body["return_token_ids"] = True
    usage = {"stream_options": {"include_usage": True}} if path in (COMPLETIONS, CHAT) else {}
    body.pop("stream_options", None)
    return tuple(
        json.dumps({**body, "stream": stream, **(usage if stream else {})}).encode() for stream in (True, False)
    )  # type: ignore[return-value]


def difference(path: str, stream: bytes, whole: bytes) -> str:
    """Return how a stream's joined pieces differ from the answer in one piece, or ""."""
    events = [event.partition(b"data: ")[2] for event in stream.split(b"\n\n")[:-1]]
    pieces = [json.loads(piece) for piece in (stream.splitlines() if path in OLLAMA else events) if piece != b"[DONE]"]
    if any("error" in piece and piece["error"] for piece in pieces):
        return ""  # it has failed, as `fault_of` has judged
    if path in LLAMACPP:  # several completions are a list in one piece
        parts = [
            _merged_all([piece for piece in pieces if piece["index"] == i]) for i in {p["index"]: 0 for p in pieces}
        ]
        joined = sorted(parts, key=lambda part: part["index"]) if len(parts) > 1 else parts[0]
    else:
        joined = {RESPONSES: _response, MESSAGES: _message}.get(path, _merged_all)(pieces)
    found, expected = _comparable(joined), _comparable(json.loads(whole))
    if found != expected:
        return "a stream that joins to another answer: " + _first_difference(found, expected)
    return "" if path in LLAMACPP else _unequal_counts(json.loads(whole))


def _merged_all(pieces: list[Any]) -> Any:
    whole: Any = None
    for piece in pieces:
        for choice in piece.get("choices") or ():
            if "delta" in choice:
                choice["message"] = choice.pop("delta")
        whole = _merged(whole, piece)
    for choice in whole.get("choices") or ():
        for call in (choice.get("message") or {}).get("tool_calls") or ():
            del call["index"]  # only pieces have one
    return whole


def _merged(whole: Any, piece: Any, key: str = "") -> Any:
    """Return what has come so far with one more piece."""
    if whole is None or piece is None:
        return piece if whole is None else whole
    if isinstance(whole, dict) and isinstance(piece, dict):
        return {name: _merged(whole.get(name), piece.get(name), name) for name in whole | piece}
    if isinstance(whole, list) and isinstance(piece, list):
        if not piece or not isinstance(piece[0], dict) or "index" not in piece[0]:
            return whole + piece
        by_index = {each["index"]: each for each in whole}
        for each in piece:
            by_index[each["index"]] = _merged(by_index.get(each["index"]), each)
        return [by_index[index] for index in sorted(by_index)]
    return whole + piece if key in _TEXTS and isinstance(whole, str) else piece


def _response(events: list[Any]) -> Any:
    """Return the response that the last event holds, whose texts are those of the events before."""
    response = events[-1]["response"]
    texts: dict[tuple[int, int], str] = {}
    calls: dict[int, str] = {}
    for event in events:
        if event["type"] == "response.output_text.delta":
            place = event["output_index"], event["content_index"]
            texts[place] = texts.get(place, "") + event["delta"]
        elif event["type"] == "response.function_call_arguments.delta":
            calls[event["output_index"]] = calls.get(event["output_index"], "") + event["delta"]
    for (item, part), text in texts.items():
        response["output"][item]["content"][part]["text"] = text
    for item, arguments in calls.items():
        response["output"][item]["arguments"] = arguments
    return response


def _message(events: list[Any]) -> Any:
    message: dict[str, Any] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                message["content"].append(event["content_block"])
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                for name in ("text", "thinking"):
                    if name in delta:
                        block[name] = block.get(name, "") + delta[name]
                block["json"] = block.get("json", "") + delta.get("partial_json", "")
            case "content_block_stop":
                block = message["content"][event["index"]]
                if written := block.pop("json", ""):
                    block["input"] = arguments_object(written)
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    return message


def _comparable(value: Any) -> Any:
    """Return a value without what is empty, and what two answers to one body may have different."""
    if isinstance(value, dict):
        kept = {name: _comparable(each) for name, each in value.items() if name not in _OWN}
        return {name: each for name, each in kept.items() if each not in (None, "", [], {})}
    return [_comparable(each) for each in value] if isinstance(value, list) else value


def _first_difference(found: Any, expected: Any, place: str = "") -> str:
    if isinstance(found, dict) and isinstance(expected, dict):
        for name in sorted(found | expected):
            if found.get(name) != expected.get(name):
                return _first_difference(found.get(name), expected.get(name), f"{place}.{name}")
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for index, pair in enumerate(zip(found, expected, strict=True)):
            if pair[0] != pair[1]:
                return _first_difference(*pair, f"{place}[{index}]")
    return f"{place}: {str(found)[:200]}, in one piece {str(expected)[:200]}"


def _unequal_counts(answer: Any) -> str:
    """Return what does not add up in an answer of OpenAI's older APIs, or ""."""
    choices, usage = answer.get("choices") or [], answer.get("usage") or {}
    if not choices or not all("token_ids" in choice for choice in choices):
        return ""
    counts = [len(choice["token_ids"] or ()) for choice in choices]
    if usage["total_tokens"] != usage["prompt_tokens"] + usage["completion_tokens"]:
        return f"usage that does not add up: {usage}"
    if usage["completion_tokens"] < sum(counts):
        return f"{usage['completion_tokens']} completion_tokens, but token_ids of {counts}"
    for choice, count in zip(choices, counts, strict=True):
        entries = (choice.get("logprobs") or {}).get("content") or []
        if entries and len(entries) != count:
            return f"{len(entries)} logprobs of {count} tokens"
        message = choice.get("message") or {}
        if entries and not (message.get("tool_calls") or message.get("reasoning_content")):
            spelt, text = b"".join(bytes(entry["bytes"] or ()) for entry in entries), message.get("content") or ""
            if not spelt.decode(errors="replace").startswith(text.rstrip("\ufffd")):
                return f"logprobs of {spelt!r}, but the text is {text!r}"
    return ""
