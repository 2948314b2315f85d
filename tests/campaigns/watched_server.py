"""A real server to attack, in a separate process, while another tenant's stream and /health are watched.

Shared by `attacks.py` and `fuzz_bodies.py`. The watcher is a separate process too, so that what it measures does not
depend on the attacker's interpreter:

    attacker ──HTTP──> octavo serve <──HTTP── watcher: one stream after the other, and /health every 20 ms
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from octavo.workloads.server_process import running_server

VICTIM_KEY, ATTACKER_KEY, ADMIN_KEY = "a-key-of-the-victim", "a-key-of-the-attacker", "a-key-of-the-admin"
# What the watched stream requests, again and again.
STREAM = {"prompt": [7, 8, 9], "temperature": 0, "ignore_eos": True, "stream": True}
# The one metric that may be negative.
SAVED = "octavo:speculation_saved_seconds"
_HEALTH_EVERY = 0.02


@dataclass(frozen=True)
class Stalls:
    """The longest waits since the last call, in seconds, and the tokens and probes that arrived.

    Attributes:
        stream: the wait between two tokens of the stream.
        first: the wait for the first token after a restart of the stream.
        health: the wait for an answer of /health.
    """

    stream: float
    first: float
    health: float
    tokens: int
    probes: int
    errors: int


@dataclass(frozen=True)
class Memory:
    """Resident memory in MiB.

    Attributes:
        cache: the KV cache, whose pages become resident when they are first written to.
        server: the server's process besides.
        readers: the processes that it started, which read bodies.
    """

    cache: float
    server: float
    readers: float

    def __str__(self) -> str:
        return f"{self.cache:.0f} | {self.server:.0f} | {self.readers:.0f}"


@dataclass(frozen=True)
class Watched:
    """A server under attack, and its watcher."""

    port: int
    pid: int
    _watcher: subprocess.Popen[str]

    def stalls(self) -> Stalls:
        """Return what was seen since the last call."""
        assert self._watcher.stdin is not None
        assert self._watcher.stdout is not None
        self._watcher.stdin.write("\n")
        self._watcher.stdin.flush()
        return Stalls(**json.loads(self._watcher.stdout.readline()))

    def settle(self, stall: float = 0.1, at_most: float = 30.0) -> None:
        """Wait until the stream has run for half a second without a stall of `stall` seconds; at most `at_most`."""
        until = time.monotonic() + at_most
        self.stalls()
        while time.monotonic() < until:
            time.sleep(0.5)
            seen = self.stalls()
            if seen.tokens > 3 and max(seen.stream, seen.first) < stall:
                return

    def left_over(self, at_most: float = 30.0) -> list[str]:
        """Stop watching, and say what is wrong with an idle server: active blocks, a failed audit, wrong metrics."""
        self._watcher.kill()
        until, audits = time.monotonic() + at_most, None
        while time.monotonic() < until:
            now = self._metrics()
            if now["vllm:num_requests_running"] == now["vllm:num_requests_waiting"] == 0:
                audits = now["octavo:audits_total"] if audits is None else audits
                if now["octavo:audits_total"] > audits:
                    break
            time.sleep(0.3)
        now = self._metrics()
        sums = {
            "vllm:e2e_request_latency_seconds_count": ("vllm:request_success_total",),
            "vllm:prefix_cache_queries_total": (
                "vllm:prefix_cache_hits_total",
                "octavo:prefix_cache_uncached_tokens_total",
            ),
            "octavo:tenant_requests_running": (),
            "octavo:tenant_requests_waiting": (),
        }
        wrong = [
            f"{name} is {now[name]}, but the sum of {parts} is {sum(now[part] for part in parts)}"
            for name, parts in sums.items()
            if now[name] != sum(now[part] for part in parts)
        ]
        wrong += [f"{name} is {value}" for name, value in now.items() if value < 0 and name != SAVED]
        active = self._get("/debug/kv").json()["bytes"]["active"]
        health = self._get("/health").json()
        wrong += [f"{active} bytes are still active"] * bool(active) + [f"health: {health}"] * (
            health["status"] != "ok"
        )
        return wrong

    def _metrics(self) -> Counter[str]:
        """The sum of each metric over its labels."""
        found: Counter[str] = Counter()
        for line in self._get("/metrics").text.splitlines():
            if not line.startswith("#"):
                found[line.partition("{")[0].partition(" ")[0]] += float(line.rpartition(" ")[2])  # type: ignore[assignment]
        return found

    def _get(self, path: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", headers=headers, timeout=30).raise_for_status()

    def memory(self) -> Memory:
        """Resident memory by its use."""
        cache = _mapped_at_once(self.pid)
        started = sum(_rss(one) for one in _descendants(self.pid))
        return Memory(*(amount / 2**20 for amount in (cache, _rss(self.pid) - cache, started)))

    def rss(self) -> float:
        """Resident memory of the server and of the processes that it started, in MiB."""
        return resident(self.pid)


@contextmanager
def watched_server(
    arguments: Sequence[str], max_tokens: int = 4000, command: Sequence[str] | None = None
) -> Iterator[Watched]:
    """Run `octavo serve ARGUMENTS` with the two keys, watched from its first token on.

    Args:
        max_tokens: the length of the watched stream, which is then restarted.
        command: what runs instead of `octavo serve`.
    """
    keys = ["--api-key", VICTIM_KEY, "--api-key", ATTACKER_KEY, "--admin-key", ADMIN_KEY, "--no-access-log"]
    with running_server([*keys, *arguments], command) as server:
        port = int(server.base_url.rpartition(":")[2])
        argv = [sys.executable, __file__, str(port), str(max_tokens)]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
            try:
                assert server.pid is not None
                watched = Watched(port, server.pid, watcher)
                watched.settle()
                yield watched
            finally:
                watcher.kill()


@dataclass(frozen=True)
class Answer:
    """How a request ended.

    Attributes:
        status: the answer's status; 0 if the connection was closed without one, -1 if the client gave up waiting.
        size: bytes of the answer's body.
    """

    status: int
    body: bytes = b""
    seconds: float = 0.0
    size: int = 0

    def __str__(self) -> str:
        return {0: "closed", -1: "given up"}.get(self.status, str(self.status))


def head(path: str, size: int, key: str = ATTACKER_KEY, *, keep: bool = False) -> bytes:
    """The header of a POST."""
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Authorization: Bearer {key}",
        f"Content-Length: {size}",
        f"Connection: {'keep-alive' if keep else 'close'}",
    ]
    return "\r\n".join([*lines, "", ""]).encode()


async def post(port: int, path: str, body: bytes, seconds: float = 3.0, keeps: int = 4096) -> Answer:
    """Send a body on a new connection, read the answer, and give up after `seconds`.

    Args:
        keeps: bytes of the answer to keep.
    """
    began = time.perf_counter()
    received, size = b"", 0
    writer = None
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                # Keep-alive: a server that closes while bytes are still arriving loses its answer.
                writer.write(head(path, len(body), keep=True) + body)
                await writer.drain()
            except ConnectionError:
                pass  # it may have been answered before it was sent whole
            while size < _end_of_answer(received) and (chunk := await reader.read(65536)):
                size += len(chunk)
                received += chunk[: max(0, keeps - len(received))]
    except TimeoutError:
        if not received:
            return Answer(-1, b"", time.perf_counter() - began)
    except ConnectionError:
        pass
    finally:
        if writer is not None:
            writer.transport.abort()
    status = int(received[9:12]) if received.startswith(b"HTTP/1.1 ") else 0
    return Answer(status, received.partition(b"\r\n\r\n")[2], time.perf_counter() - began, size)


def _end_of_answer(received: bytes) -> float:
    """The size of an answer including its header; infinity while it is unknown."""
    lines, found, _ = received.partition(b"\r\n\r\n")
    if not found:
        return float("inf")
    length = lines.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return len(lines) + 4 + int(length) if length else float("inf")


def resident(pid: int) -> float:
    """Resident memory of a process and of those that it started, in MiB."""
    return sum(_rss(one) for one in [pid, *_descendants(pid)]) / 2**20


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except OSError:
            continue  # it has ended
        for child in children:
            found += [child, *_descendants(child)]
    return found


def _rss(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return 0  # it has ended


def _mapped_at_once(pid: int, least: int = 900 * 2**20) -> int:
    """Resident bytes of the mappings of a process that are at least so large: only the KV cache is, if it has 1 GiB."""
    resident, size = 0, 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, *values = line.split()
        if name == "Size:":
            size = int(values[0]) * 1024
        elif name == "Rss:" and size >= least:
            resident += int(values[0]) * 1024
    return resident


def stolen() -> float:
    """Seconds since the machine's start that other machines on the same host took from its cores, all cores together.

    It is counted in hundredths of a second.
    """
    return int(Path("/proc/stat").read_text().split(maxsplit=9)[8]) / os.sysconf("SC_CLK_TCK")


class _Watcher:
    """The watcher's process: for each line that it reads, prints what it has seen and resets it."""

    def __init__(self, port: int, max_tokens: int) -> None:
        self._port = port
        self._max_tokens = max_tokens
        self._reset()
        self._is_first = True
        self._waiting_since: float | None = None

    def _reset(self) -> None:
        self.seen = {"stream": 0.0, "first": 0.0, "health": 0.0, "tokens": 0, "probes": 0, "errors": 0}

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(sys.stdin.fileno(), self._tell)
        await asyncio.gather(self._watch_stream(), self._watch_health())

    def _tell(self) -> None:
        if not os.read(sys.stdin.fileno(), 1):
            os._exit(0)
        if self._waiting_since is not None:
            # A wait that is still going on counts with its length so far.
            self._note("first" if self._is_first else "stream", time.perf_counter() - self._waiting_since)
        print(json.dumps(self.seen), flush=True)
        self._reset()

    def _note(self, what: str, seconds: float) -> None:
        self.seen[what] = max(self.seen[what], seconds)

    async def _watch_stream(self) -> None:
        body = json.dumps({**STREAM, "max_tokens": self._max_tokens}).encode()
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(head("/v1/completions", len(body), VICTIM_KEY) + body)
            self._waiting_since, self._is_first = time.perf_counter(), True
            received = b""
            while chunk := await reader.read(65536):
                now = time.perf_counter()
                self._note("first" if self._is_first else "stream", now - self._waiting_since)
                self._waiting_since, self._is_first = now, False
                self.seen["tokens"] += chunk.count(b"data: ")
                received = (received + chunk)[-64:]
            if b"[DONE]" not in received:
                self.seen["errors"] += 1
            writer.close()

    async def _watch_health(self) -> None:
        request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        while True:
            began = time.perf_counter()
            writer.write(request)
            answer = await reader.readuntil(b"}")
            self._note("health", time.perf_counter() - began)
            self.seen["probes"] += 1
            self.seen["errors"] += not answer.startswith(b"HTTP/1.1 200 ")
            await asyncio.sleep(_HEALTH_EVERY)


def as_json(body: Any) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


if __name__ == "__main__":
    asyncio.run(_Watcher(int(sys.argv[1]), int(sys.argv[2])).run())
