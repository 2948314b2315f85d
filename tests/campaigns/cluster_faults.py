"""Kill, freeze, cut off, slow down and replace the machines behind a router: no wrong token, no request without an end.

    sudo .venv/bin/python -m tests.campaigns.cluster_faults [--minutes 60] [--seed 0] [--users 6]

Two servers that hand each other blocks and share a Redis, a server of two ranks, and a router, each on a host of its
own (`cluster.py`). Users send requests to the router all the time, under two tenants' keys. A fault follows the other,
in random order. Once one is over (the killed process is ready again, the link is whole):

    within 5 s      each server gets the requests whose prompts it has cached, and the router expects nothing of a
                    killed one that it had before
    when all is idle  no reservation is left at the router, no block is held anywhere, audits pass

Answers are compared with those of the same requests alone and cold. All that was received of one that broke off must be
its beginning. Writes `cluster_faults.md` in the folder of this machine's results; exits with 1 if a check failed.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import httpx

from benchmarks import this_machine
from tests.campaigns.attacks import write_model
from tests.campaigns.cluster import (
    ADMIN_KEY,
    START_SECONDS,
    Cluster,
    Network,
    Server,
    can_isolate,
    counters,
    isolated,
    operate,
)
from tests.campaigns.cluster_clients import CHATML, Question, Reply
from tests.campaigns.cluster_load import TENANTS, Load, references

KEYS = f'[tenants.admin]\nkeys = ["{ADMIN_KEY}"]\nadmin = true\n' + "".join(
    f'[tenants.{name}]\nkeys = ["{name}"]\n' for name in TENANTS
)
RIGHT_SECONDS = 5.0
MODEL = {"initializer_range": 0.3, "hidden_size": 128, "num_hidden_layers": 4, "max_position_embeddings": 2048}
IDLE_SECONDS = 30.0
# More than users' requests occupy at a server: if one is busier by as many blocks, another is rightly chosen.
PROBE_TOKENS = 800
# Share of the processes' faults during which a link fails too.
ALSO = 0.4

Fault = Callable[[Cluster, random.Random], Awaitable[Server | None]]
"""Does harm and undoes it again; returns a server whose memory was lost, if one's was."""


async def _a_while(rng: random.Random) -> None:
    await asyncio.sleep(rng.uniform(0.5, 8))


async def kill_a_server(cluster: Cluster, rng: random.Random) -> Server:
    server = rng.choice(cluster.servers)
    server.kill()
    await asyncio.sleep(rng.choice([0, rng.uniform(0, 4)]))
    server.start()
    return server


async def stop_a_server(cluster: Cluster, rng: random.Random) -> Server:
    """As a rolling update does: it finishes its requests."""
    server = rng.choice(cluster.servers)
    server.send(signal.SIGTERM)
    await asyncio.to_thread(server.wait)
    server.start()
    return server


async def freeze_a_server(cluster: Cluster, rng: random.Random) -> None:
    server = rng.choice(cluster.servers)
    server.freeze()
    await _a_while(rng)
    server.thaw()


async def kill_a_rank(cluster: Cluster, rng: random.Random) -> Server | None:
    """Its group starts again in the same process, as after a failed step."""
    server = cluster.servers[-1]
    if ranks := [pid for pid in server.children() if b"rank" in Path(f"/proc/{pid}/cmdline").read_bytes()]:
        os.kill(ranks[0], signal.SIGKILL)
    await asyncio.sleep(1)
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            await asyncio.to_thread(operate, server, "/debug/kv")  # which the engine's thread answers
            return server
        except httpx.HTTPError:
            if time.monotonic() > until:
                raise


async def kill_the_router(cluster: Cluster, rng: random.Random) -> None:
    cluster.router.kill()
    await asyncio.sleep(rng.uniform(0, 2))
    cluster.router.start()


async def freeze_the_router(cluster: Cluster, rng: random.Random) -> None:
    cluster.router.freeze()
    await _a_while(rng)
    cluster.router.thaw()


async def replace_a_server_unseen(cluster: Cluster, rng: random.Random) -> Server:
    """The router, frozen meanwhile, has an old index and never sees the server down."""
    server = rng.choice(cluster.servers)
    cluster.router.freeze()
    server.kill()
    server.start()
    await asyncio.to_thread(server.wait_ready)
    cluster.router.thaw()
    return server


async def kill_redis(cluster: Cluster, rng: random.Random) -> None:
    """Afterwards it has what it had some time ago, or nothing."""
    redis = cluster.redis
    if rng.random() < 0.7:
        save = [*redis.host.inside, "redis-cli", "-h", redis.host.address, "save"]
        await (await asyncio.create_subprocess_exec(*save, stdout=asyncio.subprocess.DEVNULL)).wait()
        await _a_while(rng)
    redis.kill()
    await asyncio.sleep(rng.uniform(0, 3))
    redis.start()


async def freeze_redis(cluster: Cluster, rng: random.Random) -> None:
    cluster.redis.freeze()
    await _a_while(rng)
    cluster.redis.thaw()


async def cut_a_link(cluster: Cluster, rng: random.Random) -> None:
    host = rng.choice(cluster.all()).host
    host.cut()
    await _a_while(rng)
    host.join()


async def slow_a_link(cluster: Cluster, rng: random.Random) -> None:
    host = rng.choice(cluster.all()).host
    host.slow(rng.choice(["64kbit", "1mbit"]))
    await _a_while(rng)
    host.hurry()


async def part_neighbours(cluster: Cluster, rng: random.Random) -> None:
    """The router reaches both, and they do not reach each other."""
    one, other = rng.sample([server.host for server in cluster.servers[:2]], 2)
    one.part_from(other)
    await _a_while(rng)
    one.meet(other)


PROCESS_FAULTS: list[Fault] = [
    kill_a_server,
    stop_a_server,
    freeze_a_server,
    kill_a_rank,
    kill_the_router,
    freeze_the_router,
    replace_a_server_unseen,
    kill_redis,
    freeze_redis,
]
LINK_FAULTS: list[Fault] = [cut_a_link, slow_a_link, part_neighbours]


@dataclass
class Findings:
    """What a campaign found.

    Attributes:
        right: seconds until requests were routed right again, by fault.
        hits: blocks found, by tier.
    """

    right: dict[str, list[float]] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    hits: Counter[str] = field(default_factory=Counter)
    probes: int = 0
    _last_hits: dict[tuple[str, str], float] = field(default_factory=dict)

    def count_hits(self, server: Server) -> None:
        """Add the blocks that a server has found since the last call, or since its start."""
        for line in operate(server, "/metrics").text.splitlines():
            if line.startswith("octavo:tier_hit_blocks_total"):
                tier, value = line.split('tier="')[1].partition('"')[0], float(line.rpartition(" ")[2])
                before = self._last_hits.get((server.name, tier), 0.0)
                self.hits[tier] += int(value - before if value >= before else value)
                self._last_hits[server.name, tier] = value


class Checks:
    """Looks at the cluster while no user's request runs."""

    def __init__(self, cluster: Cluster, findings: Findings, rng: random.Random) -> None:
        self._cluster = cluster
        self.findings = findings
        self._rng = rng
        self._http = httpx.AsyncClient(timeout=20)

    async def cached(self, server: Server, prompt: list[int]) -> int:
        """Let a server or the router compute a prompt; returns how many of its tokens were cached."""
        self.findings.probes += 1
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
        headers = {"Authorization": f"Bearer {TENANTS[0]}"}
        answer = await self._http.post(f"{server.url}/v1/completions", json=body, headers=headers)
        answer.raise_for_status()
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    def prompt(self) -> list[int]:
        return [self._rng.randrange(3, 240) for _ in range(PROBE_TOKENS)]

    async def wait_for(self, condition: Callable[[], Awaitable[str]], seconds: float) -> str:
        """Return what keeps a condition from holding after so many seconds; nothing if it holds."""
        until = time.monotonic() + seconds
        while True:
            try:
                reason = await condition()
            except httpx.HTTPError as error:
                reason = f"{type(error).__name__}: {error}"
            if not reason or time.monotonic() > until:
                return reason
            await asyncio.sleep(0.05)

    async def is_routed_right(self) -> str:
        """Whether each server gets a prompt that it has just computed; else why not."""
        for server in self._cluster.servers:
            prompt = self.prompt()
            await self.cached(server, prompt)
            await asyncio.sleep(0.2)  # the event of its blocks arrives
            if (found := await self.cached(self._cluster.router, prompt)) < PROBE_TOKENS - 16:
                return f"{found} of {PROBE_TOKENS} tokens that {server.name} has were cached where they were sent"
        return ""

    async def expects_nothing(self, prompt: list[int]) -> str:
        """Whether the router knows that no server has a prompt on its device any more."""
        before = counters(self._cluster.router)["octavo:router_cached_tokens_total"]
        await self.cached(self._cluster.router, prompt)
        after = counters(self._cluster.router)["octavo:router_cached_tokens_total"]
        return f"the router expected {after - before:.0f} tokens of a server that lost them" if after > before else ""

    async def router_is_idle(self) -> str:
        found = counters(self._cluster.router)
        names = ("reservations", "in_flight", "worker_requests")
        return ", ".join(f"{name} {value:.0f}" for name in names if (value := found[f"octavo:router_{name}"]))

    async def is_idle(self, server: Server) -> str:
        """Whether nothing is held anywhere and the accounting is right."""
        kv = operate(server, "/debug/kv").json()
        active, health = kv["bytes"]["active"], operate(server, "/health").json()
        failed = counters(server)["octavo:failed_audits_total"]
        if active or kv["requests"] or health["status"] != "ok" or failed:
            return f"{active} bytes active, {len(kv['requests'])} requests, {health}, {failed:.0f} failed audits"
        return ""


async def meet(cluster: Cluster, load: Load, checks: Checks, faults: tuple[Fault, ...], rng: random.Random) -> None:
    """Inflict faults on the running cluster at once, and check that all is well afterwards."""
    findings, name = checks.findings, " and ".join(map(_named, faults))
    probes = {server.name: checks.prompt() for server in cluster.servers}
    for server in cluster.servers:
        await checks.cached(server, probes[server.name])
        findings.count_hits(server)
    load.resume()
    await asyncio.sleep(rng.uniform(0.2, 2))
    if not {kill_the_router, cut_a_link}.isdisjoint(faults):
        load.unreachable_until = math.inf
    lost, *_ = await asyncio.gather(*(fault(cluster, rng) for fault in faults))
    for server in cluster.all():
        await asyncio.to_thread(server.wait_ready)
    healed = time.monotonic()
    load.unreachable_until = min(load.unreachable_until, healed)
    # Requests that were begun go on meanwhile, new ones do not.
    load.close()
    if reason := await checks.wait_for(checks.is_routed_right, RIGHT_SECONDS):
        findings.violations.append(f"{name}: not routed right after {RIGHT_SECONDS:.0f} s: {reason}")
    findings.right.setdefault(_named(faults[0]), []).append(time.monotonic() - healed)
    await load.drained()
    findings.violations += [f"{name}: {text}" for text in load.faults]
    load.faults.clear()
    if lost is not None and (reason := await checks.expects_nothing(probes[lost.name])):
        findings.violations.append(f"{name}: {reason}")
    if reason := await checks.wait_for(checks.router_is_idle, RIGHT_SECONDS):
        findings.violations.append(f"{name}: at the router {reason}")
    for server in cluster.servers:
        if reason := await checks.wait_for(lambda server=server: checks.is_idle(server), IDLE_SECONDS):  # type: ignore[misc]
            findings.violations.append(f"{name}: at {server.name} {reason}")


async def run(cluster: Cluster, known: list[tuple[Question, Reply]], args: argparse.Namespace) -> tuple[Findings, Load]:
    rng, findings = random.Random(args.seed), Findings()
    load = Load(cluster.router, known, random.Random(args.seed + 1))
    checks = Checks(cluster, findings, rng)
    for server in cluster.all():
        server.start()
    for server in cluster.all():
        await asyncio.to_thread(server.wait_ready)
    if reason := await checks.wait_for(checks.is_routed_right, 60):
        raise SystemExit(f"requests are not routed right before any fault: {reason}")
    users = [asyncio.ensure_future(load.user()) for _ in range(args.users)]
    faults = PROCESS_FAULTS + (LINK_FAULTS if cluster.network.is_isolated else [])
    faults = [fault for fault in faults if not args.only or fault.__name__ in args.only]
    ends = time.monotonic() + 60 * args.minutes
    while time.monotonic() < ends:
        for fault in rng.sample(faults, len(faults)):
            if time.monotonic() > ends:
                break
            known_violations, links = len(findings.violations), []
            if cluster.network.is_isolated and fault in PROCESS_FAULTS and rng.random() < ALSO:
                links.append(rng.choice(LINK_FAULTS))
            await meet(cluster, load, checks, (fault, *links), rng)
            names = " and ".join(map(_named, (fault, *links)))
            print(f"{names}: right after {findings.right[_named(fault)][-1]:.1f} s", flush=True)
            for violation in findings.violations[known_violations:]:
                print(f"  VIOLATION {violation}", flush=True)
    for user in users:
        user.cancel()
    return findings, load


def _named(fault: Fault) -> str:
    return fault.__name__.replace("_", " ")


def report(findings: Findings, load: Load, args: argparse.Namespace, is_isolated: bool) -> str:
    hosts = "network namespaces" if is_isolated else "addresses of the loopback interface; links stay whole"
    lines = [
        "# Faults among servers, router and Redis",
        "",
        f"`python -m tests.campaigns.cluster_faults --minutes {args.minutes:g} --seed {args.seed}`, "
        f"{args.users} users, {this_machine.name()}, {date.today()}. Hosts are {hosts}.",
        *([f"During {ALSO:.0%} of the processes' faults, a link failed too."] * is_isolated),
        "",
        "| fault | times | s until routed right: median | longest |",
        "|---|---:|---:|---:|",
        *(
            f"| {name} | {len(took)} | {statistics.median(took):.1f} | {max(took):.1f} |"
            for name, took in sorted(findings.right.items())
        ),
        "",
        "Three probes for each look alone take about a second.",
        "",
        "| how a request ended | times |",
        "|---|---:|",
        *(f"| {outcome} | {count:,} |" for outcome, count in load.outcomes.most_common()),
        "",
        "Blocks found by tier: "
        + ", ".join(f"{tier} {count:,}" for tier, count in sorted(findings.hits.items()))
        + ".",
        "",
        f"Violations: {len(findings.violations)}.",
        *(f"- {text}" for text in findings.violations),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--users", type=int, default=6)
    parser.add_argument("--questions", type=int, default=120)
    parser.add_argument("--only", nargs="*", help="names of faults, to repeat one")
    parser.add_argument("--logs", type=Path, help="keep the processes' logs in this folder")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    default = this_machine.results_folder() / "cluster_faults.md"
    parser.add_argument("--out", type=this_machine.output_file, default=str(default))
    args = parser.parse_args()
    if not args.inside and can_isolate():
        own = [sys.executable, "-m", "tests.campaigns.cluster_faults", *sys.argv[1:], "--inside"]
        return subprocess.run(isolated(own), check=False).returncode
    with tempfile.TemporaryDirectory(prefix="octavo-cluster-") as temporary:
        folder = args.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        write_model(folder / "model", CHATML, **MODEL)
        (folder / "keys.toml").write_text(KEYS)
        (folder / "keys.toml").chmod(0o600)
        cluster = Cluster(folder, Network(is_isolated=args.inside))
        try:
            findings, load = asyncio.run(run(cluster, references(cluster, args.questions), args))
        finally:
            cluster.close()
    text = report(findings, load, args, cluster.network.is_isolated)
    print(text)
    args.out.write_text(text)
    return int(bool(findings.violations))


if __name__ == "__main__":
    sys.exit(main())
