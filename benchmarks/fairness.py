"""Tenants that share one server, first come first served and in turns. The real scheduler and KV cache, no model.

    python benchmarks/fairness.py TRACE [--speed 4] [--out benchmarks/results]

TRACE is a CSV file with the columns arrival_s, client, prompt_tokens and output_tokens. A clock of our own counts what
the steps would take, by the law that the scheduler's step-time model found for SmolLM2 on two cores (`device`).

Two scenarios. *Trace*: the file's requests, `--speed` times as fast as they came, so that the server is overloaded.
*Flood*: six tenants of equal weight, each of which asks for a tenth of what the server can do, and one more that asks
for ten times the share that it is due; one of the six is quiet and sends a request every few seconds.

Service is counted here, from what was computed, and not read off the scheduler's own counters: uncached prompt tokens
and twice the tokens drawn, per weight. Tenants are compared while both have requests waiting, over windows of
`--window` seconds: the difference of what two received, over the larger.
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

from octavo.config import EngineConfig
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from octavo.request import Request, RequestId, SequenceId
from octavo.sampling_params import SamplingParams
from octavo.scheduler.assembly import assemble_cache, assemble_scheduler
from octavo.scheduler.plan import StepResult
from octavo.scheduler.step_time import StepLoad

POLICIES = ("fcfs", "vtc", "dlpm")
QUIET, FLOOD = "quiet", "flood"
MAX_MODEL_LEN = 4096


def device(load: StepLoad) -> float:
    """Seconds of a step: SmolLM2-135M (GGUF), 2 cores of an Intel Xeon, before its attention used AMX tiles."""
    return 6.5e-3 + 4e-4 * load.rows + 1e-6 * load.context + 7.5e-7 * load.chunk_work


@dataclass(frozen=True)
class Job:
    """One request of a workload."""

    arrival: float
    tenant: str
    prompt: int
    output: int


@dataclass
class Result:
    """What one policy made of one workload.

    Attributes:
        difference: of service between tenants that both wait throughout a window, median, and the worst.
        ttft_p99: seconds to the first token, by tenant.
        service: received by tenant, at the end of each second.
    """

    policy: str
    tokens_per_s: float = 0.0
    difference: float | None = None
    worst_difference: float | None = None
    windows: int = 0
    preemptions: int = 0
    ttft_p99: dict[str, float] = field(default_factory=dict)
    service: dict[str, list[float]] = field(default_factory=dict)


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
    """Six tenants that ask for a tenth of the capacity each (the quiet one for less), one for ten shares of seven."""

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


class Replay:
    """One workload on one scheduler."""

    def __init__(self, policy: str, arguments: argparse.Namespace) -> None:
        options: dict[str, Any] = {"scheduling_policy": policy, "itl_slo_ms": arguments.itl_slo_ms}
        config = EngineConfig(max_num_seqs=arguments.num_seqs, preemption_mode="recompute", **options)
        spec = KVCacheSpec.build([LayerKVSpec(3, 64, 64)] * 30, 16, "bfloat16")
        self.kv = assemble_cache(config, spec, arguments.num_blocks)
        self.scheduler = assemble_scheduler(config, self.kv, MAX_MODEL_LEN)
        self.result = Result(policy)
        self.window = arguments.window
        self.now = 0.0
        self._service: dict[str, float] = defaultdict(float)
        self._first: dict[str, list[float]] = defaultdict(list)
        self._reached: dict[SequenceId, int] = {}

    def run(self, jobs: list[Job], until: float | None = None) -> Result:
        """Replay the jobs; to their end, or for so many seconds."""
        scheduler, rng = self.scheduler, random.Random(1)
        pending = list(reversed(jobs))
        history: list[dict[str, float]] = []
        waiting: list[set[str]] = []  # in each second, who had something waiting throughout it
        still: set[str] | None = None
        while (pending or scheduler.has_work) and (until is None or self.now < until):
            if not scheduler.has_work:
                self.now = max(self.now, pending[-1].arrival)
            while pending and pending[-1].arrival <= self.now:
                job = pending.pop()
                prompt = [rng.randrange(50_000) for _ in range(job.prompt)]
                params = SamplingParams(max_tokens=job.output, ignore_eos=True)
                name = RequestId(f"r{len(pending)}")
                scheduler.add(Request(name, prompt, params, arrival_time=job.arrival, tenant=job.tenant))
            self._step()
            waits = {request.tenant for request in scheduler.requests if request.num_cached_tokens is None}
            still = waits if still is None else still & waits
            while len(history) < int(self.now):
                history.append(dict(self._service))
                waiting.append(still)
                still = waits
        self.kv.audit()
        self._summarise(history, waiting)
        return self.result

    def _step(self) -> None:
        scheduler = self.scheduler
        plan = scheduler.schedule()
        planned, drawing = scheduler.planned, scheduler.drawing
        load = StepLoad.of(plan.starts, plan.lengths)
        seconds = device(load)
        self.now += seconds
        for seq, start, length in zip(planned, plan.starts, plan.lengths, strict=True):
            # A prompt's tokens, each once however often they are computed.
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

    def _summarise(self, history: list[dict[str, float]], waiting: list[set[str]]) -> None:
        result, span = self.result, self.window
        differences = []
        for start in range(0, len(history) - span, span // 2):
            both = set.intersection(*waiting[start : start + span])
            got = {t: history[start + span - 1].get(t, 0.0) - history[start].get(t, 0.0) for t in both}
            differences += [abs(got[a] - got[b]) / max(got[a], got[b], 1.0) for a, b in combinations(sorted(both), 2)]
        differences.sort()
        if differences:
            result.difference = differences[len(differences) // 2]
            result.worst_difference = differences[-1]
        result.windows = len(differences)
        result.preemptions = self.scheduler.counters.num_preemptions
        result.tokens_per_s = sum(self._service.values()) / self.now
        result.ttft_p99 = {t: sorted(times)[int(0.99 * len(times))] for t, times in self._first.items()}
        result.service = {t: [moment.get(t, 0.0) for moment in history] for t in self._service}


def plot(trace: list[Result], flooded: list[Result], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(POLICIES), figsize=(13, 7), sharex="row", sharey="row")
    for row, results in zip(axes, (trace, flooded), strict=True):
        for axis, result in zip(row, results, strict=True):
            heaviest = sorted(result.service, key=lambda t: -result.service[t][-1])[:8]
            for tenant in heaviest:
                axis.plot(result.service[tenant], label=tenant)
            axis.set(title=f"{'trace' if results is trace else 'flood'}, {result.policy}", xlabel="seconds")
        row[0].set_ylabel("service received")
        row[-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def rows(results: list[Result], tenant: str | None, alone: float | None) -> list[str]:
    lines = [
        "| policy | service between waiting tenants differs, median | worst | windows | preempted | service per s "
        "| of fcfs |" + (f" {tenant}'s p99 TTFT | alone |" if tenant else ""),
        "|---|---:|---:|---:|---:|---:|---:|" + ("---:|---:|" if tenant else ""),
    ]
    for r in results:
        median, worst = ("–" if d is None else f"{d:.1%}" for d in (r.difference, r.worst_difference))
        line = f"| {r.policy} | {median} | {worst} | {r.windows} | {r.preemptions} | {r.tokens_per_s:,.0f} "
        line += f"| {r.tokens_per_s / results[0].tokens_per_s:.3f} |"
        lines.append(line + (f" {r.ttft_p99[tenant]:.2f} s | {alone:.2f} s |" if tenant else ""))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--speed", type=float, default=4.0)
    parser.add_argument("--num-seqs", type=int, default=32)
    parser.add_argument("--num-blocks", type=int, default=2000)
    parser.add_argument("--itl-slo-ms", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=300.0, help="of the flood")
    parser.add_argument("--capacity", type=float, default=1300.0, help="service per second that the flood is sized by")
    parser.add_argument("--window", type=int, default=60)
    parser.add_argument("--out", type=Path, help="folder for fairness.md and fairness.png")
    arguments = parser.parse_args()
    jobs = read_trace(arguments.trace, arguments.speed)
    trace = [Replay(policy, arguments).run(jobs) for policy in POLICIES]
    jobs = flood(arguments.seconds, arguments.capacity, random.Random(0))
    flooded = [Replay(policy, arguments).run(jobs, arguments.seconds) for policy in POLICIES]
    quiet = [job for job in jobs if job.tenant == QUIET]
    alone = Replay("fcfs", arguments).run(quiet).ttft_p99[QUIET]
    lines = [
        "# Tenants that share one server",
        "",
        "`python benchmarks/fairness.py`, the real scheduler on a clock that follows the step-time law of "
        "SmolLM2-135M (GGUF) on 2 cores of an Intel Xeon (Sapphire Rapids class, AMX), KVM. "
        f"{arguments.num_seqs} places, {arguments.num_blocks:,} blocks of 16, "
        f"`--itl-slo-ms {arguments.itl_slo_ms:g}`. Service: uncached prompt "
        f"tokens and twice the tokens drawn. Differences over windows of {arguments.window} s, between tenants that "
        "have requests waiting throughout.",
        "",
        f"## Replay: 27 clients of the VTC paper's trace, {arguments.speed:g} times as fast",
        "",
        *rows(trace, None, None),
        "",
        f"## Flood: seven tenants of equal weight, one asks for ten times its share; {arguments.seconds:.0f} s",
        "",
        *rows(flooded, QUIET, alone),
        "",
        "![Service received over time](fairness.png)",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.out:
        (arguments.out / "fairness.md").write_text(text)
        plot(trace, flooded, arguments.out / "fairness.png")
    results = [{**asdict(r), "service": None} for r in (*trace, *flooded)]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
