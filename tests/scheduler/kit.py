"""The harness of scheduler scenarios: a scheduler over a small cache, and a runner that computes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Literal

from octavo.kvcache.block import BlockState
from octavo.logprobs import TokenLogprobs
from octavo.planner.roofline import StepTimes
from octavo.request import PinRequest, Request, Sequence, SequenceStatus
from octavo.scheduler.lifecycle import SchedulerConfig
from octavo.scheduler.plan import SequenceUpdate, StepPlan
from octavo.scheduler.policy import Policy
from octavo.scheduler.preemption import Preemption
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.speculation import Speculator
from octavo.scheduler.step_time import StepLoad
from octavo.scheduler.waiting import Fetching
from tests.kvcache.caches import Clock, make_manager, make_request
from tests.scheduler import beams
from tests.scheduler.results import Draw, result_of

DrawOf = Callable[[Sequence], Draw | int]


def draw_seven(seq: Sequence) -> Draw | int:
    """Token 7, or what the rule of `beams` says."""
    return beams.sample(seq) if seq.request.params.use_beam_search else 7


class Harness:
    """A scheduler, its cache and its runner. Requests arrive one after the other, with prompts that share nothing.

    Args:
        mode: what preemption does with blocks, with `speed` for "auto".
        store: brings prefixes to host memory.
        device: how long steps take; without it, no time passes.
        audits: whether the cache is audited after every step.
        max_tokens: of requests that say nothing else.
        cache: arguments of `make_manager`.

    Attributes:
        plan: the last one taken in.
        seconds: how long each step took.
    """

    def __init__(
        self,
        num_blocks: int = 100,
        block_size: int = 4,
        *,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 200,
        headroom_tokens: int = 0,
        itl_slo_ms: float | None = None,
        policy: Policy | None = None,
        mode: Literal["auto", "recompute", "swap"] = "recompute",
        speed: Preemption | None = None,
        store: Any = None,
        speculator: Speculator | None = None,
        device: StepTimes | None = None,
        by_prefix: bool = False,
        audits: bool = True,
        max_tokens: int = 10,
        **cache: Any,
    ) -> None:
        self.clock = Clock()
        self.kv = make_manager(num_blocks, block_size, clock=self.clock, **cache)
        speed = speed or Preemption()
        speed.mode = mode
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs,
                max_num_batched_tokens,
                max_model_len,
                headroom_tokens=headroom_tokens,
                itl_slo_ms=itl_slo_ms,
            ),
            self.kv,
            policy,
            speed,
            by_prefix=by_prefix,
            fetching=None if store is None else Fetching(self.kv, store, speed),
            speculator=speculator,
        )
        self.device = device
        self.arrivals = itertools.count(1)
        self.plan = StepPlan()
        self.seconds: list[float] = []
        self._audits, self._max_tokens = audits, max_tokens

    @property
    def num_steps(self) -> int:
        return len(self.seconds)

    def request(
        self,
        prompt: int | list[int],
        max_tokens: int | None = None,
        *,
        tenant: str = "",
        weight: float = 1.0,
        priority: int = 0,
        width: int = 0,
        ttl: float | None = None,
        **params: Any,
    ) -> Request:
        """Return a request for a prompt of that many tokens, or of those tokens.

        Args:
            width: number of beams; 0 for none.
            ttl: seconds for which its prompt is pinned.
            params: of its sampling.
        """
        number = next(self.arrivals)
        tokens = [1_000_000 * number + i for i in range(prompt)] if isinstance(prompt, int) else prompt
        if width:
            params = {"n": width, "best_of": width, "use_beam_search": True, **params}
        request = make_request(tokens, tenant=tenant, max_tokens=max_tokens or self._max_tokens, **params)
        request.arrival_time, request.priority, request.weight = float(number), priority, weight
        if width:
            request.eos_token_ids = frozenset({beams.EOS})
        if ttl is not None:
            request.pins = (PinRequest(len(tokens), ttl),)
        return request

    def add(self, prompt: int | list[int], max_tokens: int | None = None, **options: Any) -> Request:
        """Queue a request (see `request`)."""
        request = self.request(prompt, max_tokens, **options)
        self.scheduler.add(request)
        return request

    def step(self, draw: DrawOf = draw_seven) -> StepPlan:
        plan = self.scheduler.schedule()
        assert bool(plan) == self.scheduler.has_work, "whoever has work makes progress"
        self.finish_step(plan, draw)
        return plan

    def finish_step(self, plan: StepPlan, draw: DrawOf = draw_seven) -> list[SequenceUpdate]:
        """Take in the result of a plan."""
        scored = [[TokenLogprobs(-1.0, 1, ())] * len(scores.targets) for scores in plan.scores]
        updates = self.scheduler.update(plan, result_of([draw(seq) for seq in self.scheduler.drawing], scored))
        seconds = 0.0
        if self.device is not None:
            seconds = self.device.predict(StepLoad.of(plan.starts, plan.lengths, num_streams=plan.num_streams))
            self.scheduler.observe(plan, seconds)
        self.plan = plan
        self.seconds.append(seconds)
        if self._audits:
            self.kv.audit()
        return updates

    def steps(self, count: int) -> list[float]:
        """Compute so many steps, and return how long each took."""
        for _ in range(count):
            self.step()
        return self.seconds[-count:]

    def steps_until(self, done: Callable[[], bool], most: int = 20_000) -> int:
        """Compute steps until `done`, and return their number."""
        for count in range(1, most):
            self.step()
            if done():
                return count
        raise AssertionError(f"not done after {most} steps")

    def run(self) -> None:
        """Compute steps until all is done; nobody holds a block then."""
        if self.scheduler.has_work:
            self.steps_until(lambda: not self.scheduler.has_work)
        assert not self.kv.audit()[BlockState.ACTIVE]


def status(request: Request) -> SequenceStatus:
    return request.sequences[0].status


def running(request: Request) -> bool:
    return status(request) is SequenceStatus.RUNNING


def outputs(request: Request) -> list[int]:
    """The number of tokens that each sequence has drawn."""
    return [seq.num_output_tokens for seq in request.sequences]
