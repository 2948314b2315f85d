"""Send random bodies to every endpoint of a real server: valid ones, invalid ones, and some at the limits.

    python -m tests.campaigns.fuzz_bodies --seed 1 --count 10000 [--faults 0.004] [--rows FILE]
    python -m tests.campaigns.fuzz_bodies --join FILE            writes benchmarks/results/fuzz_bodies.md

The server runs a tiny random model, so that most of the time is spent on requests and not in the model. A body depends
only on the seed and its index (`fuzz_values.py`, `fuzz_fields.py`); `--show I` prints it. Some clients leave before the
answer, or in the middle of a stream. Faults are any 5xx, an answer or an error that is not as the server's OpenAPI
description says, a message that shows Python's insides, a stream without its end, a stream that joins to another answer
than the same body has in one piece (`fuzz_streams.py`), blocks that are still held and metrics that do not add up when
all is over, a stall of another tenant's stream, and growing memory. Exits with 1 if an answer was wrong.

With `--faults`, steps raise at random (`faulty_server.py`), and the pool is so small that sequences are preempted all
the time: some requests end as failed, and all others must not notice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from benchmarks import this_machine
from octavo.dialect.formats import REASONING_PARSERS, TOOL_CALL_PARSERS
from tests.campaigns.attacks import write_model
from tests.campaigns.fuzz_fields import STORED_ITEM, STORED_RESPONSE, WEIGHTS, make_body
from tests.campaigns.fuzz_streams import STREAMED, difference, twins
from tests.campaigns.fuzz_values import MAX_MODEL_LEN, description
from tests.campaigns.watched_server import Watched, head, watched_server

RESULTS = Path(__file__).parent / "results" / "fuzz_bodies.md"
CONNECTIONS = 12
# A body may ask for hundreds of answers that fill the context, which take minutes on a busy machine.
MOST_SECONDS = 600
# After this many bodies the server has all that it keeps: caches, threads, worker processes.
WARM_UP = 2000
SERVER = [
    *("--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "64"),
    *("--itl-slo-ms", "50", "--deterministic"),
    *("--speculative-config", '{"method": "suffix"}', "--kv-host-memory", "1MiB", "--kv-demotion", "all"),
]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}"
    "{% endfor %}\n{% endfor %}{% if add_generation_prompt %}:{% endif %}{% if enable_thinking %}<think>{% endif %}"
)
# A path that the server gains must be given a weight.
ENDPOINTS = {p: WEIGHTS[p] for p, methods in description()["paths"].items() if "requestBody" in methods.get("post", {})}
# What a request is answered whose step has failed.
FAILED = b"engine failed while computing"
# What no message to a client may hold.
INSIDES = re.compile(rb"Traceback|NoneType|object has no attribute|unhashable|<class |pydantic|validation error|__")


class Bodies:
    """The bodies of one seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def make(self, index: int) -> tuple[str, str, bytes, float | None]:
        """(method, path, body, the seconds after which its client leaves, or None if it does not)."""
        rng = random.Random(f"{self._seed}-{index}")
        leaves = rng.choice([0.0, 0.002, 0.01, 0.05]) if rng.random() < 0.04 else None
        if rng.random() < 0.02:
            return rng.choice(["GET", "DELETE", "PUT", "POST", "HEAD"]), _odd_path(rng), b"", None
        if rng.random() < 0.01:
            part = rng.choice(
                ["", "", "/input_items?limit=2", "/input_items?order=asc&after=x", "/input_items?limit=x"]
            )
            return rng.choice(["GET", "GET", "DELETE"]), f"/v1/responses/{STORED_RESPONSE}{part}", b"", None
        path = rng.choices(list(ENDPOINTS), list(ENDPOINTS.values()))[0]
        return "POST", path, make_body(rng, path), leaves


def _odd_path(rng: random.Random) -> str:
    junk = "".join(rng.choices("abc/%20.?=&~", k=rng.randrange(1, 60)))
    # Not the live page's stream, which does not end.
    known = [re.sub(r"{\w+}", lambda _: junk, path) for path in description()["paths"] if path != "/live/events"]
    return rng.choice([*known, f"/{junk}"])


@dataclass
class Found:
    """What the bodies of a seed caused."""

    statuses: Counter[int] = field(default_factory=Counter)
    # How many were served, and how many sent, by path.
    served: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    left: int = 0
    # Bodies that were answered as a stream and in one piece.
    pairs: int = 0
    wrong: list[str] = field(default_factory=list)
    memory: dict[int, float] = field(default_factory=dict)
    # The id of the last response that was stored.
    stored: str = "resp_none"

    def filled(self, given: bytes) -> bytes:
        """A path or body with ids of what was stored; a stored response's first item has a number of 0."""
        item = f"msg_{self.stored.removeprefix('resp_')}i0000"
        return given.replace(STORED_RESPONSE.encode(), self.stored.encode()).replace(
            STORED_ITEM.encode(), item.encode()
        )


async def fuzz(server: Watched, bodies: Bodies, count: int, *, may_fail: bool = False) -> Found:
    found = Found()
    numbers = iter(range(count))

    async def run() -> None:
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        for index in numbers:
            if index in (WARM_UP, count // 2):
                found.memory[index] = server.rss()
            method, path, body, leaves = bodies.make(index)
            path, body = found.filled(path.encode()).decode(), found.filled(body)
            connection = connection or await asyncio.open_connection("127.0.0.1", server.port, limit=2**26)
            reader, writer = connection
            request = head(path, len(body), keep=True).replace(b"POST ", method.encode() + b" ", 1) + body
            try:
                writer.write(request)
                status, answer, goes_on = await asyncio.wait_for(
                    _answer(reader, method), MOST_SECONDS if leaves is None else leaves
                )
            except (ConnectionError, asyncio.IncompleteReadError, TimeoutError) as error:
                writer.transport.abort()
                connection = None
                if leaves is None:
                    found.wrong.append(f"body {index}: {method} {path}: {type(error).__name__}")
                found.left += leaves is not None
                continue
            found.statuses[status] += 1
            found.sent[path] += 1
            found.served[path] += status == 200
            if status == 200 and (stored := re.match(rb'{"id":"(resp_[0-9a-f]+)"', answer)):
                found.stored = stored[1].decode()
            fault = fault_of(status, answer, method, path)
            if fault and not (may_fail and FAILED in answer):
                found.wrong.append(f"body {index}: {method} {path}: {status}: {fault}: {answer[:300]!r}")
                print(found.wrong[-1], file=sys.stderr, flush=True)
            if status == 200 and path in STREAMED and index % 2 == 0 and goes_on and (pair := twins(path, body)):
                found.pairs += 1
                answers = []
                for twin in pair:
                    writer.write(head(path, len(twin), keep=True) + twin)
                    answers.append(await asyncio.wait_for(_answer(reader, method), MOST_SECONDS))
                (status, stream, _), (_, whole, goes_on) = answers
                # Completions that are chosen at their end cannot be streamed.
                if status == 200 and (fault := difference(path, stream, whole)):
                    found.wrong.append(f"body {index}: {path}: {fault}")
                    print(found.wrong[-1], file=sys.stderr, flush=True)
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


def fault_of(status: int, answer: bytes, method: str, path: str) -> str:
    """What is wrong with an answer, or ""."""
    if status >= 500:
        return "a server's error"
    if method == "HEAD":
        return ""
    if status >= 400 and (inside := INSIDES.search(answer)):
        return f"a message that shows {inside[0]!r}"
    if method != "POST" or path not in ENDPOINTS:
        return "" if status < 400 or b'"error"' in answer else "no error object"
    if answer.startswith((b"data: ", b"event: ")):
        return _fault_of_stream(answer)
    if path.startswith("/api/") and status == 200 and answer.endswith(b"\n"):
        return _fault_of_lines(answer)
    try:
        given = strict_json(answer)
    except ValueError as error:
        return f"no JSON: {error}"
    if (problem := next(_checker(path, str(status)).iter_errors(given), None)) is not None:
        return f"not as described: {problem.message[:200]}"
    # Ollama's errors are only a message.
    if status >= 400 and len(given["error"] if path.startswith("/api/") else given["error"]["message"]) < 10:
        return "a message that says nothing"
    return ""


def _fault_of_stream(answer: bytes) -> str:
    """What is wrong with server-sent events; the last one says how the stream ended."""
    for event in answer.split(b"\n\n")[:-1]:
        content = event.partition(b"data: ")[2]
        if content == b"[DONE]":
            continue
        try:
            given = strict_json(content)
        except ValueError as error:
            return f"no JSON in a stream: {error}: {content[:100]!r}"
        if (given.get("error") or {}).get("type") in ("server_error", "api_error"):
            return f"an error of the server's in a stream: {given}"
    openai, others = (b"[DONE]", b'"type":"response.completed"', b'"type":"response.incomplete"'), (b'"stop":true',)
    ends = (*openai, *others, b'"type":"message_stop"')
    last = answer.rstrip().rpartition(b"\n\n")[2]
    return "" if any(end in last for end in ends) or b'"error"' in last else f"a stream without an end: {last[:100]!r}"


def _fault_of_lines(answer: bytes) -> str:
    """What is wrong with a stream of Ollama's API; the last line says how it ended."""
    try:
        lines = [strict_json(line) for line in answer.splitlines()]
    except ValueError as error:
        return f"no JSON in a stream: {error}: {answer[:100]!r}"
    ended = lines[-1].get("done") or lines[-1].get("status") == "success" or "error" in lines[-1]
    return "" if ended else f"a stream without an end: {lines[-1]}"


def strict_json(text: bytes) -> Any:
    """Parse JSON as other clients do, which do not take NaN or Infinity."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number")

    return json.loads(text, parse_constant=refuse)


@cache
def _checker(path: str, status: str) -> Draft202012Validator:
    """The schema of a path's answers."""
    answers = description()["paths"][path]["post"]["responses"]
    schema = answers.get(status, answers["default"])["content"]["application/json"]["schema"]
    return Draft202012Validator({**schema, "components": description()["components"]})


def run(seed: int, count: int, faults: float) -> dict[str, Any]:
    command, pool = None, ["--num-blocks", "2048"]
    if faults:
        command = [sys.executable, "-m", "tests.campaigns.faulty_server", str(faults), "serve"]
        pool = ["--num-blocks", "161", "--swap-space", "512KiB"]
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), TEMPLATE)
        rng = random.Random(seed)
        parsers = [
            "--tool-call-parser",
            rng.choice(TOOL_CALL_PARSERS),
            "--reasoning-parser",
            rng.choice(REASONING_PARSERS),
        ]
        arguments = ["--model", folder, *SERVER, *parsers, *pool]
        with watched_server(arguments, MAX_MODEL_LEN - 10, command) as server:
            server.stalls()
            began = time.monotonic()
            found = asyncio.run(fuzz(server, Bodies(seed), count, may_fail=faults > 0))
            seconds = time.monotonic() - began
            seen = server.stalls()
            server.settle()
            found.memory[count] = server.rss()
            found.wrong += server.left_over()
    for fault in found.wrong[:20]:
        print(fault, file=sys.stderr)
    classes = Counter(status // 100 for status in found.statuses.elements())
    return {
        "seed": seed,
        "bodies": count,
        "seconds": round(seconds),
        "statuses": {str(status): number for status, number in sorted(found.statuses.items())},
        "served": {path: [found.served[path], found.sent[path]] for path in ENDPOINTS},
        "classes": [classes[2], classes[4], classes[5]],
        "left": found.left,
        "pairs": found.pairs,
        "wrong": len(found.wrong),
        "stream_ms": round(seen.stream * 1e3),
        "first_ms": round(seen.first * 1e3),
        "health_ms": round(seen.health * 1e3),
        "victim_errors": seen.errors,
        "memory": [round(found.memory[at]) for at in sorted(found.memory)],
    }


def report(rows: list[dict[str, Any]]) -> str:
    lines = [HEAD.format(machine=this_machine.name())]
    for row in rows:
        ok, refused, failed = row["classes"]
        memory = " → ".join(map(str, row["memory"]))
        lines.append(
            f"| {row['seed']} | {row['bodies']:,} | {ok:,} | {refused:,} | {failed} | {row['left']} | {row['wrong']} | "
            f"{row['stream_ms']} | {row['first_ms']} | {row['health_ms']} | {memory} |"
        )
    total = sum(row["bodies"] for row in rows)
    served = ", ".join(f"{path} {sum(row['served'].get(path, [0])[0] for row in rows):,}" for path in ENDPOINTS)
    return "\n".join(lines) + f"\n\n{total:,} bodies in all. Served with 200: {served}.\n"


HEAD = """# Random bodies

`python -m tests.campaigns.fuzz_bodies --seed S --count N` on {machine}, server, fuzzer and watcher on one core: a tiny
random model behind `octavo serve --itl-slo-ms 50`, 12 connections. Another tenant's stream decodes all the time. Wrong:
a 5xx, an error of the server's in a stream or a stream without its end, an answer or error that is not as /openapi.json
describes, a message that shows Python's insides, a connection that was dropped, no answer within 60 s, and blocks that
are still active, or an audit that failed, once the server is idle. Stream, first, /health: the longest waits between
two tokens, for a first one, and for /health. MiB: resident memory of the server and its processes after 2,000 bodies,
half of them, and all of them. The fields come from /openapi.json.

| seed | bodies | 2xx | 4xx | 5xx | clients that left | wrong | stream, ms | first, ms | /health, ms | MiB |
|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--faults", type=float, default=0.0, help="probability of a fault at each place of a step")
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
        row = run(args.seed, args.count, args.faults)
        print(json.dumps(row))
        if args.rows:
            known = json.loads(args.rows.read_text()) if args.rows.exists() else []
            args.rows.write_text(json.dumps([*known, row]))
        sys.exit(1 if row["wrong"] else 0)


if __name__ == "__main__":
    main()
