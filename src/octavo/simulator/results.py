"""The results of a simulation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from octavo.simulator.sketch import Sketch


@dataclass(slots=True)
class TenantResults:
    """One tenant's share of the results."""

    requests: int = 0
    output_tokens: int = 0
    ttft: Sketch = field(default_factory=Sketch)


@dataclass(slots=True)
class Results:
    """Results of a simulation; latencies are in seconds of the virtual clock.

    Attributes:
        refused: requests that this server can never serve.
        clipped: requests cut to max_model_len.
        unstable: the run was stopped early because it could no longer meet its targets.
        arrivals_s: time from the start to the arrival of the last request.
        duration_s: time from the start to the end of the last request.
        busy_s: time spent in steps.
        mean_running: running requests, averaged over `busy_s`.
        mean_usage: share of blocks in use, averaged over `busy_s`.
        wall_s: real time that the simulation took.
        router: how requests were divided among several servers; empty for a single one. Sums are then those of all,
            peaks and means those of one.
        per_replica: requests that each of several servers was sent.
    """

    requests: int = 0
    completed: int = 0
    refused: int = 0
    clipped: int = 0
    unstable: bool = False
    arrivals_s: float = 0.0
    duration_s: float = 0.0
    busy_s: float = 0.0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    moved_blocks: int = 0
    evictions: int = 0
    peak_running: int = 0
    peak_waiting: int = 0
    mean_running: float = 0.0
    mean_usage: float = 0.0
    wall_s: float = 0.0
    ttft: Sketch = field(default_factory=Sketch)
    itl: Sketch = field(default_factory=Sketch)
    e2e: Sketch = field(default_factory=Sketch)
    tenants: dict[str, TenantResults] = field(default_factory=dict)
    router: str = ""
    per_replica: list[int] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Share of the admitted prompts' tokens that were found in the prefix cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def unqueued_s(self) -> float:
        """About what a request takes without a queue: the shortest time to first token, and the mean time after it."""
        return self.ttft.percentile(0) + self.e2e.mean - self.ttft.mean

    def per_second(self, count: float) -> float:
        return count / self.duration_s if self.duration_s else 0.0

    def report(self) -> dict[str, Any]:
        """Return the figures as JSON-ready values, with the names that `octavo bench serve` uses."""
        figures: dict[str, Any] = {
            "requests": self.requests,
            "completed": self.completed,
            "refused": self.refused,
            "clipped": self.clipped,
            "unstable": self.unstable,
            "arrivals_s": round(self.arrivals_s, 3),
            "duration_s": round(self.duration_s, 3),
            "busy_share": round(self.per_second(self.busy_s) / max(1, len(self.per_replica)), 4),
            "steps": self.steps,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "hit_rate": round(self.hit_rate, 4),
            "output_tokens": self.output_tokens,
            "requests_s": round(self.per_second(self.completed), 3),
            "output_tok_s": round(self.per_second(self.output_tokens), 2),
            "total_tok_s": round(self.per_second(self.prompt_tokens + self.output_tokens), 2),
            "preemptions": self.preemptions,
            "recomputed_tokens": self.recomputed_tokens,
            "moved_blocks": self.moved_blocks,
            "evictions": self.evictions,
            "peak_running": self.peak_running,
            "peak_waiting": self.peak_waiting,
            "mean_running": round(self.mean_running, 2),
            "mean_kv_usage": round(self.mean_usage, 4),
            "ttft_ms": self.ttft.summary(1000.0),
            "itl_ms": self.itl.summary(1000.0),
            "e2e_ms": self.e2e.summary(1000.0),
            "simulated_in_s": round(self.wall_s, 2),
        }
        if self.router:
            figures["router"], figures["servers"] = self.router, len(self.per_replica)
            figures["requests_of_a_server"] = {"min": min(self.per_replica), "max": max(self.per_replica)}
        if len(self.tenants) > 1:
            figures["tenants"] = {
                name: {
                    "requests": tenant.requests,
                    "output_tokens": tenant.output_tokens,
                    "ttft_p50_ms": round(1e3 * tenant.ttft.percentile(50), 3) if tenant.ttft.count else None,
                    "ttft_p99_ms": round(1e3 * tenant.ttft.percentile(99), 3) if tenant.ttft.count else None,
                }
                for name, tenant in sorted(self.tenants.items())
            }
        return figures
