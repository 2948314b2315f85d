"""The parts of a scheduler that know what runs and what waits; a restart replaces all of them.

Service ──> Admission ──> Yielding ──> RunningSet, WaitingQueue      each reads and changes those it points to
   │            └──> TenantLimits ──> RunningSet                    floors and caps of tenants
   └── LookAhead: the step after the one in flight
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from octavo.kvcache.manager import KVCacheManager
from octavo.request import Sequence
from octavo.scheduler.admission import Admission
from octavo.scheduler.ahead import LookAhead
from octavo.scheduler.kv_limits import KVLimits, TenantLimits
from octavo.scheduler.latency_target import LatencyTarget
from octavo.scheduler.policy import Policy
from octavo.scheduler.preemption import PreemptionMode
from octavo.scheduler.running import RunningSet
from octavo.scheduler.scheduler_config import SchedulerConfig
from octavo.scheduler.service import Service
from octavo.scheduler.waiting import PrefixLengths, WaitingQueue
from octavo.scheduler.yielding import Yielding


@dataclass(frozen=True, slots=True)
class Parts:
    """One set of parts that work together."""

    running: RunningSet
    tenants: TenantLimits
    waiting: WaitingQueue
    yielding: Yielding
    admission: Admission
    service: Service
    look_ahead: LookAhead


def compose(
    config: SchedulerConfig,
    kv: KVCacheManager,
    policy: Policy,
    mode: PreemptionMode,
    prefixes: PrefixLengths | None,
    *,
    limits: Mapping[str, KVLimits],
    latency: LatencyTarget | None,
    on_leave: Callable[[Sequence], None],
) -> Parts:
    """Return the parts of a scheduler in which nothing runs or waits.

    Args:
        prefixes: if given, waiting requests are ordered by the lengths of cached prefixes.
        limits: tenants' floors and caps.
        latency: the latency target of running streams, if any.
        on_leave: called with each sequence that stops running.
    """
    running = RunningSet(kv, config.headroom_tokens, on_leave=on_leave)
    tenants = TenantLimits(kv, running, limits)
    waiting = WaitingQueue(policy, prefixes, tenants.is_capped)
    yielding = Yielding(kv, running, waiting, mode, policy)
    admission = Admission(
        kv,
        running,
        waiting,
        yielding,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        watermark_blocks=int(config.watermark * kv.pool.num_blocks),
        tenants=tenants,
        policy=policy,
    )
    service = Service(
        kv,
        running,
        waiting,
        yielding,
        admission,
        max_num_batched_tokens=config.max_num_batched_tokens,
        tenants=tenants,
        latency=latency,
        policy=policy,
    )
    look_ahead = LookAhead(
        kv, running, tenants, admission, max_model_len=config.max_model_len, takes_places=policy.may_claim
    )
    return Parts(running, tenants, waiting, yielding, admission, service, look_ahead)
