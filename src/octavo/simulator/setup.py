"""Build a simulated server, with the cache and scheduler that `octavo serve` would build from the same options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.kvcache.spec import KVCacheSpec
from octavo.option import options_of
from octavo.planner.calculator import PoolSize, counted_dtype, weight_bytes
from octavo.planner.machine import CPU_MEMORY_SHARE
from octavo.planner.model_shape import ModelShape, divide
from octavo.planner.roofline import Machine, read_under, roofline, windows_of
from octavo.planner.sizing import UNLIMITED, Sizing
from octavo.scheduler.assembly import assemble_cache, assemble_scheduler, make_speculator
from octavo.scheduler.preemption import Preemption
from octavo.simulator.acceptance import Output, RecordedDrafts
from octavo.simulator.leaps import Leaps
from octavo.simulator.links import LinkedMemory, NeighbourStore
from octavo.simulator.options import FleetOptions
from octavo.simulator.simulation import SimulatedServer, VirtualClock
from octavo.simulator.speed import ESTIMATED, Speed
from octavo.tiers.lower import LowerTiers

# Rows of the step from which the cost of recomputing a token is taken, as in the engine.
_RESTORED = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """The setup of a simulation: a model, engine options, and a machine whose speed is measured or estimated.

    Attributes:
        speed: the measured speed; None to estimate it from `machine`.
        drafts: of recorded outputs, if the server speculates (`acceptance.py`).
    """

    shape: ModelShape
    config: EngineConfig
    speed: Speed | None = None
    machine: Machine | None = None
    fleet: FleetOptions = field(default_factory=FleetOptions)
    drafts: tuple[Output, ...] = ()

    def __post_init__(self) -> None:
        if self.fleet.link_gbit is not None and (not self.config.kv_host_memory or self.config.kv_demotion != "all"):
            raise ConfigError("link_gbit needs --kv-host-memory and --kv-demotion all: servers lend what is there")
        if (self.speed is None) == (self.machine is None):
            raise ConfigError("give either a measured speed (--speed, --plans) or a machine to estimate (--machine)")
        if self.config.has_stores:
            raise ConfigError("disk and remote stores are not simulated yet: leave out --kv-disk and --kv-remote")
        if self.config.speculative_config is not None and not any(self.drafts):
            raise ConfigError(
                "speculative_config needs a recording of a server that verifies drafts, from which their acceptance is "
                "taken: --plans or --drafts FILE (`octavo serve --speculative-config … --record-plans FILE` writes it)"
            )
        _ = self.sizing  # it checks max_model_len

    def replace(self, **changes: Any) -> Plan:
        """Return a copy with other values for fields of this class, its `fleet`, or the engine's configuration."""
        own = {name: changes.pop(name) for name in changes.keys() & _OWN}
        fleet = {name: changes.pop(name) for name in changes.keys() & options_of(FleetOptions).keys()}
        config, fleet_options = self.config.replace(**changes), dataclasses.replace(self.fleet, **fleet)
        return dataclasses.replace(self, config=config, fleet=fleet_options, **own)

    @property
    def part(self) -> ModelShape:
        """The part of the model that one device holds."""
        return divide(self.shape, self.fleet.num_devices)

    @property
    def max_model_len(self) -> int:
        measured = self._facts.get("max_model_len")
        return self.config.max_model_len or measured or self.shape.config.max_position_embeddings

    @property
    def _facts(self) -> Mapping[str, Any]:
        return {} if self.speed is None else self.speed.facts

    @property
    def dtype(self) -> str:
        return counted_dtype(self.config.dtype)

    @property
    def sizing(self) -> Sizing:
        """The division of one device's memory; without a machine, all of it is there."""
        machine, config = self.machine, self.config
        on_cpu = machine is None or machine.on_cpu  # what was measured may have been a CPU
        return Sizing(
            config=config.replace(max_model_len=self.max_model_len),
            shape=self.part,
            dtype=self.dtype,
            available=UNLIMITED if machine is None else int(machine.memory * config.gpu_memory_utilization),
            cache_share=CPU_MEMORY_SHARE if on_cpu else 1.0,
            host_available=None if on_cpu else UNLIMITED,
        )

    @property
    def spec(self) -> KVCacheSpec:
        """The KV cache of one device."""
        return self.sizing.spec

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, including the null block: as given, or as many as fit the given or the machine's memory.

        Raises:
            ConfigError: the size of the cache is not known, or the machine has too little memory.
        """
        config, facts = self.config, self._facts
        if self.machine is not None or config.num_blocks is not None or config.kv_cache_memory is not None:
            return self.sizing.pool().num_blocks
        if "num_blocks" not in facts or "block_bytes" not in facts:
            raise ConfigError("give the size of the KV cache: --kv-cache-memory 2GiB or --num-blocks N")
        return max(2, int(facts["num_blocks"]) * int(facts["block_bytes"]) // self.spec.block_bytes)

    @property
    def effective_speed(self) -> Speed:
        """The speed, adjusted to the size of this plan's keys and values, and slowed down."""
        speed = self._speed
        if (factor := self.fleet.slowdown) == 1:
            return speed
        origin = f"{speed.origin}; each step taken to last {factor:g} times as long"
        return dataclasses.replace(speed, origin=origin, times=speed.times.slowed(factor))

    @property
    def _speed(self) -> Speed:
        if self.speed is None:
            assert self.machine is not None
            count = self.fleet.num_devices
            devices = f"{count} × " if count > 1 else ""
            weights = weight_bytes(self.part, self.dtype, tied_head_copied=False)
            return Speed(
                f"ESTIMATED by a roofline of {devices}{self.machine.name}, not measured: {self.machine.source}",
                ESTIMATED,
                roofline(self.part, self.spec, self.machine, weights, count),
            )
        if not (measured := self._facts.get("bytes_per_token")):
            return self.speed
        times = self.speed.times.with_kv_bytes(self.spec.bytes_per_token / measured)
        return dataclasses.replace(self.speed, times=times)

    def servers(self) -> list[SimulatedServer]:
        """Build all replicas, each with its own draws of how single steps scatter."""
        neighbours: dict[str, LinkedMemory] = {}
        return [self.server(place, neighbours) for place in range(self.fleet.replicas)]

    def server(self, seed: int = 0, neighbours: dict[str, LinkedMemory] | None = None) -> SimulatedServer:
        """Build a server with an empty cache.

        Args:
            seed: of the draws of how single steps scatter.
            neighbours: by address, the servers that it can fetch blocks from, to which it is added.
        """
        config = self.config
        spec, speed, clock = self.spec, self.effective_speed, VirtualClock()
        sizing, pool = self.sizing, PoolSize(self.num_blocks, self.num_blocks * spec.block_bytes)
        kv = assemble_cache(
            config,
            spec,
            pool.num_blocks,
            num_host_blocks=sizing.num_host_blocks(pool),
            num_prefix_blocks=sizing.num_prefix_blocks,
            clock=clock,
        )
        times = speed.times
        per_token = (times.base + times.product_seconds(_RESTORED)) / _RESTORED
        per_block = times.per_moved_block or spec.block_size * times.per_context_token
        speculator = make_speculator(
            config,
            kv,
            self.max_model_len,
            method=RecordedDrafts(list(self.drafts)),
            clock=lambda: (0.0, 0.0),  # looking for drafts is in the recorded times
        )
        windowed = windows_of(times, spec, self.max_model_len) if self.speed is None else ()
        if (budget := config.budget) is not None:
            windowed = (*windowed, read_under(budget, times, spec))
        leaps = None
        if speculator is None and not windowed and config.itl_slo_ms is None:
            leaps = Leaps(kv, self.max_model_len, config.max_num_batched_tokens)
        store = tiers = None
        if self.fleet.link_gbit is not None and neighbours is not None:
            neighbours[str(seed)] = memory = LinkedMemory(neighbours)
            store = NeighbourStore(
                memory, self.fleet.num_devices * spec.block_bytes, self.fleet.link_gbit * 1e9 / 8, clock
            )
            tiers = LowerTiers(kv.hierarchy.host, [store], lambda slot: memoryview(b""), store.block_bytes, clock)
        scheduler = assemble_scheduler(
            config,
            kv,
            self.max_model_len,
            preemption=Preemption(per_token, per_block),
            tiers=tiers,
            speculator=speculator or leaps,
        )
        return SimulatedServer(
            scheduler,
            times,
            clock,
            speed.intake_s,
            speed.reply_s,
            speed.spread,
            windowed,
            seed,
            leaps,
            store,
            budget,
        )


_OWN = {entry.name for entry in dataclasses.fields(Plan)}
