"""What `octavo route` adds to a request, in front of a server without a model.

    python -m benchmarks.relay [--strategy prefix] [--requests 200] [--chunks 65] [--pause-ms 2] [--streams 16]

A client asks the stand-in for a server over one connection, in turn directly and through the router, for answers of one
chunk and of many. Shows the router's processor time for a request and for a chunk, without what it spends while idle;
that of a chunk with many streams at once; and the median time that it adds to a request, without what tokenising takes.
A relay of raw bytes on the same event loop shows how much of a chunk the kernel and the loop take.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import operator
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks import this_machine
from octavo.checkpoint.model_source import tokenizer_of
from octavo.config import EngineConfig
from octavo.request_limits import DEFAULT_LIMITS
from octavo.server.bodies.local_reader import LocalApisReader
from octavo.text.tokenizer import Tokenizer
from octavo.workloads.server_process import RunningServer, fetch_json, running_server

MODEL, KEY, CHAT = "smollm2", "benchmark-router-key", "/v1/chat/completions"
QUESTION = "Question {number}: which book should I read next, and on which shelf of the section is it?"
IDLE_S = 3.0
Ways = list[http.client.HTTPConnection]
EVENT = b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" is"},'
EVENT += b'"logprobs":null,"finish_reason":null}],"usage":null}\n\n'


def new_reader() -> LocalApisReader:
    """What reads bodies as a server of the default model would, and so a router in front of it."""
    return LocalApisReader(
        tokenizer=Tokenizer.from_source(tokenizer_of(EngineConfig(model=MODEL))),
        limits=DEFAULT_LIMITS,
        names=(MODEL,),
        vocab_size=49_152,
        hidden_size=576,
        max_model_len=8192,
        default_sampling={},
        tool_call_parser="auto",
        reasoning_parser="auto",
    )


class StandIn(asyncio.Protocol):
    """A server's connection: answers a chat with `max_tokens` events, one every `pause_s`."""

    def __init__(self, facts: bytes, pause_s: float) -> None:
        self._facts = facts
        self._pause_s = pause_s
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        length = int(
            next((line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
        )
        if not end or len(body) < length:
            return
        self._received = body[length:]
        if head.startswith(b"POST"):
            json_end = body.rindex(b"}") + 1  # token ids follow
            number = int(body[:json_end].rpartition(b'"max_tokens":')[2].strip(b" }"))
            heading = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            self._transport.write(heading)
            self._send(number)
            return
        answer = self._facts if b"/router/worker" in head else b"{}"
        told = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(answer)}\r\n\r\n"
        self._transport.write(told.encode() + answer)

    def _send(self, left: int) -> None:
        event = EVENT if left else b"data: [DONE]\n\n"
        self._transport.write(b"%x\r\n%b\r\n" % (len(event), event) + (b"" if left else b"0\r\n\r\n"))
        if left:
            asyncio.get_running_loop().call_later(self._pause_s, self._send, left - 1)


async def stand_in(args: argparse.Namespace) -> None:
    """Serve as the stand-in, with a publisher of KV events that has none."""
    import zmq

    reader = new_reader()
    events: Any = zmq.Context.instance().socket(zmq.PUB)
    port = events.bind_to_random_port("tcp://127.0.0.1")
    facts = {
        "instance": "stand-in",
        "role": "both",
        "names": [MODEL],
        "fingerprint": reader.prompt_fingerprint(),
        "prompt_settings": reader.prompt_settings,
        "needs_key": False,
        "model": MODEL,
        "block_size": 16,
        "num_blocks": 4096,
        "max_num_batched_tokens": 2048,
        "kv_neighbours": None,
        "kv_events": {"endpoint": f"tcp://127.0.0.1:{port}", "replay_endpoint": None, "topic": ""},
    }
    encoded, loop = json.dumps(facts).encode(), asyncio.get_running_loop()
    server = await loop.create_server(lambda: StandIn(encoded, args.pause_ms / 1e3), args.host, args.port)
    print(f"Octavo serving nothing on http://{args.host}:{server.sockets[0].getsockname()[1]}", flush=True)
    with suppress(asyncio.CancelledError):
        await server.serve_forever()


class RawRelay(asyncio.Protocol):
    """One side of a connection whose bytes are passed on as they are."""

    def __init__(self, server: tuple[str, int] | None, other: asyncio.Transport | None = None) -> None:
        self._server = server
        self._other = other

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._early = b""
        if self._server is not None:
            self._connecting = asyncio.ensure_future(self._connect(*self._server))

    async def _connect(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        self._other, _ = await loop.create_connection(lambda: RawRelay(None, self._transport), host, port)
        self._other.write(self._early)

    def data_received(self, data: bytes) -> None:
        if self._other is None:
            self._early += data
        else:
            self._other.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._other is not None:
            self._other.close()


async def raw_relay(args: argparse.Namespace) -> None:
    """Relay raw bytes to and from the server at `args.relay_to`."""
    address = urlsplit(args.relay_to)
    server = await asyncio.get_running_loop().create_server(
        lambda: RawRelay((address.hostname or "", address.port or 0)), args.host, args.port
    )
    print(f"Octavo serving nothing on http://{args.host}:{server.sockets[0].getsockname()[1]}", flush=True)
    with suppress(asyncio.CancelledError):
        await server.serve_forever()


def ask(connection: http.client.HTTPConnection, number: int, chunks: int) -> float:
    """Ask for an answer of so many events, and return the seconds until the first of them."""
    messages = [{"role": "user", "content": QUESTION.format(number=number)}]
    body = json.dumps({"messages": messages, "stream": True, "max_tokens": chunks})
    began = time.perf_counter()
    connection.request("POST", CHAT, body, {"content-type": "application/json"})
    answer = connection.getresponse()
    first = answer.read1()
    seconds = time.perf_counter() - began
    events = (first + answer.read()).count(b"data: {")
    if answer.status != http.HTTPStatus.OK or events != chunks:
        raise RuntimeError(f"status {answer.status}, {events} of {chunks} events: {first[:200]!r}")
    return seconds


def processor_seconds(pid: int | None) -> float:
    """Return the processor time of a process's threads, without that of its children."""
    return sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def connections(url: str, number: int) -> Ways:
    return [http.client.HTTPConnection(urlsplit(url).netloc) for _ in range(number)]


def spent(pid: int | None, idle: float, ways: Ways, requests: int, chunks: int) -> float:
    """Return a process's processor time for a request, over so many connections at once.

    Args:
        idle: its processor time in a second in which nothing is asked.
    """
    before, began = processor_seconds(pid), time.perf_counter()
    rounds = max(1, requests // len(ways))
    with ThreadPoolExecutor(len(ways)) as threads:
        for number in range(rounds):
            list(threads.map(ask, ways, repeat(number), repeat(chunks)))
    return (processor_seconds(pid) - before - idle * (time.perf_counter() - began)) / rounds / len(ways)


def chunk_cost(process: RunningServer, idle: float, args: argparse.Namespace, streams: int) -> tuple[float, float]:
    """Return a process's processor time for a request, and for a chunk."""
    ways = connections(process.base_url, streams)
    one, many = (spent(process.pid, idle, ways, args.requests, chunks) for chunks in (1, args.chunks))
    return one, (many - one) / (args.chunks - 1)


def measure(args: argparse.Namespace) -> list[str]:
    reader = new_reader()
    own = (sys.executable, "-m", "benchmarks.relay", "--pause-ms", str(args.pause_ms))
    with running_server((), (*own, "--stand-in")) as server:
        routing = ("--worker", server.base_url, "--router-key", KEY, "--strategy", args.strategy, "--no-access-log")
        with running_server(routing, (sys.executable, "-m", "octavo", "route")) as router:
            while not fetch_json(router.base_url + "/health")["workers"]:
                time.sleep(0.1)
            ways = [*connections(router.base_url, 1), *connections(server.base_url, 1)]
            for number in range(20):
                ask(ways[0], number, 1)
            added, tokenising = [], []
            for number in range(args.requests):
                through, directly = (ask(way, number, 1) for way in ways)
                added.append(through - directly)
                # Between two requests, as the router does it, because a processor's caches are cold then.
                body = json.dumps({"messages": [{"role": "user", "content": QUESTION.format(number=number)}]})
                began = time.perf_counter()
                reader.chat(body.encode())
                tokenising.append(time.perf_counter() - began)
            before = processor_seconds(router.pid)
            time.sleep(IDLE_S)
            looks = (processor_seconds(router.pid) - before) / IDLE_S  # at servers, also while nothing is asked
            costs = [chunk_cost(router, looks, args, streams) for streams in (1, args.streams)]
        with running_server((), (*own, "--relay-to", server.base_url)) as raw:
            floors = [chunk_cost(raw, 0.0, args, streams)[1] for streams in (1, args.streams)]
    through, beyond = statistics.median(added), statistics.median(map(operator.sub, added, tokenising))
    return [
        f"{this_machine.name()}; {args.requests} requests, one after the other; "
        f"chunks {args.pause_ms:g} ms apart; --strategy {args.strategy}.",
        "",
        f"Processor time of a request: {costs[0][0] * 1e3:.2f} ms. Added to it at the median: {through * 1e3:.2f} ms, "
        f"beyond tokenising {beyond * 1e3:.2f} ms.",
        "",
        "| processor time of a chunk | router | raw relay |",
        "|---|---:|---:|",
        *(
            f"| {streams} at once | {cost[1] * 1e6:.0f} µs | {floor * 1e6:.0f} µs |"
            for streams, cost, floor in zip((1, args.streams), costs, floors, strict=True)
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="prefix")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--chunks", type=int, default=65, help="of a long answer")
    parser.add_argument("--pause-ms", type=float, default=2.0, help="between two chunks")
    parser.add_argument("--streams", type=int, default=16, help="at once, in turn with a single one")
    parser.add_argument("--relay-to", help=argparse.SUPPRESS)
    parser.add_argument("--stand-in", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--host", default="127.0.0.1", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stand_in:
        asyncio.run(stand_in(args))
        return
    if args.relay_to:
        asyncio.run(raw_relay(args))
        return
    print("\n".join(measure(args)))


if __name__ == "__main__":
    main()
