"""Tenants that share one server, under each scheduling policy. The real scheduler and KV cache, no model.

    octavo calibrate-speed --out SPEED
    python -m benchmarks.fairness TRACE --device SPEED [--speed 4] [--out FOLDER]

TRACE is a CSV file with the columns arrival_s, client, prompt_tokens and output_tokens. A virtual clock counts the time
that the steps would take, by the step times that `octavo calibrate-speed` measured.

Four scenarios. *Trace*: the file's requests, `--speed` times as fast as they came, so that the server is overloaded.
*Flood*: six tenants of equal weight, each of which requests a tenth of the server's capacity (the quiet one a
fortieth), and one more that requests ten times its share. *Weights*: tenants with the weights 1, 1, 2 and 4, who all
request more than their share, one with long prompts, one with long outputs. *Tight*: the same in a pool that one of the
largest requests nearly fills.

Service is counted here, from what was computed, rather than taken from the scheduler's own counters: uncached prompt
tokens plus twice the tokens drawn, per weight. Two tenants are compared while both have requests waiting: the
difference between what they received, divided by the larger. A window must be so long that one request more or less is
a small part of it; otherwise the figure shows how large requests are, not how fair the scheduler is. Here it lasts
until the two were served ten times the largest request of the workload, on average. Windows of fixed length are shown
as well.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks import this_machine
from octavo.config import EngineConfig
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from octavo.request import Request, RequestId, SequenceId
from octavo.sampling_params import SamplingParams
from octavo.scheduler.assembly import assemble_cache, assemble_scheduler
from octavo.scheduler.plan import StepResult
from octavo.scheduler.step_time import StepLoad
from octavo.simulator.speed import Speed

POLICIES = ("fcfs", "vtc")
QUIET, FLOOD = "quiet", "flood"
MAX_MODEL_LEN = 4096


@dataclass(frozen=True)
class Job:
    """One request of a workload."""

    arrival: float
    tenant: str
    prompt: int
    output: int
    weight: float = 1.0

    @property
    def service(self) -> float:
        """Its cost, per weight."""
        return (self.prompt + 2 * self.output) / self.weight


@dataclass
class Result:
    """How one policy served one workload.

    Attributes:
        differences: of service between tenants that both wait throughout a window of fixed length; sorted.
        due: the same over windows in which the two were served ten times the largest request.
        ttft_p99: seconds to the first token, by tenant.
    """

    policy: str
    tokens_per_s: float = 0.0
    differences: list[float] = field(default_factory=list)
    due: list[float] = field(default_factory=list)
    preemptions: int = 0
    recomputed: int = 0
    ttft_p99: dict[str, float] = field(default_factory=dict)


def read_trace(path: Path, speed: float) -> list[Job]:
    with path.open() as file:
        rows = list(csv.DictReader(file))
    jobs = [
        Job(
            float(r["arrival_s"]) / speed, r["client"], max(1, int(r["prompt_tokens"])), max(1, int(r["output_tokens"]))
        )
        for r in rows
    ]
    return sorted((job for job in jobs if job.prompt + job.output <= MAX_MODEL_LEN), key=lambda job: job.arrival)


def flood(seconds: float, capacity: float, rng: random.Random) -> list[Job]:
    """Six tenants that request a tenth of the capacity each (the quiet one less), and one ten times its share."""

    def stream(tenant: str, service_per_s: float) -> list[Job]:
        jobs, now = [], 0.0
        while now < seconds:
            prompt, output = rng.randint(50, 500), rng.randint(20, 200)
            now += rng.expovariate(service_per_s / (prompt + 2 * output))
            jobs.append(Job(now, tenant, prompt, output))
        return jobs

    tenants = [stream(f"t{i}", capacity / 10) for i in range(5)]
    quiet = stream(QUIET, capacity / 40)
    return sorted(sum(tenants, quiet + stream(FLOOD, 10 * capacity / 7)), key=lambda job: job.arrival)


def weighted(seconds: float, capacity: float, rng: random.Random, longest: int) -> list[Job]:
    """Four tenants with the weights 1, 1, 2 and 4 that request three times their share."""
    shapes = {
        "chat 1": (1.0, (50, 400), (50, 300)),
        "long prompts 1": (1.0, (longest // 2, longest - 100), (20, 100)),
        "long outputs 2": (2.0, (20, 100), (200, 600)),
        "chat 4": (4.0, (50, 400), (50, 300)),
    }
    jobs = []
    for tenant, (weight, prompts, outputs) in shapes.items():
        now, total = 0.0, sum(weight for weight, _, _ in shapes.values())
        while now < seconds:
            job = Job(now, tenant, rng.randint(*prompts), rng.randint(*outputs), weight)
            jobs.append(job)
            now += job.service * total / (3 * capacity)
    return sorted(jobs, key=lambda job: job.arrival)


class Replay:
    """One workload on one scheduler."""

    def __init__(
        self, policy: str, arguments: argparse.Namespace, num_blocks: int | None = None, slo: float | None = None
    ) -> None:
        options: dict[str, Any] = {"scheduling_policy": policy, "itl_slo_ms": slo or arguments.itl_slo_ms}
        config = EngineConfig(max_num_seqs=arguments.num_seqs, preemption_mode="recompute", **options)
        spec = KVCacheSpec.build([LayerKVSpec(3, 64, 64)] * 30, 16, "bfloat16")
        self.kv = assemble_cache(config, spec, num_blocks or arguments.num_blocks)
        self.scheduler = assemble_scheduler(config, self.kv, MAX_MODEL_LEN)
        self.result = Result(policy)
        self.window = arguments.window
        self._device = Speed.read(arguments.device).times.predict
        self.now = 0.0
        self._service: dict[str, float] = defaultdict(float)
        self._first: dict[str, list[float]] = defaultdict(list)
        self._reached: dict[SequenceId, int] = {}

    def run(self, jobs: list[Job], until: float | None = None) -> Result:
        """Replay the jobs to their end, or for `until` seconds."""
        scheduler, rng = self.scheduler, random.Random(1)
        weights = {job.tenant: job.weight for job in jobs}
        pending = list(reversed(jobs))
        history: list[dict[str, float]] = []
        waiting: list[set[str]] = []  # in each second, the tenants that had requests waiting throughout it
        still: set[str] | None = None
        while (pending or scheduler.has_work) and (until is None or self.now < until):
            if not scheduler.has_work:
                self.now = max(self.now, pending[-1].arrival)
            while pending and pending[-1].arrival <= self.now:
                job = pending.pop()
                prompt = [rng.randrange(50_000) for _ in range(job.prompt)]
                params = SamplingParams(max_tokens=job.output, ignore_eos=True)
                name = RequestId(f"r{len(pending)}")
                request = Request(name, prompt, params, arrival_time=job.arrival, tenant=job.tenant)
                request.weight = job.weight
                scheduler.add(request)
            self._step()
            waits = {request.tenant for request in scheduler.requests if request.num_cached_tokens is None}
            still = waits if still is None else still & waits
            while len(history) < int(self.now):
                history.append({tenant: got / weights[tenant] for tenant, got in self._service.items()})
                waiting.append(still)
                still = waits
        self.kv.audit()
        self._summarise(history, waiting, 10 * max(job.service for job in jobs))
        return self.result

    def _step(self) -> None:
        scheduler = self.scheduler
        plan = scheduler.schedule()
        planned, drawing = scheduler.planned, scheduler.drawing
        load = StepLoad.of(plan.starts, plan.lengths)
        seconds = self._device(load)
        self.now += seconds
        for seq, start, length in zip(planned, plan.starts, plan.lengths, strict=True):
            # A prompt's tokens count once, however often they are computed.
            before = self._reached.get(seq.seq_id, start)
            reached = min(start + length, seq.num_prompt_tokens)
            self._service[seq.request.tenant] += max(0, reached - before)
            self._reached[seq.seq_id] = max(before, reached)
        for seq in drawing:
            self._service[seq.request.tenant] += 2
            if not seq.num_output_tokens:
                self._first[seq.request.tenant].append(self.now - seq.request.arrival_time)
        scheduler.update(plan, StepResult((7,) * plan.num_draws))
        scheduler.observe(plan, seconds)

    def _summarise(self, history: list[dict[str, float]], waiting: list[set[str]], due: float) -> None:
        result, span = self.result, self.window
        for start in range(0, len(history) - span, span // 2):
            both = set.intersection(*waiting[start : start + span])
            result.differences += [difference(history, start, start + span - 1, *two) for two in combinations(both, 2)]
        for a, b in combinations(sorted({tenant for moment in waiting for tenant in moment}), 2):
            start = 0
            for end in range(len(history)):
                if not {a, b} <= waiting[end]:
                    start = end + 1
                elif sum(history[end].get(t, 0.0) - history[start].get(t, 0.0) for t in (a, b)) >= 2 * due:
                    result.due.append(difference(history, start, end, a, b))
                    start = end
        result.differences.sort()
        result.due.sort()
        result.preemptions = self.scheduler.counters.num_preemptions
        result.recomputed = self.scheduler.counters.recomputed_tokens
        result.tokens_per_s = sum(self._service.values()) / self.now
        result.ttft_p99 = {t: sorted(times)[int(0.99 * len(times))] for t, times in self._first.items()}


def difference(history: list[dict[str, float]], start: int, end: int, a: str, b: str) -> float:
    """The difference between what two tenants received from `start` to `end`, divided by the larger."""
    got = [history[end].get(tenant, 0.0) - history[start].get(tenant, 0.0) for tenant in (a, b)]
    return abs(got[0] - got[1]) / max(*got, 1.0)


def median_and_worst(differences: list[float]) -> str:
    """Return two cells of a table; a run may be too short for any window."""
    return f"{differences[len(differences) // 2]:.1%} | {differences[-1]:.1%}" if differences else "– | –"


def rows(results: list[Result], tenant: str | None = None, alone: float | None = None) -> list[str]:
    lines = [
        "| policy | waiting tenants differ, median | worst | windows | in 60 s, median | worst | windows | preempted "
        "| tokens recomputed | service per s | of fcfs |" + (f" {tenant}'s p99 TTFT | alone |" if tenant else ""),
        "|---|" + "---:|" * (12 if tenant else 10),
    ]
    for r in results:
        line = f"| {r.policy} |"
        for differences in (r.due, r.differences):
            line += f" {median_and_worst(differences)} | {len(differences)} |"
        line += f" {r.preemptions} | {r.recomputed:,} | {r.tokens_per_s:,.0f} |"
        line += f" {r.tokens_per_s / results[0].tokens_per_s:.3f} |"
        lines.append(line + (f" {r.ttft_p99[tenant]:.2f} s | {alone:.2f} s |" if tenant else ""))
    return lines


def device_of(arguments: argparse.Namespace) -> str:
    speed = Speed.read(arguments.device)
    rows = ", ".join(f"{rows} rows {speed.times.predict(StepLoad(rows)) * 1e3:.1f} ms" for rows in (1, 32, 512))
    return f"{speed.origin.removeprefix('measured: ')} ({rows})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--speed", type=float, default=4.0)
    parser.add_argument("--device", type=Path, required=True, help="step times, from `octavo calibrate-speed`")
    parser.add_argument("--num-seqs", type=int, default=32)
    parser.add_argument("--num-blocks", type=int, default=2000)
    parser.add_argument("--tight-blocks", type=int, default=140, help="of the tight pool")
    parser.add_argument("--itl-slo-ms", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=600.0, help="of the flood; weights last half as long")
    parser.add_argument("--capacity", type=float, default=1300.0, help="service per second that the flood is sized by")
    parser.add_argument("--window", type=int, default=60)
    parser.add_argument("--out", type=this_machine.output_folder, help="folder for fairness.md")
    arguments = parser.parse_args()

    def replay(jobs: list[Job], until: float | None = None, **options: Any) -> list[Result]:
        return [Replay(policy, arguments, **options).run(jobs, until) for policy in POLICIES]

    scenarios = {"trace": replay(read_trace(arguments.trace, arguments.speed))}
    jobs = flood(arguments.seconds, arguments.capacity, random.Random(0))
    scenarios["flood"] = replay(jobs, arguments.seconds)
    slack = 1.5 * arguments.itl_slo_ms
    slower = replay(jobs, arguments.seconds, slo=slack)
    alone = Replay("fcfs", arguments).run([job for job in jobs if job.tenant == QUIET]).ttft_p99[QUIET]
    half = arguments.seconds / 2
    jobs = weighted(half, 2000.0, random.Random(0), 1000)
    scenarios["weights"] = replay(jobs, half)
    jobs = weighted(half, 1000.0, random.Random(0), 16 * arguments.tight_blocks - 200)
    scenarios["tight"] = replay(jobs, half, num_blocks=arguments.tight_blocks)
    lines = [
        "# Tenants that share one server",
        "",
        "`python -m benchmarks.fairness`, the real scheduler on a clock that follows the step times of "
        f"{device_of(arguments)}. "
        f"{arguments.num_seqs} places, {arguments.num_blocks:,} blocks of 16, "
        f"`--itl-slo-ms {arguments.itl_slo_ms:g}`. Service: uncached prompt tokens and twice the tokens drawn, per "
        "weight. Two tenants are compared while both have requests waiting, over windows in which they were served ten "
        f"times the largest request of the workload, on average; beside them over {arguments.window} s.",
        "",
        f"## Trace: 27 clients of the VTC paper's trace, {arguments.speed:g} times as fast",
        "",
        *rows(scenarios["trace"]),
        "",
        f"## Flood: seven tenants of equal weight, one asks for ten times its share; {arguments.seconds:.0f} s",
        "",
        *rows(scenarios["flood"], QUIET, alone),
        "",
        f"The same with `--itl-slo-ms {slack:g}`, which leaves prompts more of each step:",
        "",
        *rows(slower, QUIET, alone),
        "",
        f"## Weights: four tenants of the weights 1, 1, 2 and 4, all overloaded; {half:.0f} s",
        "",
        *rows(scenarios["weights"]),
        "",
        f"## Tight: the same with {arguments.tight_blocks} blocks, which one of the longest prompts nearly fills",
        "",
        *rows(scenarios["tight"]),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.out:
        (arguments.out / "fairness.md").write_text(text)
    results = [asdict(r) for found in scenarios.values() for r in found]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
