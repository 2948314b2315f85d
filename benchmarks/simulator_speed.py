"""Measure how fast `octavo simulate` is, and whether its memory grows with the number of requests.

    python -m benchmarks.simulator_speed                            # 100,000 requests, about a minute
    python -m benchmarks.simulator_speed --requests 1000000         # about ten

Requests of 64 input and 32 output tokens arrive at 200 per second at an estimated H100 with Llama 3.1 8B.
`--input-len` and `--output-len` take the values that `octavo simulate` takes. The table has a row for each tenth of the
requests.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

from octavo.config import EngineConfig
from octavo.planner.roofline import find_machine
from octavo.planner.sources import find_shape
from octavo.simulator.questions import Demand
from octavo.simulator.setup import Plan
from octavo.simulator.simulation import Simulation
from octavo.simulator.traffic import SimulatedRequest, Traffic
from octavo.workloads import report

MODEL = "llama-3.1-8b"


class Watched:
    """Traffic that records time and memory at each tenth of it."""

    def __init__(self, traffic: Traffic, count: int) -> None:
        self.rows: list[dict[str, float]] = []
        self._traffic = traffic
        self._tenth = max(1, count // 10)
        self._taken = 0
        self._began, self._cpu = time.perf_counter(), time.process_time()

    def due(self) -> float | None:
        return self._traffic.due()

    def ended(self, request: SimulatedRequest, at: float) -> None:
        self._traffic.ended(request, at)

    def take(self) -> SimulatedRequest:
        self._taken += 1
        if self._taken % self._tenth == 0:
            row = {
                "requests": self._taken,
                "seconds": time.perf_counter() - self._began,
                "cpu_seconds": time.process_time() - self._cpu,
                "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
            self.rows.append(row)
            print(
                f"| {row['requests']:,} | {row['seconds']:.1f} | {row['cpu_seconds']:.1f} "
                f"| {1e3 * row['cpu_seconds'] / row['requests']:.3f} | {row['peak_mib']:.1f} |",
                flush=True,
            )
        return self._traffic.take()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--input-len", default="64")
    parser.add_argument("--output-len", default="32")
    arguments = parser.parse_args()
    config = EngineConfig(model=MODEL, max_model_len=8192)
    plan = Plan(find_shape(MODEL), config, machine=find_machine("h100"))
    demand = Demand(
        count=arguments.requests,
        rate=arguments.rate,
        input_len=arguments.input_len,
        output_len=arguments.output_len,
    )
    machine = report.machine()
    print(f"{arguments.requests:,} requests of {arguments.input_len} tokens in, {arguments.output_len} out, ", end="")
    print(f"{arguments.rate:g} a second; one of {machine['cores']} cores of {machine['cpu']}\n")
    print("| requests | seconds | CPU seconds | ms of it a request | peak MiB |\n|---|---|---|---|---|", flush=True)
    watched = Watched(demand.traffic(), arguments.requests)
    results = Simulation(plan.server(), watched).run()
    print(f"\n{results.steps:,} steps, {results.mean_running:.1f} running on average, {results.evictions:,} evictions")
    print(json.dumps({"rows": watched.rows, "results": results.report()}))


if __name__ == "__main__":
    main()
