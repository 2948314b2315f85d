"""Attacks by structured outputs, tools, and the bodies of the newer APIs. Part of `attacks.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from tests.campaigns.watched_server import Answer, as_json, post

COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
USER = [{"role": "user", "content": "x"}]


def sent(path: str, *bodies: Any) -> Callable[[int], Coroutine[Any, Any, list[Answer]]]:
    """Send bodies to a path, all at once."""

    async def run(port: int) -> list[Answer]:
        return list(await asyncio.gather(*(post(port, path, as_json(body)) for body in bodies)))

    return run


def structured(**wanted: Any) -> dict[str, Any]:
    return {"prompt": [5] * 5, "max_tokens": 64, "structured_outputs": wanted}


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def called(tools: list[dict[str, Any]]) -> dict[str, Any]:
    return {"messages": USER, "max_tokens": 64, "tools": tools, "tool_choice": "required"}


def wide(count: int) -> dict[str, Any]:
    """A schema of an object with many properties."""
    return {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": 9} for i in range(count)}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def grammar_attacks() -> Iterator[tuple[str, Callable[[int], Coroutine[Any, Any, list[Answer]]]]]:
    """Yield (name, attack)."""
    ambiguous = 'start: a+\na: "x" | "xx" | "xxx" | a a'
    words = [f"word {i} of many" for i in range(3500)]
    yield "`regex` of `(a?){2000}a{2000}`, × 8", sent(COMPLETIONS, *[structured(regex="(a?){2000}a{2000}")] * 8)
    yield (
        "32 different `regex` of 30 kB",
        sent(COMPLETIONS, *[structured(regex=f"{i}" + "[a-z]" * 6000) for i in range(32)]),
    )
    yield "`regex` of 5 MB", sent(COMPLETIONS, structured(regex="a" * 5_000_000))
    yield "`choice` of 3,500 texts, n = 64", sent(COMPLETIONS, {**structured(choice=words), "n": 64})
    yield "an ambiguous `grammar`, n = 64", sent(COMPLETIONS, {**structured(grammar=ambiguous), "n": 64})
    yield "32 schemas of 600 properties", sent(COMPLETIONS, *[structured(json=wide(600 + i)) for i in range(32)])
    yield (
        "a schema of 5,000 levels",
        sent(
            COMPLETIONS,
            structured(json=nested(90)),
            as_json(structured(json=0)).replace(b"0}", b'{"not":' * 5000 + b"0" + b"}" * 5001),
        ),
    )
    yield (
        "128 tools of 2 kB that must be called, × 8",
        sent(CHAT, *[called([tool(f"t{i}", wide(40)) for i in range(128)])] * 8),
    )
    yield "10,000 tools", sent(CHAT, called([tool(f"t{i}", {}) for i in range(10_000)]))
    yield "a tool of 15 MB", sent(CHAT, called([tool("t", {"description": "x" * 15_000_000})]))
    yield "/v1/messages, 300,000 empty messages", sent(MESSAGES, {"max_tokens": 1, "messages": [{}] * 300_000})
    blocks = [{"type": "tool_result", "tool_use_id": "t", "content": "x"}] * 200_000
    yield (
        "/v1/messages, 200,000 tool results in one",
        sent(MESSAGES, {"max_tokens": 1, "messages": [{"role": "user", "content": blocks}]}),
    )
    yield (
        "count_tokens, 11 MB",
        sent(f"{MESSAGES}/count_tokens", {"messages": [{"role": "user", "content": "the model " * 1_100_000}]}),
    )
    yield "/v1/responses, 300,000 items", sent("/v1/responses", {"input": [{"role": "user", "content": "x"}] * 300_000})
    yield (
        "/v1/responses, 100,000 references",
        sent(
            "/v1/responses", {"input": [{"type": "item_reference", "id": f"msg_{i:032x}0000"} for i in range(100_000)]}
        ),
    )
    yield (
        "/v1/embeddings, 1,024 inputs of 500 ids",
        sent("/v1/embeddings", {"input": [[i % 1000] * 500 for i in range(1024)]}),
    )
