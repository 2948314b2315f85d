"""Send random bodies to every endpoint of a real server: valid ones, invalid ones, and some at the limits.

    python benchmarks/fuzz_bodies.py --seed 1 --count 10000 [--rows FILE]
    python benchmarks/fuzz_bodies.py --join FILE            writes benchmarks/results/fuzz_bodies.md

The server runs a tiny random model, so that most of the time is spent on requests and not in the model. A body depends
only on the seed and its index; `--show I` prints it. Faults are any 5xx, an error status without an error object, a
stall of another tenant's stream, and growing memory. Exits with 1 if an answer was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attacks import write_model
from octavo.limits import DEFAULT_LIMITS as LIMITS
from watched_server import Watched, head, machine, watched_server

RESULTS = Path(__file__).parent / "results" / "fuzz_bodies.md"
VOCAB_SIZE, MAX_MODEL_LEN = 256, 512
CONNECTIONS = 12
# After this many bodies the server has all that it keeps: caches, threads, worker processes.
WARM_UP = 2000
SERVER = [
    *("--dtype", "float32", "--num-blocks", "2048", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "64"),
    *("--itl-slo-ms", "50"),
]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}:{% endif %}"
)

ODD_TEXTS = [
    "",
    " ",
    "\x00",
    "\ud800",
    "é",
    "北京",
    "😀",
    "\u202e\u2028",
    "a" * 300,
    "{",
    "</s>",
    "%s%n",
    "../../etc/passwd",
    "\r\n",
]
ODD_NUMBERS = [0, -1, 1, 2, 2**31, 2**63, -(2**63) - 1, 10**30, 0.5, -0.5, 1e-300, 1e308, float("nan"), float("inf")]


class Bodies:
    """The bodies of one seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def make(self, index: int) -> tuple[str, str, bytes, bool]:
        """(method, path, body, whether its client leaves before the answer)."""
        rng = random.Random(f"{self._seed}-{index}")
        leaves = rng.random() < 0.02
        if rng.random() < 0.02:
            return rng.choice(["GET", "DELETE", "PUT", "POST", "HEAD"]), _odd_path(rng), b"", False
        path, make = rng.choices(list(ENDPOINTS.items()), [6, 4, 2, 1])[0]
        # Most fields are valid; otherwise nearly all bodies would be rejected for the first that is not.
        faults = rng.choice([0.0, 0.0, 0.02, 0.2])
        body = json.dumps(make(_Values(rng, faults))).encode()
        if rng.random() < 0.04:
            body = _damaged(rng, body)
        return "POST", path, body, leaves


@dataclass
class _Values:
    """Values for fields; `faults` is the share that are of the wrong kind or out of range."""

    rng: random.Random
    faults: float

    def fields(self, makers: dict[str, Callable[[_Values], Any]], share: float) -> dict[str, Any]:
        """Some of the fields, in any order."""
        names = [name for name in makers if self.rng.random() < share]
        self.rng.shuffle(names)
        return {name: self.odd() if self.rng.random() < self.faults else makers[name](self) for name in names}

    def odd(self, depth: int = 0) -> Any:
        """Anything that JSON can represent."""
        rng = self.rng
        kind = rng.randrange(8 if depth < 4 else 5)
        if kind == 0:
            return None
        if kind == 1:
            return rng.random() < 0.5
        if kind == 2:
            return rng.choice(ODD_NUMBERS)
        if kind == 3:
            return rng.choice(ODD_TEXTS)
        if kind == 4:
            return rng.randrange(-3, 100)
        if kind == 5:
            return [self.odd(depth + 1) for _ in range(rng.choice([0, 1, 3, 20]))]
        if kind == 6:
            return {rng.choice(ODD_TEXTS): self.odd(depth + 1) for _ in range(rng.choice([0, 1, 3]))}
        value: Any = []
        for _ in range(rng.choice([5, 100, 300])):
            value = [value]
        return value

    def text(self, most: int = 40) -> str:
        rng = self.rng
        if rng.random() < 0.05:
            return rng.choice(ODD_TEXTS)
        return "".join(rng.choices("abc the.\n{}é😀", k=rng.randrange(1, most)))

    def token_id(self) -> int:
        return (
            self.rng.choice([self.rng.randrange(VOCAB_SIZE), 0, VOCAB_SIZE - 1, VOCAB_SIZE])
            if self.rng.random() < 0.1
            else 7
        )

    def ids(self, most: int) -> list[int]:
        return [self.rng.randrange(VOCAB_SIZE) for _ in range(self.rng.randrange(1, most))]

    def at(self, limit: int) -> int:
        """A number around a limit, mostly far below it."""
        return self.rng.choice([limit, limit + 1, limit - 1]) if self.rng.random() < 0.1 else self.rng.randrange(1, 4)

    def number(self, low: float, high: float) -> float:
        return self.rng.choice([low, high, 1.0, self.rng.uniform(low, high)])

    def maybe(self) -> bool:
        return self.rng.random() < 0.5

    def prompt(self) -> Any:
        kind = self.rng.randrange(6)
        if kind == 0:
            return self.text(400)
        if kind == 1:
            return self.ids(40)
        if kind == 2:
            return [self.text() for _ in range(self.at(LIMITS.max_body_prompts) if self.rng.random() < 0.02 else 2)]
        if kind == 3:
            return [self.ids(10) for _ in range(self.rng.randrange(1, 5))]
        if kind == 4:
            return self.ids(self.rng.choice([MAX_MODEL_LEN, MAX_MODEL_LEN + 40]))
        return self.text()

    def stop(self) -> Any:
        if self.maybe():
            return self.text(6)
        return [self.text(LIMITS.max_stop_string_length + 3) for _ in range(self.at(LIMITS.max_stop_strings))]

    def messages(self) -> list[Any]:
        return [self.message() for _ in range(self.at(LIMITS.max_messages) if self.rng.random() < 0.01 else 3)]

    def message(self) -> Any:
        if self.rng.random() < self.faults:
            return self.odd()
        content: Any = self.text()
        if self.rng.random() < 0.2:
            content = [{"type": "text", "text": self.text()} for _ in range(self.at(5))]
        message = {"role": self.rng.choice(["user", "assistant", "system", "tool"]), "content": content}
        if self.rng.random() < 0.05:
            message["cache_control"] = {"type": "ephemeral", "ttl": self.rng.choice(["5m", "1h", "x"])}
        return message


_SHARED: dict[str, Callable[[_Values], Any]] = {
    "model": lambda v: v.rng.choice(["x", None, "m" * v.at(LIMITS.max_name_length)]) if v.rng.random() < 0.1 else None,
    "n": lambda v: v.at(LIMITS.max_n),
    "best_of": lambda v: v.at(LIMITS.max_n),
    "use_beam_search": lambda v: v.rng.random() < 0.2,
    "length_penalty": lambda v: v.number(-2, 2),
    "early_stopping": lambda v: v.rng.choice([True, False, "never"]),
    "temperature": lambda v: v.number(0, 2),
    "top_p": lambda v: v.number(0.01, 1),
    "top_k": lambda v: v.rng.choice([-1, 0, 1, 5, VOCAB_SIZE, VOCAB_SIZE + 1]),
    "min_p": lambda v: v.number(0, 1),
    "presence_penalty": lambda v: v.number(-2, 2),
    "frequency_penalty": lambda v: v.number(-2, 2),
    "repetition_penalty": lambda v: v.number(0.1, 2),
    "logit_bias": lambda v: {str(v.token_id() + i): v.number(-100, 100) for i in range(v.at(LIMITS.max_logit_bias))},
    "seed": lambda v: v.rng.choice([0, 1, -1, 2**63, 2**64]),
    "stop": _Values.stop,
    "stop_token_ids": lambda v: [(v.token_id() + i) % 300 for i in range(v.at(LIMITS.max_stop_token_ids))],
    "stream": _Values.maybe,
    "stream_options": lambda v: {"include_usage": v.maybe(), "continuous_usage_stats": v.maybe()},
    "ignore_eos": _Values.maybe,
    "min_tokens": lambda v: v.at(20),
    "skip_special_tokens": _Values.maybe,
    "prompt_logprobs": lambda v: v.at(20),
    "return_token_ids": _Values.maybe,
    "echo": _Values.maybe,
    "add_special_tokens": _Values.maybe,
    "priority": lambda v: v.rng.choice([0, 1, -1, LIMITS.max_priority, LIMITS.max_priority + 1]),
    "cache_salt": lambda v: "s" * v.at(LIMITS.max_cache_salt_length),
    "octavo": lambda v: {"ledger": v.maybe()},
    "user": lambda v: "u" * v.at(LIMITS.max_name_length),
    "metadata": lambda v: {"m": v.odd()},
    "store": _Values.maybe,
    "guided_json": lambda v: v.rng.choice([None, "x"]),
    "bad_words": lambda v: v.rng.choice([None, [], ["x"]]),
    "unknown": lambda v: 1,
}
# Most bodies leave these out; otherwise few would be served.
_RARE = {
    "unknown",
    "guided_json",
    "bad_words",
    "model",
    "stream_options",
    "use_beam_search",
    "prompt_logprobs",
    "priority",
}


def _common(v: _Values) -> dict[str, Any]:
    share = v.rng.choice([0.02, 0.1, 0.4])
    plenty = {name: make for name, make in _SHARED.items() if name not in _RARE}
    return {**v.fields(plenty, share), **v.fields({name: _SHARED[name] for name in _RARE}, share / 6)}


def _completion(v: _Values) -> dict[str, Any]:
    own = {"logprobs": lambda v: v.at(20), "return_tokens_as_token_ids": _Values.maybe, "suffix": lambda v: None}
    given = {"prompt": v.odd() if v.rng.random() < v.faults else v.prompt(), **_common(v), **v.fields(own, 0.1)}
    if v.rng.random() < 0.95:
        given["max_tokens"] = v.odd() if v.rng.random() < v.faults else v.rng.choice([0, 1, 1, 2, 5, 16, MAX_MODEL_LEN])
    return given


def _chat(v: _Values) -> dict[str, Any]:
    own: dict[str, Callable[[_Values], Any]] = {
        "logprobs": _Values.maybe,
        "top_logprobs": lambda v: v.at(20),
        "add_generation_prompt": _Values.maybe,
        "chat_template_kwargs": lambda v: {v.rng.choice(["a", "messages", "loop"]): v.odd()},
        "reasoning_effort": lambda v: "low",
        "modalities": lambda v: v.rng.choice([["text"], ["audio"]]),
        "response_format": lambda v: {"type": v.rng.choice(["text", "json_object"])},
        "tools": lambda v: [{"type": "function"}],
        "tool_choice": lambda v: v.rng.choice(["none", "auto", {}]),
        "max_completion_tokens": lambda v: v.rng.choice([1, 4]),
    }
    given = {"messages": v.odd() if v.rng.random() < v.faults else v.messages(), **_common(v), **v.fields(own, 0.05)}
    given["max_tokens"] = v.odd() if v.rng.random() < v.faults else v.rng.choice([1, 2, 5, 16])
    return given


def _tokenize(v: _Values) -> dict[str, Any]:
    own: dict[str, Callable[[_Values], Any]] = {
        "add_special_tokens": _Values.maybe,
        "return_token_strs": _Values.maybe,
        "add_generation_prompt": _Values.maybe,
    }
    what = {"prompt": v.text(3000)} if v.maybe() else {"messages": v.messages()}
    return {**what, **v.fields(own, 0.4)}


def _detokenize(v: _Values) -> dict[str, Any]:
    return {"tokens": v.odd() if v.rng.random() < v.faults else v.ids(400)}


ENDPOINTS = {
    "/v1/completions": _completion,
    "/v1/chat/completions": _chat,
    "/tokenize": _tokenize,
    "/detokenize": _detokenize,
}


def _odd_path(rng: random.Random) -> str:
    known = [
        "/v1/models",
        "/health",
        "/ready",
        "/version",
        "/metrics",
        "/debug/kv",
        "/debug/pins",
        "/openapi.json",
        "/docs",
    ]
    junk = "".join(rng.choices("abc/%20.?=&~", k=rng.randrange(1, 60)))
    return rng.choice(
        [*known, "/reset_prefix_cache", *ENDPOINTS, f"/v1/models/{junk}", f"/debug/pins/{junk}", f"/{junk}"]
    )


def _damaged(rng: random.Random, body: bytes) -> bytes:
    """The body with a part cut off, overwritten or repeated."""
    start = rng.randrange(len(body) + 1)
    end = min(len(body), start + rng.randrange(30))
    middle = rng.choice(
        [b"", bytes(rng.choices(range(256), k=5)), body[start:end] * 2, b"NaN", b"[" * 300, b'"\\ud800"']
    )
    return body[:start] + middle + body[end:]


@dataclass
class Found:
    """What the bodies of a seed caused."""

    statuses: Counter[int] = field(default_factory=Counter)
    left: int = 0
    wrong: list[str] = field(default_factory=list)
    memory: dict[int, float] = field(default_factory=dict)


async def fuzz(server: Watched, bodies: Bodies, count: int) -> Found:
    found = Found()
    numbers = iter(range(count))

    async def run() -> None:
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        for index in numbers:
            if index in (WARM_UP, count // 2):
                found.memory[index] = server.rss()
            method, path, body, leaves = bodies.make(index)
            connection = connection or await asyncio.open_connection("127.0.0.1", server.port, limit=2**26)
            reader, writer = connection
            request = head(path, len(body), keep=True).replace(b"POST ", method.encode() + b" ", 1) + body
            try:
                writer.write(request)
                if leaves:
                    await asyncio.sleep(0.002)
                    found.left += 1
                    writer.transport.abort()
                    connection = None
                    continue
                status, answer, goes_on = await asyncio.wait_for(_answer(reader, method), 60)
            except (ConnectionError, asyncio.IncompleteReadError, TimeoutError) as error:
                found.wrong.append(f"body {index}: {method} {path}: {type(error).__name__}")
                connection = None
                continue
            found.statuses[status] += 1
            if fault := _fault(status, answer, method):
                found.wrong.append(f"body {index}: {method} {path}: {fault}: {answer[:200]!r}")
            if not goes_on:
                writer.close()
                connection = None

    await asyncio.gather(*(run() for _ in range(CONNECTIONS)))
    return found


async def _answer(reader: asyncio.StreamReader, method: str) -> tuple[int, bytes, bool]:
    """(status, body, whether the connection stays open)."""
    lines = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = int(lines[9:12])
    goes_on = b"\r\nconnection: close" not in lines
    if method == "HEAD":
        return status, b"", goes_on
    if b"transfer-encoding: chunked" in lines:
        parts = []
        while size := int(await reader.readline(), 16):
            parts.append(await reader.readexactly(size))
            await reader.readexactly(2)
        await reader.readexactly(2)
        return status, b"".join(parts), goes_on
    length = lines.partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0]
    return status, await reader.readexactly(int(length or 0)), goes_on


def _fault(status: int, answer: bytes, method: str) -> str:
    """What is wrong with an answer, or ""."""
    if status >= 500:
        return f"status {status}"
    if b'"type":"server_error"' in answer or b'"type": "server_error"' in answer:
        return "an error of the server's in a stream"
    if status >= 400 and method != "HEAD" and b'"error"' not in answer:
        return f"status {status} without an error object"
    return ""


def run(seed: int, count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), TEMPLATE)
        with watched_server(["--model", folder, *SERVER], max_tokens=MAX_MODEL_LEN - 10) as server:
            server.stalls()
            began = time.monotonic()
            found = asyncio.run(fuzz(server, Bodies(seed), count))
            seconds = time.monotonic() - began
            seen = server.stalls()
            server.settle()
            found.memory[count] = server.rss()
    for fault in found.wrong[:20]:
        print(fault, file=sys.stderr)
    classes = Counter(status // 100 for status in found.statuses.elements())
    return {
        "seed": seed,
        "bodies": count,
        "seconds": round(seconds),
        "statuses": {str(status): number for status, number in sorted(found.statuses.items())},
        "classes": [classes[2], classes[4], classes[5]],
        "left": found.left,
        "wrong": len(found.wrong),
        "stream_ms": round(seen.stream * 1e3),
        "first_ms": round(seen.first * 1e3),
        "health_ms": round(seen.health * 1e3),
        "victim_errors": seen.errors,
        "memory": [round(found.memory[at]) for at in sorted(found.memory)],
    }


def report(rows: list[dict[str, Any]]) -> str:
    lines = [HEAD.format(machine=machine())]
    for row in rows:
        ok, refused, failed = row["classes"]
        memory = " → ".join(map(str, row["memory"]))
        lines.append(
            f"| {row['seed']} | {row['bodies']:,} | {ok:,} | {refused:,} | {failed} | {row['left']} | {row['wrong']} | "
            f"{row['stream_ms']} | {row['first_ms']} | {row['health_ms']} | {memory} |"
        )
    total = sum(row["bodies"] for row in rows)
    return "\n".join(lines) + f"\n\n{total:,} bodies in all.\n"


HEAD = """# Random bodies

`python benchmarks/fuzz_bodies.py --seed S --count N` on {machine}, server, fuzzer and watcher on one core: a tiny
random model behind `octavo serve --itl-slo-ms 50`, 12 connections. Another tenant's stream decodes all the time. Wrong:
a 5xx, an error of the server's in a stream, a 4xx without an error object, a connection that was dropped or no answer
within 60 s. Stream, first, /health: the longest waits between two tokens, for a first one, and for /health. MiB:
resident memory of the server and its processes after 2,000 bodies, half of them, and all of them.

| seed | bodies | 2xx | 4xx | 5xx | clients that left | wrong | stream, ms | first, ms | /health, ms | MiB |
|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--rows", type=Path, help="append the result to this JSON file")
    parser.add_argument("--join", type=Path, help="write the report from this file instead")
    parser.add_argument("--show", type=int, metavar="I", help="print body I of the seed instead")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.show is not None:
        print(Bodies(args.seed).make(args.show))
    elif args.join:
        args.out.write_text(report(json.loads(args.join.read_text())))
    else:
        row = run(args.seed, args.count)
        print(json.dumps(row))
        if args.rows:
            known = json.loads(args.rows.read_text()) if args.rows.exists() else []
            args.rows.write_text(json.dumps([*known, row]))
        sys.exit(1 if row["wrong"] else 0)


if __name__ == "__main__":
    main()
