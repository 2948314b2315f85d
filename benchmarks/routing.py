"""Two servers of one thread each behind a router: what prefill apart gains, and what the simulator predicts.

    python -m benchmarks.routing prefill_apart [--rounds 2] [--streams 4] [--tokens 1536] [--every 4] [--seconds 20]
    python -m benchmarks.routing simulated [--rounds 4] [--seconds 45] [--share 0.4] [--alone 20]

prefill_apart   chats of many tokens run all the time, and a long prompt arrives every few seconds. Both servers answer
                (`both`), or one computes long prompts and the other answers (`apart`, --role). Shows the time between
                the chats' tokens, their tokens a second, and the long prompts' TTFT.
simulated       conversations at times of their own, at a share of what the servers can do, against `octavo simulate`.
                Each round has other conversations. It is simulated with step times fitted to the other rounds, so that
                the machine's drift is in both; what router and client add comes from requests sent alone. The share is
                that of servers that compute alone; both at once take longer.

Servers and router are started anew for each layout, and every round does the same work under each in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from benchmarks import this_machine
from benchmarks.simulator_loads import MODEL, open_traffic
from octavo import EngineConfig
from octavo.planner.sources import find_shape
from octavo.scheduler.plan_log import read_plans
from octavo.simulator.calibration import DISTURBED, Sent, overheads, run_load, warm_up
from octavo.simulator.fleet import Fleet
from octavo.simulator.options import FleetOptions
from octavo.simulator.results import Results
from octavo.simulator.setup import Plan
from octavo.simulator.sketch import Sketch
from octavo.simulator.speed import Speed, speed_of_plans
from octavo.workloads.http import EventLines, PostUrl, post_json
from octavo.workloads.processor_time import ProcessorTime
from octavo.workloads.report import percentile
from octavo.workloads.server_process import RunningServer, fetch_json, running_server
from octavo.workloads.serving import RequestRecord, Target
from octavo.workloads.workload import END_TOKEN_ID, BenchRequest, random_token_ids
from tests.ports import free_port

LAYOUTS = {"both": ("both", "both"), "apart": ("prefill", "decode")}
KEY, SECRET = "benchmark-router-key", "only the servers of this benchmark"
GREEDY = {"temperature": 0, "repetition_penalty": 1, "frequency_penalty": 0, "ignore_eos": True}
CHAT_TOKENS, LONG_ANSWER, DRAWS = 200, 8, 5
MOST_BUSY = 0.6

Cluster = tuple[RunningServer, list[RunningServer]]
Load = tuple[list[BenchRequest], list[float]]  # and when each is sent


@contextmanager
def cluster(strategy: str, memory: str, options: Sequence[Sequence[str]] = ((), ())) -> Iterator[Cluster]:
    """A router and the servers behind it; `options` are those of each server."""
    with ExitStack() as stack:
        servers: list[RunningServer] = []
        for own in options:
            addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
            events = {"enable_kv_cache_events": True, "endpoint": addresses[0], "replay_endpoint": addresses[1]}
            serving = ("--num-threads", "1", "--kv-cache-memory", memory, "--router-key", KEY, "--no-access-log")
            arguments = (*serving, *own, "--kv-events-config", json.dumps(events))
            servers.append(stack.enter_context(running_server(arguments)))
        named = [argument for server in servers for argument in ("--worker", server.base_url)]
        command = (sys.executable, "-m", "octavo", "route")
        routing = ("--router-key", KEY, "--strategy", strategy, "--no-access-log")
        router = stack.enter_context(running_server((*named, *routing), command))
        while fetch_json(router.base_url + "/health")["workers"] < len(servers):
            time.sleep(0.1)
        yield router, servers


@dataclass
class Answer:
    """A streamed answer: when it was asked for, and when each piece of it came."""

    sent: float
    times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent


async def stream(router: RunningServer, prompt: list[int], max_tokens: int) -> Answer:
    """Stream a greedy answer of that many tokens; raises RuntimeError if it is refused or has no token."""
    lines, answer = EventLines(), Answer(time.perf_counter())

    def on_body(piece: bytes, now: float) -> None:
        for payload in lines.feed(piece):
            event = {} if payload == b"[DONE]" else json.loads(payload)
            if any(choice.get("token_ids") for choice in event.get("choices", ())):
                answer.times.append(now)

    body = {"prompt": prompt, **GREEDY, "max_tokens": max_tokens, "stream": True, "return_token_ids": True}
    status, error = await post_json(PostUrl.parse(router.base_url + "/v1/completions"), {}, body, on_body)
    if status != 200 or not answer.times:
        raise RuntimeError(f"{status}: {error.decode()}")
    return answer


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
            return await stream(router, [source.randrange(100, 40_000) for _ in range(length)], max_tokens)

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
            with cluster("prefix", "256MiB", options) as (router, _):
                for load in ("none", "long"):
                    asyncio.run(figures[layout, load].run(router, args, number, long=load == "long"))
    return [
        f"{this_machine.name()}; {args.streams} streams; a prompt of {args.tokens:,} tokens every {args.every:g} s; "
        f"{args.rounds} rounds of {args.seconds:g} s.",
        "",
        *table(("layout", "long prompts", *Streams.HEADING), [[*key, *each.cells()] for key, each in figures.items()]),
    ]


def conversations_at(seed: int, seconds: float, rate: float) -> Load:
    """Return requests of conversations, of which `rate` a second begin, and their times: four turns each.

    A turn's prompt is the last one's, as many other tokens as it was answered with, and a question.
    """
    source, timed = random.Random(seed), list[tuple[float, BenchRequest]]()
    begins = 0.0
    while (begins := begins + source.expovariate(rate)) < seconds:
        at, prompt = begins, random_token_ids(source, source.randint(150, 450))
        for _ in range(4):
            answer = source.randint(8, 40)
            timed.append((at, BenchRequest(prompt, answer)))
            prompt = prompt + random_token_ids(source, answer + source.randint(20, 60))
            at += 1.0 + source.expovariate(0.5)
    timed.sort(key=lambda each: each[0])
    return [request for _, request in timed], [at for at, _ in timed]


def sent_alone(target: Target, count: int) -> list[Sent]:
    """Send prompts of many lengths, each to idle servers."""
    source, sent = random.Random(0), list[Sent]()
    for _ in range(count):
        time.sleep(source.uniform(0.1, 0.5))
        prompt = random_token_ids(source, source.randint(20, 600))
        zero, (record,) = run_load(target, [BenchRequest(prompt, 8)], [0.0])
        if record.error is not None:
            raise RuntimeError(f"a request of the calibration failed: {record.error}")
        sent.append(Sent("paused", zero + record.sent_s, zero + record.chunk_times[0]))
    return sent


def simulations(speed: Speed, load: Load, draws: int = DRAWS) -> list[Results]:
    """Simulate requests at their times several times, with other draws of single steps' times."""
    plan = Plan(find_shape(MODEL), EngineConfig(model=MODEL), speed, fleet=FleetOptions(replicas=2))
    found = []
    for draw in range(draws):
        servers = plan.servers()
        for server in servers:
            server.seed += len(servers) * draw
        found.append(Fleet(servers, open_traffic(*load), "prefix").run())
    return found


@dataclass
class Round:
    """Requests that were sent to the servers, the span of time that they took, and their simulations."""

    load: Load
    span: tuple[float, float]
    records: list[RequestRecord]
    found: list[Results] = field(default_factory=list)


def run_rounds(target: Target, servers: Sequence[RunningServer], loads: Sequence[Load]) -> list[Round]:
    """Send loads to servers, each to empty caches."""
    rounds = []
    for load in loads:
        for server in servers:
            url, headers = server.base_url + "/reset_prefix_cache", {"Authorization": f"Bearer {KEY}"}
            urllib.request.urlopen(urllib.request.Request(url, headers=headers, method="POST")).close()
        zero, records = run_load(target, *load)
        if failed := [record.error for record in records if record.error is not None]:
            raise RuntimeError(f"{len(failed)} of {len(records)} requests failed: {failed[0]}")
        rounds.append(Round(load, (zero, zero + max(record.finished_s for record in records)), records))
    return rounds


@contextmanager
def recorded(plans: Sequence[str], memory: str) -> Iterator[Cluster]:
    """A cluster whose servers record their plans, and have been warmed up."""
    options = [("--record-plans", path, "--max-model-len", "2048", "--admin-key", KEY) for path in plans]
    with cluster("prefix", memory, options) as (router, servers):
        warm_up(Target(router.base_url, MODEL), 2048, END_TOKEN_ID)
        yield router, servers


def simulated(args: argparse.Namespace) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        # A recording is complete once its server has ended.
        before, plans = ([str(Path(folder) / f"{when}{number}") for number in range(2)] for when in ("before", "plans"))
        with recorded(before, args.kv_cache_memory) as (router, _):
            began = time.perf_counter()
            sent = sent_alone(Target(router.base_url, MODEL), args.alone)
        intake, reply = overheads([[step for step in read_plans(path) if step.at >= began] for path in before], sent)
        rate = rate_at(args.share, speed_of_plans(before, since=began), args.seconds)
        with recorded(plans, args.kv_cache_memory) as (router, servers):
            processors = ProcessorTime()
            loads = [conversations_at(seed, args.seconds, rate) for seed in range(args.rounds)]
            rounds = run_rounds(Target(router.base_url, MODEL), servers, loads)
            shares = processors.shares()
        for each in rounds:
            speed = speed_of_plans(plans, since=rounds[0].span[0], left_out=[each.span])
            each.found = simulations(replace(speed, intake_s=intake, reply_s=reply), each.load)
        steps = [step for path in plans for step in read_plans(path) if step.at >= rounds[0].span[0]]
    records = [record for each in rounds for record in each.records]
    busy = sum(step.seconds for step in steps) / sum(end - start for start, end in (each.span for each in rounds)) / 2
    results = [result for each in rounds for result in each.found]
    predicted = statistics.mean(result.report()["busy_share"] for result in results)
    taken = 0.0 if shares is None else shares.taken
    is_valid = busy <= MOST_BUSY and taken <= DISTURBED
    ttft, simulated_ttft = [record.chunk_times[0] - record.sent_s for record in records], Sketch()
    for result in results:
        simulated_ttft.merge(result.ttft)
    hits = sum(record.cached_tokens for record in records) / sum(record.prompt_tokens for record in records)
    rows = []
    for q in (50, 90):
        real, model = percentile(ttft, q), simulated_ttft.percentile(q)
        rows.append([f"TTFT p{q}", f"{real * 1e3:.0f} ms", f"{model * 1e3:.0f} ms", f"{model / real - 1:+.1%}", "15 %"])
    model = sum(result.cached_tokens for result in results) / sum(result.prompt_tokens for result in results)
    rows.append(["hit rate", f"{hits:.1%}", f"{model:.1%}", f"{100 * (model - hits):+.1f} points", "2 points"])
    return [
        f"{this_machine.name()}; {len(records)} requests of conversations in {args.rounds} rounds of {args.seconds:g} "
        f"s at two servers with {args.kv_cache_memory} of cache each, which compute {busy:.0%} of the time, simulated "
        f"ones {predicted:.0%}; router and client add {(intake + reply) * 1e3:.1f} ms; {DRAWS} simulations of each "
        "round.",
        "",
        f"Other programs took {taken:.0%} of the processors. {'Valid' if is_valid else 'Not valid'}: at most "
        f"{DISTURBED:.0%}, and servers that compute at most {MOST_BUSY:.0%} of the time, are wanted.",
        "",
        *table(("figure", "real", "simulated", "difference", "wanted within"), rows),
    ]


def rate_at(share: float, speed: Speed, seconds: float) -> float:
    """Return how many conversations a second keep the servers busy for a share of the time."""
    rate, found = 0.25, 0.0
    while found < share:
        rate *= 1.1 if found > 0.7 * share else 1.5
        found = simulations(speed, conversations_at(2, seconds, rate), draws=1)[0].report()["busy_share"]
    return rate


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (heading, ["---"] * len(heading), *rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(required=True, metavar="prefill_apart|simulated")
    mode = modes.add_parser("prefill_apart")
    mode.set_defaults(measure=prefill_apart)
    mode.add_argument("--streams", type=int, default=4)
    mode.add_argument("--tokens", type=int, default=1536, help="of each long prompt")
    mode.add_argument("--every", type=float, default=4.0, help="seconds between long prompts")
    mode.add_argument("--seconds", type=float, default=20.0, help="of each run")
    mode.add_argument("--rounds", type=int, default=2)
    mode = modes.add_parser("simulated")
    mode.set_defaults(measure=simulated)
    mode.add_argument("--rounds", type=int, default=4)
    mode.add_argument("--seconds", type=float, default=45.0, help="of each round")
    mode.add_argument("--alone", type=int, default=20, help="requests that are sent to idle servers before")
    mode.add_argument("--share", type=float, default=0.4, help="of the servers' time that the runs are to take")
    mode.add_argument("--kv-cache-memory", default="96MiB")
    for mode in modes.choices.values():
        mode.add_argument("--out", type=this_machine.output_file)
    args = parser.parse_args()
    found = "\n".join(args.measure(args))
    print(found)
    if args.out is not None:
        args.out.write_text(found + "\n")


if __name__ == "__main__":
    main()
