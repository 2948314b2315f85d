"""Attacks by what a stranger may think of: odd requests of every endpoint. Part of `attacks.py`."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from tests.campaigns.attacks_on_grammars import CHAT, COMPLETIONS, MESSAGES, USER, called, sent, structured, tool
from tests.campaigns.attacks_on_the_wire import RESPONSES, header, send
from tests.campaigns.watched_server import Answer, as_json, head, post

Attack = Callable[[int], Coroutine[Any, Any, list[Answer]]]
JSON = "Content-Type: application/json"
EMBEDDINGS, TOKENIZE = "/v1/embeddings", "/tokenize"
SMALL = as_json({"prompt": [5], "max_tokens": 1})


def raw(*contents: bytes, seconds: float = 3.0) -> Attack:
    """Send bytes as they are, all at once on connections of their own."""

    async def run(port: int) -> list[Answer]:
        return list(await asyncio.gather(*(send(port, content, seconds) for content in contents)))

    return run


def each(*requests: tuple[str, Any], at_once: int = 16) -> Attack:
    """Send bodies to paths, `at_once` at a time."""

    async def run(port: int) -> list[Answer]:
        free = asyncio.Semaphore(at_once)

        async def one(path: str, body: Any) -> Answer:
            async with free:
                return await post(port, path, as_json(body))

        return list(await asyncio.gather(*(one(path, body) for path, body in requests)))

    return run


def posted(body: bytes, *lines: str, path: str = COMPLETIONS) -> bytes:
    return header("POST", path, JSON, f"Content-Length: {len(body)}", *lines) + body


def odd_requests() -> Iterator[bytes]:
    """Yield requests whose framing, fields or targets are odd."""
    chunked = header("POST", COMPLETIONS, JSON, "Transfer-Encoding: chunked")
    for length in ("-1", "+5", "1e3", "9" * 30, "5, 5", "0x10", "५", ""):
        yield header("POST", COMPLETIONS, JSON).replace(b"\r\n\r\n", f"\r\nContent-Length: {length}\r\n\r\n".encode())
    yield header("POST", COMPLETIONS, JSON, "Content-Length: 5", "Transfer-Encoding: chunked") + b"0\r\n\r\n"
    for coding in ("chunked, chunked", "xchunked", "identity", "gzip, chunked", "\tchunked"):
        yield header("POST", COMPLETIONS, JSON, f"Transfer-Encoding: {coding}") + b"0\r\n\r\n"
    yield chunked + b"5;" + b"x" * 300_000 + b"\r\n{}   \r\n0\r\n\r\n"
    yield chunked + b"2\r\n{}\r\n0\r\n" + b"Trailer: x\r\n" * 50_000 + b"\r\n"
    yield chunked + b"-5\r\n"
    yield chunked + b"0x5\r\n{}   \r\n0\r\n\r\n"
    for method in ("HEAD", "OPTIONS", "TRACE", "CONNECT", "PUT", "DELETE", "PATCH", "PROPFIND", "get", "A" * 5000):
        for path in ("/", COMPLETIONS, RESPONSES, "/metrics", "/debug/kv", "*"):
            yield header(method, path)
    for path in ("/" + "a" * 60_000, "/%00", "/%ff%fe", "//v1//models", "/v1/models/" + "%2e%2e/" * 999, "/\xff\x00"):
        yield header("GET", path)
    yield header("GET", "/v1/models?" + "a=b&" * 15_000)
    yield header("GET", "http://[::1/v1/models")
    upgrades = ("Connection: Upgrade", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")
    for path in ("/", CHAT, "/live/events"):
        yield header("GET", path, "Upgrade: websocket", *upgrades)
    yield header("GET", "/", "Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAMAAABkAAQAAP__")
    for line in (
        "Expect: 100-continue",
        "Expect: the-impossible",
        "Accept-Encoding: " + "gzip;q=0.1," * 5000,
        "Range: bytes=" + "0-0," * 10_000,
        "Cookie: " + "a=b;" * 15_000,
        "X-Forwarded-For: " + "1.1.1.1," * 8000,
        "traceparent: 00-" + "0" * 32 + "-" + "0" * 16 + "-01",
        "traceparent: " + "x" * 60_000,
        "X-Request-Id: " + "i" * 60_000,
        "X-Request-Id: \x1b[2J\x85é",
        "Authorization: Bearer " + "k" * 60_000,
        "Authorization: Basic \xff\xfe",
        "x-api-key: \xff",
        "Content-Type: application/json; charset=utf-16",
        "Content-Type: multipart/form-data; boundary=" + "b" * 5000,
        "Origin: null",
        "Origin: http://" + "a" * 50_000,
        "anthropic-version: \xff",
    ):
        for path in (COMPLETIONS, MESSAGES, RESPONSES):
            yield posted(SMALL, path=path).replace(b"\r\n\r\n", b"\r\n" + line.encode("latin-1") + b"\r\n\r\n", 1)
    yield header("GET", "/", *(f"X-{i}: 1" for i in range(10_000)))
    yield header("GET", "/", "X: " + "1" * 5_000_000)
    yield b"\r\n" * 100_000 + header("GET", "/health")
    yield header("GET", "/health").replace(b"\r\n", b"\n")
    yield header("GET", "/health", "X: a\r\n b")
    yield header("GET", "/health").replace(b"HTTP/1.1", b"HTTP/9.9")


def zipped_bodies() -> Iterator[bytes]:
    """Yield bodies in codings, of which some grow a thousandfold."""
    bomb = gzip.compress(b'{"prompt": "' + b"a" * 200_000_000 + b'"}')
    for coding in ("gzip", "deflate", "br", "zstd", "gzip, gzip", "x" * 1000):
        yield posted(bomb, f"Content-Encoding: {coding}")


NUMBERS = (
    "1e400",
    "-1e400",
    "1" + "0" * 4000,
    "1" + "0" * 5000,
    "-" + "9" * 30,
    "NaN",
    "Infinity",
    "1e-400",
    "1.5",
    "-0",
)
# fmt: off
FIELDS = {
    COMPLETIONS: [
        "n", "best_of", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "logprobs",
        "prompt_logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty", "priority",
        "truncate_prompt_tokens", "logit_bias", "echo", "stop", "stop_token_ids", "allowed_token_ids", "bad_words",
        "cache_salt", "user", "structured_outputs", "response_format", "stream_options",
    ],
    CHAT: [
        "n", "max_tokens", "max_completion_tokens", "top_logprobs", "seed", "reasoning_effort", "tools", "tool_choice",
        "messages",
    ],
    RESPONSES: [
        "max_output_tokens", "top_logprobs", "temperature", "reasoning", "text", "tools", "include", "metadata",
        "input",
    ],
    MESSAGES: [
        "max_tokens", "top_k", "top_p", "temperature", "system", "thinking", "stop_sequences", "metadata", "messages",
    ],
    EMBEDDINGS: ["input", "dimensions", "encoding_format"],
    TOKENIZE: ["prompt", "messages", "add_special_tokens", "tools"],
    "/detokenize": ["tokens"],
    "/api/chat": ["messages", "options", "format", "keep_alive", "think", "tools", "logprobs", "top_logprobs"],
    "/api/generate": ["prompt", "suffix", "system", "context", "images", "options", "format", "keep_alive", "raw"],
    "/api/embed": ["input", "truncate", "dimensions", "options"],
    "/completion": ["prompt", "n_predict", "n_probs", "logit_bias", "seed", "stop", "grammar", "json_schema", "top_k"],
}
# fmt: on
LEAST: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": [5], "max_tokens": 1},
    CHAT: {"messages": USER, "max_tokens": 1},
    RESPONSES: {"input": "x", "max_output_tokens": 1},
    MESSAGES: {"messages": USER, "max_tokens": 1},
    EMBEDDINGS: {"input": "x"},
    TOKENIZE: {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
    "/api/chat": {"messages": USER, "options": {"num_predict": 1}},
    "/api/generate": {"prompt": "x", "options": {"num_predict": 1}},
    "/api/embed": {"input": "x"},
    "/completion": {"prompt": "x", "n_predict": 1},
}


def odd_values(*values: str) -> Attack:
    """Send each value, as JSON text, in each field of each endpoint."""
    requests = []
    for path, fields in FIELDS.items():
        for field in fields:
            rest = json.dumps({name: value for name, value in LEAST[path].items() if name != field})
            joined = rest[1:-1]
            requests += [
                (path, f'{{{joined}{", " if joined else ""}"{field}": {value}}}'.encode("utf-8", "surrogatepass"))
                for value in values
            ]
    return each(*requests)


SURROGATE = r'"\ud800"'
TEXTS = (
    SURROGATE,
    r'"\udc00\ud800"',
    r'"\u0000"',
    f"[{SURROGATE}]",
    f'{{"a": {SURROGATE}}}',
    f"{{{SURROGATE}: 1}}",
    f'[{{"role": "user", "content": {SURROGATE}}}]',
    f'[{{"role": "user", "content": [{{"type": "text", "text": {SURROGATE}}}]}}]',
    f'[{{"type": "function", "function": {{"name": {SURROGATE}, "description": {SURROGATE}}}}}]',
)
NESTED = tuple("[" * depth + "]" * depth for depth in (150, 199, 250, 5000)) + tuple(
    '{"a":' * depth + "1" + "}" * depth for depth in (150, 199, 250, 5000)
)


def odd_bodies() -> Iterator[tuple[str, bytes]]:
    """Yield bodies that are not UTF-8, or not quite JSON."""
    text = '{"prompt": [5], "max_tokens": 1}'
    for path in FIELDS:
        yield path, b"\xff\xfe" + text.encode("utf-16-le")
        yield path, b"\xef\xbb\xbf" + text.encode()
        yield path, b'{"prompt": "\xff\xfe\xed\xa0\x80"}'
        yield path, b'{"input": "\xc0\x80", "messages": "\xf8\x88\x80\x80\x80"}'
        for content in (
            b"",
            b"null",
            b"[]",
            b'"x"',
            b"1",
            b"{",
            b"{}x",
            b"{} {}",
            b'{"a":1,}',
            b"\x00" * 5000,
            b"{'a':1}",
        ):
            yield path, content
        yield path, b"{" + b'"prompt": [5],' * 100_000 + b'"max_tokens": 1}'


def schema_bombs() -> list[dict[str, Any]]:
    """Structured outputs that refer to themselves, explode, or ask for the impossible."""
    cycle = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    doubled = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)} | {"d60": {"type": "string"}}
    wanted: list[dict[str, Any]] = [
        *(
            {"json": schema}
            for schema in (
                {"$ref": "#"},
                cycle,
                {"allOf": [{"$ref": "#"}]},
                {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
                {"not": {"$ref": "#"}},
                {"$ref": "http://127.0.0.1:1/x"},
                {"$ref": "file:///etc/passwd"},
                {"$ref": "#/%%%"},
                {"$defs": doubled, "$ref": "#/$defs/d0"},
                {"type": "array", "minItems": 10**9},
                {"type": "array", "maxItems": 10**18, "items": {"type": "integer"}},
                {"type": "string", "minLength": 10**9},
                {"type": "string", "maxLength": 10**6, "pattern": "(a|b)*c"},
                {"type": "number", "multipleOf": 1e-300},
                {"type": "integer", "minimum": 10**30, "maximum": 10**30 + 1},
                {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
                {"type": "number", "multipleOf": 0},
                {"enum": list(range(5000))},
                {"const": "x" * 50_000},
                {"oneOf": [{"type": "integer"}] * 500},
                {"type": "object", "patternProperties": {f"^{c}.*x$": {} for c in "abcdefghijklmnop"}},
                {"type": "object", "minProperties": 10**6},
                {"type": "object", "required": [f"r{i}" for i in range(3000)]},
                {"if": {"$ref": "#"}, "then": {"$ref": "#"}},
                {"type": "array", "uniqueItems": True, "items": {"$ref": "#"}},
            )
        ),
        *(
            {"regex": regex}
            for regex in (
                "(a*)*b",
                "(x+x+)+y",
                ".{0,100000}",
                r"\p{L}{3000}",
                "(((((a{99}){99}){99}){99}){99})",
                "(?=a)b",
                r"(a)\1",
                "[",
                "(?P<n>",
                "a{99999999999999999999}",
                r"\u{d800}",
                "(|||||)*",
                "(.*a){12}",
                "(a|aa|aaa|aaaa)*$",
                "(?i)" + "k" * 9000,
                "&".join(["(.*a.*)"] * 20),
                "~(" * 40 + "a" + ")" * 40,
            )
        ),
        *(
            {"grammar": grammar}
            for grammar in (
                "start: start",
                "start: a\na: b\nb: a",
                'start: start start | "x"',
                'start: ""',
                "start: (start)*",
                'start: x\nx: x "a" | "a"',
                'start: "a"{1,999999}',
                "%import common.NUMBER\nstart: NUMBER",
                "start: /(/",
                "root ::= root",
                'root ::= "a" root "b" | root',
                'start: %json {"$ref": "#"}',
                '%llguidance {"x": 1}\nstart: /a/',
                "start: <|im_end|>",
                "start: <[0-49151]>",
                "start[max_tokens=1000000000]: /.*/",
                "start: @other",
                "\n".join(f"r{i}: r{i + 1} | r{i + 1}" for i in range(3000)) + "\nr3000: /a/\nstart: r0",
            )
        ),
        {"choice": [""]},
        {"choice": ["a" * i for i in range(1, 300)]},
        {"choice": ["\ud800"]},
    ]
    return [structured(**each) for each in wanted]


def slow_masks() -> list[dict[str, Any]]:
    """Sequences of different patterns whose automata grow with every letter."""
    return [
        {
            **structured(regex=f"([ab]|[a-z ])*a[a-z ]{{{60 + i}}}z(.*x.{{{30 + i}}})"),
            "max_tokens": 300,
            "temperature": 1,
        }
        for i in range(64)
    ]


async def pipelined(port: int) -> list[Answer]:
    """Twenty connections, on each of which 500 completions are sent ahead."""
    return await raw(*[posted(SMALL) * 500] * 20)(port)


async def idle_connections(port: int) -> list[Answer]:
    """Nine hundred idle connections that are opened in one go, then closed."""
    held = [socket.create_connection(("127.0.0.1", port)) for _ in range(900)]
    await asyncio.sleep(1)
    found = [await post(port, COMPLETIONS, SMALL)]
    for connection in held:
        connection.close()
    return found


async def cancels(port: int) -> list[Answer]:
    """A thousand streams, of which each is left as soon as its header arrives or before."""
    body = as_json({"prompt": [5] * 50, "max_tokens": 500, "stream": True, "ignore_eos": True})
    free = asyncio.Semaphore(50)

    async def leave(number: int) -> Answer:
        async with free:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head(COMPLETIONS, len(body)) + body)
            status = 0
            if number % 2:
                try:
                    status = int((await asyncio.wait_for(reader.read(64), 3))[9:12] or 0)
                except (TimeoutError, ConnectionError):
                    status = -1
            writer.transport.abort()
            return Answer(status)

    return list(await asyncio.gather(*(leave(i) for i in range(1000))))


async def half_closed(port: int) -> list[Answer]:
    """A hundred clients that close their side right after the request, and read on."""
    body = as_json({"prompt": [5], "max_tokens": 20})

    async def one() -> Answer:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head(COMPLETIONS, len(body)) + body)
        writer.write_eof()
        try:
            received = await asyncio.wait_for(reader.read(64), 3)
        except (TimeoutError, ConnectionError):
            return Answer(-1)
        finally:
            writer.transport.abort()
        return Answer(int(received[9:12] or 0))

    return list(await asyncio.gather(*(one() for _ in range(100))))


async def chain_of_responses(port: int) -> list[Answer]:
    """Two hundred responses, each of which continues the one before and adds 50 kB; as many as come in 30 s."""
    before, ends = None, time.monotonic() + 30
    found: list[Answer] = []
    while len(found) < 200 and time.monotonic() < ends:
        body = {"input": "x " * 25_000, "max_output_tokens": 1, "previous_response_id": before, "truncation": "auto"}
        body = {**body, "input": [{"role": "user", "content": "x", "unknown": "j" * 50_000}]}
        found.append(answer := await post(port, RESPONSES, as_json(body), 3, keeps=200_000))
        if answer.status != 200:
            break
        before = json.loads(answer.body)["id"]
    return found


async def strange_ids(port: int) -> list[Answer]:
    """Ids of stored responses that do not exist or are none, and odd pages of their items."""
    stored = await post(port, RESPONSES, as_json({"input": "x", "max_output_tokens": 1}), 5, keeps=65536)
    known = json.loads(stored.body)["id"] if stored.status == 200 else "resp_0"
    ids = [known, "resp_" + "0" * 32, "x" * 5000, "..%2f..%2fetc", "%00", "resp_%ff", "*", "-1"]
    queries = [
        "",
        "?limit=1e9",
        "?limit=-1",
        "?limit=" + "9" * 5000,
        "?after=" + "x" * 5000,
        "?order=x",
        "?include[]=%ff",
    ]
    gets = [
        header("GET", f"{RESPONSES}/{one}{part}{query}")
        for one in ids
        for part in ("", "/input_items")
        for query in queries
    ]
    found = await raw(*gets)(port)
    bodies = [{"input": "x", "previous_response_id": one} for one in (*ids, "", 5, None, ["a"], {"id": 1})]
    found += await sent(RESPONSES, *bodies)(port)
    return found + await raw(*[header("DELETE", f"{RESPONSES}/{one}") for one in ids])(port)


async def stored_responses(port: int) -> list[Answer]:
    """Three hundred stored responses of 1 MB."""
    item = {"type": "message", "role": "user", "content": "x", "unknown": "j" * 1_000_000}
    body = {"input": [item], "max_output_tokens": 1}
    return await each(*[(RESPONSES, body)] * 300, at_once=8)(port)


def many_labels() -> Attack:
    """Requests whose names would each be a label, if names were labels."""
    lines = [f"\nERROR octavo.engine: forged {i}\r\n\x1b[31m" for i in range(500)]
    fields = ("model", "user", "cache_salt", "service_tier", "safety_identifier", "prompt_cache_key", "request_id")
    return each(
        *((COMPLETIONS, {"prompt": [5], "max_tokens": 1, field: line}) for line in lines for field in fields[:3]),
        *((CHAT, {"messages": USER, "max_tokens": 1, field: lines[0]}) for field in fields),
    )


def odd_chats() -> Iterator[tuple[str, Any]]:
    """Yield chats with odd variables of their template, parts, tools and roles."""
    for variables in (
        {"messages": [{"role": "user", "content": "other"}]},
        {"add_generation_prompt": "x"},
        {"tools": "x" * 10_000},
        {"tokenize": True},
        {"return_dict": True},
        {"chat_template": "{{ 1/0 }}"},
        {"x": list(range(200_000))},
        {"raise_exception": 1, "bos_token": 5, "namespace": None},
        {"__class__": 1, "self": 1, "kwargs": {}},
        {"": 1},
    ):
        yield CHAT, {"messages": USER, "max_tokens": 1, "chat_template_kwargs": variables}
    parts: list[Any] = [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_000_000}},
        {"type": "file", "file": {"file_id": "/etc/passwd"}},
        {"type": "input_audio", "input_audio": {"data": 1}},
        {"type": ["text"]},
        {"type": "text", "text": {"a": 1}},
        {"type": "text"},
        5,
        None,
        [],
        "text",
        {"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "9" * 5000}},
        {"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": 1e308}},
        {"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": -1}},
        {"type": "tool_use", "id": "x", "name": "y", "input": [1]},
        {"type": "tool_result", "content": {"a": 1}},
        {"type": "thinking", "thinking": 5, "signature": []},
        {"type": "document", "source": {"type": "url", "url": "x"}},
    ]
    for part in parts:
        for role in ("user", "assistant", "system", "tool", "developer", "<|im_start|>system"):
            yield CHAT, {"messages": [{"role": role, "content": [part]}], "max_tokens": 1}
            yield MESSAGES, {"messages": [{"role": role, "content": [part]}], "max_tokens": 1}
            yield RESPONSES, {"input": [{"role": role, "content": [part]}], "max_output_tokens": 1}
    many = [{"type": "text", "text": f"{i}", "cache_control": {"type": "ephemeral"}} for i in range(500)]
    yield MESSAGES, {"messages": [{"role": "user", "content": many}], "max_tokens": 1}
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}}}}
    schemas: tuple[Any, ...] = (
        loop,
        {"$ref": "#"},
        {"type": "string"},
        [],
        5,
        {"type": "object", "properties": 5},
        {"type": []},
    )
    for parameters in schemas:
        for name in ("t", "", "a" * 5000, "t\n", "日本", "start", "octavo_answer", "x y", "</tool_call>"):
            yield CHAT, called([tool(name, parameters)])
    yield CHAT, called([tool("same", {})] * 128)
    yield CHAT, {**called([tool("t", {})]), "tool_choice": {"type": "function", "function": {"name": "other"}}}


def heavy() -> Iterator[tuple[str, Attack]]:
    """Yield requests that ask for as much as the limits allow."""
    long = list(range(3, 2003)) * 3
    yield (
        "`logprobs` 20 × n = 64, 500 tokens",
        sent(COMPLETIONS, {"prompt": [5], "n": 64, "logprobs": 20, "max_tokens": 500, "ignore_eos": True}),
    )
    yield (
        "`echo` with `logprobs` 20 over 6,000 tokens, × 4",
        sent(COMPLETIONS, *[{"prompt": [i, *long], "echo": True, "logprobs": 20, "max_tokens": 1} for i in range(4)]),
    )
    yield (
        "64 × 128 `bad_words`, × 4",
        sent(
            COMPLETIONS,
            *[{"prompt": [5], "n": 64, "bad_words": [f"word {j} of {i}" for j in range(128)]} for i in range(4)],
        ),
    )
    yield (
        "the most stop strings, n = 64, streamed",
        sent(
            COMPLETIONS,
            {
                "prompt": [5],
                "n": 64,
                "stop": [f"{i:0>60}" for i in range(64)],
                "stream": True,
                "max_tokens": 300,
                "ignore_eos": True,
            },
        ),
    )
    yield (
        "all penalties, n = 64, after 6,000 tokens",
        sent(
            COMPLETIONS,
            {
                "prompt": long,
                "n": 64,
                "repetition_penalty": 1.3,
                "presence_penalty": 2,
                "frequency_penalty": -2,
                "top_k": 49151,
                "top_p": 1e-30,
                "min_p": 1e-30,
                "max_tokens": 100,
                "ignore_eos": True,
            },
        ),
    )
    yield (
        "4 × 32 beams of 300 tokens",
        sent(
            COMPLETIONS,
            *[
                {
                    "prompt": [i],
                    "use_beam_search": True,
                    "temperature": 0,
                    "best_of": 32,
                    "max_tokens": 300,
                    "ignore_eos": True,
                }
                for i in range(4)
            ],
        ),
    )
    yield (
        "/v1/embeddings, 64 inputs of 7,000 ids",
        sent(EMBEDDINGS, {"input": [[i, *long, *long[:999]] for i in range(64)]}),
    )
    yield (
        "1,000 salts over one prompt of 1,000 tokens",
        each(
            *((COMPLETIONS, {"prompt": long[:1000], "max_tokens": 1, "cache_salt": f"{i}"}) for i in range(1000)),
            at_once=32,
        ),
    )
    yield "64 patterns whose automata grow", sent(COMPLETIONS, *slow_masks())
    endless = [
        structured(json={"type": "string", "allOf": [{"pattern": f"{j}{c}.{{{i}}}b"} for i in range(1, 40)]})
        for j in range(8)
        for c in "acd"
    ]
    yield "24 grammars that would take minutes", sent(COMPLETIONS, *endless)


async def long_streams(port: int) -> list[Answer]:
    """Sixty-four streams behind one prompt of 6,000 tokens, which are read for 20 s: computing the prompt takes 3."""
    prompt = list(range(3, 2003)) * 3
    body = {"prompt": prompt, "n": 64, "max_tokens": 500, "ignore_eos": True, "stream": True}
    return [await post(port, COMPLETIONS, as_json(body), 20)]


def stranger_attacks() -> Iterator[tuple[str, Attack]]:
    """Yield (name, attack)."""
    yield "120 odd requests", raw(*odd_requests())
    yield "6 bodies of 200 MB in 200 kB", raw(*zipped_bodies())
    yield "20 × 500 completions sent ahead", pipelined
    yield "900 idle connections at once", idle_connections
    yield "1,000 cancels", cancels
    yield "100 half-closed connections", half_closed
    yield "odd numbers in every field", odd_values(*NUMBERS)
    yield "surrogates in every field", odd_values(*TEXTS)
    yield "deep nesting in every field", odd_values(*NESTED)
    yield "not UTF-8, not JSON", each(*odd_bodies())
    yield "60 grammars that recurse or explode", each(*((COMPLETIONS, body) for body in schema_bombs()))
    yield (
        "the same as tools",
        each(
            *(
                (CHAT, called([tool("t", body["structured_outputs"]["json"])]))
                for body in schema_bombs()
                if "json" in body["structured_outputs"]
            )
        ),
    )
    yield "a chain of 200 responses", chain_of_responses
    yield "ids of responses that are none", strange_ids
    yield "300 stored responses of 1 MB", stored_responses
    yield "1,500 names with line breaks", many_labels()
    yield "400 odd chats", each(*odd_chats())
    yield from heavy()
    yield "n = 64 over 6,000 tokens, for 20 s", long_streams
