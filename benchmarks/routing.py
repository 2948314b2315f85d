"""Two servers of one thread each behind a router: what routing and prefill apart gain, and what the simulator predicts.

    python -m benchmarks.routing conversations [--rounds 1] [--conversations 12] [--turns 8] [--users 4]
    python -m benchmarks.routing prefill_apart [--rounds 2] [--streams 4] [--tokens 1536] [--every 4] [--seconds 20]

conversations   users hold one conversation after the other, under each strategy: a long system prompt, then questions,
                each after the answer to the last one and a pause. All conversations together do not fit into the cache
                of one server. Shows cached tokens, TTFT, and the router's processor time for a request and for a chunk,
                from chats of one token and of many; without what it spends while idle or in processes that read bodies.
prefill_apart   chats of many tokens run all the time, and a long prompt arrives every few seconds. Both servers answer
                (`both`), or one computes long prompts and the other answers (`apart`, --role). Shows the time between
                the chats' tokens, their tokens a second, and the long prompts' TTFT.

Servers and router are started anew for each strategy or layout, and every round does the same work under each in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import this_machine
from octavo.workloads.http import EventLines, PostUrl, post_json
from octavo.workloads.report import percentile
from octavo.workloads.server_process import RunningServer, fetch_json, running_server
from tests.ports import free_port

STRATEGIES = ("prefix", "least_loaded", "round_robin")
LAYOUTS = {"both": ("both", "both"), "apart": ("prefill", "decode")}
KEY, SECRET = "benchmark-router-key", "only the servers of this benchmark"
SYSTEM = "You are a librarian of the section {topic}, and answer questions about its books, shelf by shelf. "
QUESTION = "Question {turn} about {topic}: which book should I read next, and on which shelf of the section is it?"
GREEDY = {"temperature": 0, "repetition_penalty": 1, "frequency_penalty": 0, "ignore_eos": True}
PAUSE_S, IDLE_S = 0.2, 5.0
CHAT_TOKENS, LONG_ANSWER = 200, 8


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


@dataclass
class Answer:
    """A streamed answer: when it was asked for, when each piece of text came, and what it was."""

    sent: float
    times: list[float] = field(default_factory=list)
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent


async def stream(router: RunningServer, path: str, prompt: dict[str, Any], max_tokens: int) -> Answer:
    """Stream a greedy answer of that many tokens; raises RuntimeError if it is refused or has no text."""
    lines, answer = EventLines(), Answer(time.perf_counter())

    def on_body(piece: bytes, now: float) -> None:
        for payload in lines.feed(piece):
            event = {} if payload == b"[DONE]" else json.loads(payload)
            answer.usage.update(event.get("usage") or {})
            for choice in event.get("choices", ()):
                text = choice["text"] if "text" in choice else choice["delta"].get("content")
                if text or choice.get("token_ids"):  # a token may end in the middle of a character
                    answer.times.append(now)
                    answer.text += text

    body = {**prompt, **GREEDY, "max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}}
    status, error = await post_json(PostUrl.parse(router.base_url + path), {}, body, on_body)
    if status != 200 or not answer.times:
        raise RuntimeError(f"{status}: {error.decode()}")
    return answer


async def chat(router: RunningServer, messages: list[dict[str, str]], max_tokens: int) -> Answer:
    return await stream(router, "/v1/chat/completions", {"messages": messages}, max_tokens)


@dataclass
class Conversations:
    """What one strategy gave: token counts, seconds to first tokens, and the router's seconds of processor time."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft: list[float] = field(default_factory=list)
    seconds: float = 0.0
    per_request: float = 0.0
    per_chunk: float = 0.0

    HEADING = ("cached tokens", "TTFT p50 (s)", "p90", "all (s)", "router, ms a request", "µs a chunk")

    def cells(self) -> list[str]:
        share = self.cached_tokens / self.prompt_tokens
        return [
            f"{self.cached_tokens:,} of {self.prompt_tokens:,} ({share:.1%})",
            *(f"{percentile(self.ttft, q):.3f}" for q in (50, 90)),
            f"{self.seconds:.1f}",
            f"{self.per_request * 1e3:.2f}",
            f"{self.per_chunk * 1e6:.0f}",
        ]

    async def converse(self, router: RunningServer, topics: list[str], turns: int) -> None:
        """Hold conversations until no topic is left."""
        while topics:
            topic = topics.pop()
            messages = [{"role": "system", "content": SYSTEM.format(topic=topic) * 12}]
            for turn in range(turns):
                messages.append({"role": "user", "content": QUESTION.format(turn=turn, topic=topic)})
                answer = await chat(router, messages, 24)
                messages.append({"role": "assistant", "content": answer.text})
                self.prompt_tokens += answer.usage["prompt_tokens"]
                self.cached_tokens += answer.usage["prompt_tokens_details"]["cached_tokens"]
                self.ttft.append(answer.ttft)
                await asyncio.sleep(PAUSE_S)

    async def run(self, router: RunningServer, args: argparse.Namespace, round_number: int) -> None:
        topics = [f"{round_number}-{number} of the east wing" for number in range(args.conversations)]
        began = time.perf_counter()
        await asyncio.gather(*(self.converse(router, topics, args.turns) for _ in range(args.users)))
        self.seconds += time.perf_counter() - began
        before = processor_seconds(router.pid)
        await asyncio.sleep(IDLE_S)
        looks = (processor_seconds(router.pid) - before) / IDLE_S  # at servers, also while nothing is asked
        costs = []
        for max_tokens in (1, args.chunks):
            before, began = processor_seconds(router.pid), time.perf_counter()
            for number in range(0, args.requests, args.users):
                chats = ([{"role": "user", "content": f"Count {number + user}"}] for user in range(args.users))
                await asyncio.gather(*(chat(router, messages, max_tokens) for messages in chats))
            spent = processor_seconds(router.pid) - before - looks * (time.perf_counter() - began)
            costs.append(spent / args.requests)
        self.per_request, self.per_chunk = costs[0], (costs[1] - costs[0]) / (args.chunks - 1)


def processor_seconds(pid: int | None) -> float:
    """Return the processor time of a process, without its children's."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def conversations(args: argparse.Namespace) -> list[str]:
    figures = {strategy: Conversations() for strategy in STRATEGIES}
    for round_number in range(args.rounds):
        for strategy in STRATEGIES:
            with cluster(strategy, args.kv_cache_memory) as router:
                asyncio.run(figures[strategy].run(router, args, round_number))
    return [
        f"{this_machine.name()}; {args.conversations} conversations of {args.turns} turns, {args.users} users, "
        f"{args.kv_cache_memory} of cache a server, {args.rounds} rounds.",
        "",
        *table(("strategy", *Conversations.HEADING), [[name, *each.cells()] for name, each in figures.items()]),
    ]


@dataclass
class Streams:
    """Seconds between tokens of chats, seconds to the first tokens of long prompts, and chats' tokens a second."""

    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    HEADING = ("between tokens p50 (ms)", "p99", "longest", "tokens/s", "long prompt's TTFT p50 (s)")

    def cells(self) -> list[str]:
        first = f"{percentile(self.first, 50):.2f}" if self.first else "–"
        between = [f"{percentile(self.gaps, q) * 1e3:.1f}" for q in (50, 99)]
        return [*between, f"{max(self.gaps) * 1e3:.0f}", f"{self.tokens / self.seconds:.1f}", first]

    async def run(self, router: RunningServer, args: argparse.Namespace, seed: int, *, long: bool) -> None:
        source, ends = random.Random(seed), time.perf_counter() + args.seconds

        async def ask(length: int, max_tokens: int) -> Answer:
            prompt = {"prompt": [source.randrange(100, 40_000) for _ in range(length)], "return_token_ids": True}
            return await stream(router, "/v1/completions", prompt, max_tokens)

        async def chats() -> None:
            while time.perf_counter() < ends:
                times = [at for at in (await ask(64, CHAT_TOKENS)).times if at < ends]
                self.gaps += [late - early for early, late in pairwise(times)]
                self.tokens += len(times)

        async def long_prompts() -> None:
            running: list[asyncio.Future[Answer]] = []
            while long and time.perf_counter() < ends - args.every:
                running.append(asyncio.ensure_future(ask(args.tokens, LONG_ANSWER)))
                await asyncio.sleep(args.every)
            self.first += [answer.ttft for answer in await asyncio.gather(*running)]

        await asyncio.gather(long_prompts(), *(chats() for _ in range(args.streams)))
        self.seconds += args.seconds


def prefill_apart(args: argparse.Namespace) -> list[str]:
    near = ["--kv-demotion", "all", "--kv-host-memory", "512MiB", "--kv-remote-secret", SECRET]
    near += ["--max-model-len", str(args.tokens + 512)]
    figures = {(layout, load): Streams() for load in ("none", "long") for layout in LAYOUTS}
    for number in range(args.rounds):
        for layout, roles in LAYOUTS.items():
            options = [(*near, "--kv-neighbours", f"127.0.0.1:{free_port()}", "--role", role) for role in roles]
            with cluster("prefix", "256MiB", options) as router:
                for load in ("none", "long"):
                    asyncio.run(figures[layout, load].run(router, args, number, long=load == "long"))
    return [
        f"{this_machine.name()}; {args.streams} streams; a prompt of {args.tokens:,} tokens every {args.every:g} s; "
        f"{args.rounds} rounds of {args.seconds:g} s.",
        "",
        *table(("layout", "long prompts", *Streams.HEADING), [[*key, *each.cells()] for key, each in figures.items()]),
    ]


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (heading, ["---"] * len(heading), *rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(required=True, metavar="conversations|prefill_apart")
    mode = modes.add_parser("conversations")
    mode.set_defaults(measure=conversations)
    mode.add_argument("--conversations", type=int, default=12)
    mode.add_argument("--turns", type=int, default=8)
    mode.add_argument("--users", type=int, default=4)
    mode.add_argument("--rounds", type=int, default=1)
    mode.add_argument("--requests", type=int, default=40, help="requests that measure the router's processor time")
    mode.add_argument("--chunks", type=int, default=65, help="tokens of the longer of these")
    mode.add_argument("--kv-cache-memory", default="96MiB")
    mode = modes.add_parser("prefill_apart")
    mode.set_defaults(measure=prefill_apart)
    mode.add_argument("--streams", type=int, default=4)
    mode.add_argument("--tokens", type=int, default=1536, help="of each long prompt")
    mode.add_argument("--every", type=float, default=4.0, help="seconds between long prompts")
    mode.add_argument("--seconds", type=float, default=20.0, help="of each run")
    mode.add_argument("--rounds", type=int, default=2)
    for mode in modes.choices.values():
        mode.add_argument("--out", type=this_machine.output_file)
    args = parser.parse_args()
    found = "\n".join(args.measure(args))
    print(found)
    if args.out is not None:
        args.out.write_text(found + "\n")


if __name__ == "__main__":
    main()
