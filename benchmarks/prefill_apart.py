"""Time between tokens of running streams while long prompts arrive: prompts computed where they are answered, or apart.

    python -m benchmarks.prefill_apart [--streams 4] [--tokens 1536] [--every 4] [--seconds 20] [--rounds 2]

Two servers of one thread each behind a router, in two layouts, in turn: both answer (`both`), or one computes long
prompts and the other answers (`apart`, --role). Chats of many tokens run all the time; with `long`, a prompt of its own
of --tokens tokens arrives every few seconds and gets eight tokens. Reported are the time between tokens of the chats,
their tokens a second, and the time to the first token of the long prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

from benchmarks import this_machine
from benchmarks.routing import cluster
from octavo.workloads.http import EventLines, PostUrl, post_json
from octavo.workloads.report import percentile
from octavo.workloads.server_process import RunningServer
from tests.ports import free_port

SECRET = "only the servers of this benchmark"
CHAT_TOKENS, LONG_ANSWER = 200, 8
LAYOUTS = {"both": ("both", "both"), "apart": ("prefill", "decode")}


@dataclass
class Figures:
    """Seconds between tokens of chats, seconds to the first tokens of long prompts, and chats' tokens a second."""

    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    def row(self, layout: str, load: str) -> str:
        middle, high = (percentile(self.gaps, share) * 1e3 for share in (50, 99))
        first = f"{percentile(self.first, 50):.2f}" if self.first else "–"
        longest = max(self.gaps) * 1e3
        rate = self.tokens / self.seconds
        return f"| {layout} | {load} | {middle:.1f} | {high:.1f} | {longest:.0f} | {rate:.1f} | {first} |"


@contextmanager
def servers(layout: str, tokens: int) -> Iterator[RunningServer]:
    """A router in front of two servers that hand each other blocks."""
    near = ["--kv-demotion", "all", "--kv-host-memory", "512MiB", "--kv-remote-secret", SECRET]
    near += ["--max-model-len", str(tokens + 512)]
    options = [(*near, "--kv-neighbours", f"127.0.0.1:{free_port()}", "--role", role) for role in LAYOUTS[layout]]
    with cluster("prefix", "256MiB", options) as router:
        yield router


async def stream(url: PostUrl, prompt: list[int], max_tokens: int) -> list[float]:
    """Return the times at which tokens came, the first being that of the request."""
    lines, times = EventLines(), [time.perf_counter()]

    def on_body(piece: bytes, now: float) -> None:
        events = (json.loads(payload) for payload in lines.feed(piece) if payload != b"[DONE]")
        times.extend(now for event in events if event.get("choices"))

    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    status, error = await post_json(url, {}, body, on_body)
    if status != 200 or len(times) < max_tokens // 2:
        raise RuntimeError(f"{status}: {error.decode()}, {len(times)} tokens")
    return times


async def measure(url: PostUrl, args: argparse.Namespace, seed: int, load: str, figures: Figures) -> None:
    source, ends = random.Random(seed), time.perf_counter() + args.seconds

    def prompt(length: int) -> list[int]:
        return [source.randrange(100, 40_000) for _ in range(length)]

    async def chat() -> None:
        while time.perf_counter() < ends:
            times = [at for at in await stream(url, prompt(64), CHAT_TOKENS) if at < ends]
            figures.gaps += [late - early for early, late in pairwise(times[1:])]
            figures.tokens += len(times) - 1

    async def long_prompts() -> None:
        running: list[asyncio.Future[list[float]]] = []
        while load == "long" and time.perf_counter() < ends - args.every:
            running.append(asyncio.ensure_future(stream(url, prompt(args.tokens), LONG_ANSWER)))
            await asyncio.sleep(args.every)
        figures.first += [times[1] - times[0] for times in await asyncio.gather(*running)]

    await asyncio.gather(long_prompts(), *(chat() for _ in range(args.streams)))
    figures.seconds += args.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1536, help="of each long prompt")
    parser.add_argument("--every", type=float, default=4.0, help="seconds between long prompts")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=this_machine.output_file)
    args = parser.parse_args()
    figures = {(layout, load): Figures() for load in ("none", "long") for layout in LAYOUTS}
    for number in range(args.rounds):
        for layout in LAYOUTS:
            with servers(layout, args.tokens) as router:
                url = PostUrl.parse(router.base_url + "/v1/completions")
                for load in ("none", "long"):
                    asyncio.run(measure(url, args, number, load, figures[layout, load]))
    table = [
        f"{this_machine.name()}; {args.streams} streams; a prompt of {args.tokens:,} tokens every {args.every:g} s; "
        f"{args.rounds} rounds of {args.seconds:g} s.",
        "",
        "| layout | long prompts | between tokens p50 (ms) | p99 | longest | tokens/s | long prompt's TTFT p50 (s) |",
        "|---|---|---:|---:|---:|---:|---:|",
        *(each.row(layout, load) for (layout, load), each in figures.items()),
    ]
    print("\n".join(table))
    if args.out is not None:
        args.out.write_text("\n".join(table) + "\n")


if __name__ == "__main__":
    main()
