"""Two servers of one thread each behind a router: conversations, by prefix, by load and in turn.

    python -m benchmarks.routing [--conversations 12] [--turns 8] [--users 4] [--rounds 1] [--out FILE]

Users hold one conversation after the other: a long system prompt of its own, then questions, each after the answer to
the last one and a pause. All conversations together do not fit into the cache of one server. Servers and router are
started anew for each strategy, and every round does the same work under each in turn. Reported are the tokens of
prompts that were cached, the time to the first token, and the router's own processor time for a request and for a chunk
of an answer, which chats of one token and of many separate. That time is without the processes that read bodies, and
without what the router spends while it is idle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import this_machine
from octavo.workloads.http import EventLines, PostUrl, post_json
from octavo.workloads.server_process import RunningServer, fetch_json, running_server
from tests.ports import free_port

STRATEGIES = ("prefix", "least_loaded", "round_robin")
KEY = "benchmark-router-key"
SYSTEM = "You are a librarian of the section {topic}, and answer questions about its books, shelf by shelf. "
QUESTION = "Question {turn} about {topic}: which book should I read next, and on which shelf of the section is it?"
PAUSE_S = 0.2
IDLE_S = 5.0


@dataclass
class Figures:
    """What one strategy gave: token counts, seconds to first tokens, and the router's seconds of processor time."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft: list[float] = field(default_factory=list)
    seconds: float = 0.0
    per_request: float = 0.0
    per_chunk: float = 0.0

    def row(self, strategy: str) -> str:
        cuts = statistics.quantiles(self.ttft, n=10, method="inclusive")
        share = self.cached_tokens / self.prompt_tokens
        return (
            f"| {strategy} | {self.cached_tokens:,} of {self.prompt_tokens:,} ({share:.1%}) | {cuts[4]:.3f} | "
            f"{cuts[8]:.3f} | {self.seconds:.1f} | {self.per_request * 1e3:.2f} | {self.per_chunk * 1e6:.0f} |"
        )


@contextmanager
def cluster(strategy: str, memory: str, options: Sequence[Sequence[str]] = ((), ())) -> Iterator[RunningServer]:
    """Servers and a router, which is returned; `options` are those of each server."""
    with ExitStack() as stack:
        named: list[str] = []
        for own in options:
            addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
            events = {"enable_kv_cache_events": True, "endpoint": addresses[0], "replay_endpoint": addresses[1]}
            serving = ("--num-threads", "1", "--kv-cache-memory", memory, "--router-key", KEY, "--no-access-log")
            server = stack.enter_context(running_server((*serving, *own, "--kv-events-config", json.dumps(events))))
            named += ("--worker", server.base_url)
        command = (sys.executable, "-m", "octavo", "route")
        routing = ("--router-key", KEY, "--strategy", strategy, "--no-access-log")
        router = stack.enter_context(running_server((*named, *routing), command))
        while fetch_json(router.base_url + "/health")["workers"] < len(options):
            time.sleep(0.1)
        yield router


def processor_seconds(pid: int | None) -> float:
    """Return the processor time of a process, without its children's."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def chat(url: PostUrl, messages: list[dict[str, str]], max_tokens: int, figures: Figures | None) -> str:
    """Stream the answer to a chat and return its text."""
    lines, pieces, first = EventLines(), list[str](), 0.0
    usage: dict[str, Any] = {}
    began = time.perf_counter()

    def on_body(piece: bytes, now: float) -> None:
        nonlocal first
        for payload in lines.feed(piece):
            if payload == b"[DONE]":
                continue
            event = json.loads(payload)
            usage.update(event.get("usage") or {})
            for choice in event.get("choices", ()):
                if text := choice["delta"].get("content"):
                    first = first or now - began
                    pieces.append(text)

    body = {
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "repetition_penalty": 1,
        "frequency_penalty": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    status, error = await post_json(url, {}, body, on_body)
    if status != 200:
        raise RuntimeError(f"{status}: {error.decode()}")
    if figures is not None:
        figures.prompt_tokens += usage["prompt_tokens"]
        figures.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        figures.ttft.append(first)
    return "".join(pieces)


async def converse(url: PostUrl, topics: list[str], turns: int, figures: Figures) -> None:
    """Hold conversations until no topic is left."""
    while topics:
        topic = topics.pop()
        messages = [{"role": "system", "content": SYSTEM.format(topic=topic) * 12}]
        for turn in range(turns):
            messages.append({"role": "user", "content": QUESTION.format(turn=turn, topic=topic)})
            messages.append({"role": "assistant", "content": await chat(url, messages, 24, figures)})
            await asyncio.sleep(PAUSE_S)


async def run(url: PostUrl, pid: int | None, args: argparse.Namespace, round_number: int, figures: Figures) -> None:
    topics = [f"{round_number}-{number} of the east wing" for number in range(args.conversations)]
    began = time.perf_counter()
    await asyncio.gather(*(converse(url, topics, args.turns, figures) for _ in range(args.users)))
    figures.seconds += time.perf_counter() - began
    before = processor_seconds(pid)
    await asyncio.sleep(IDLE_S)
    looks = (processor_seconds(pid) - before) / IDLE_S  # at servers, also while nothing is asked
    costs = []
    for max_tokens in (1, args.chunks):
        before, began = processor_seconds(pid), time.perf_counter()
        for number in range(0, args.requests, args.users):
            chats = ([{"role": "user", "content": f"Count {number + user}"}] for user in range(args.users))
            await asyncio.gather(*(chat(url, messages, max_tokens, None) for messages in chats))
        spent = processor_seconds(pid) - before - looks * (time.perf_counter() - began)
        costs.append(spent / args.requests)
    figures.per_request, figures.per_chunk = costs[0], (costs[1] - costs[0]) / (args.chunks - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--requests", type=int, default=40, help="requests that measure the router's processor time")
    parser.add_argument("--chunks", type=int, default=65, help="tokens of the longer of these")
    parser.add_argument("--kv-cache-memory", default="96MiB")
    parser.add_argument("--out", type=this_machine.output_file)
    args = parser.parse_args()
    figures = {strategy: Figures() for strategy in STRATEGIES}
    for round_number in range(args.rounds):
        for strategy in STRATEGIES:
            with cluster(strategy, args.kv_cache_memory) as router:
                url = PostUrl.parse(router.base_url + "/v1/chat/completions")
                asyncio.run(run(url, router.pid, args, round_number, figures[strategy]))
    table = [
        f"{this_machine.name()}; {args.conversations} conversations of {args.turns} turns, {args.users} users, "
        f"{args.kv_cache_memory} of cache a server, {args.rounds} rounds.",
        "",
        "| strategy | cached tokens | TTFT p50 (s) | p90 | all (s) | router, ms a request | µs a chunk |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *(figures[strategy].row(strategy) for strategy in STRATEGIES),
    ]
    print("\n".join(table))
    if args.out is not None:
        args.out.write_text("\n".join(table) + "\n")


if __name__ == "__main__":
    main()
