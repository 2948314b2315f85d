"""Decode speed of models with random weights and real shapes, as a share of what the memory bandwidth allows.

floor     (weights + keys and values of all contexts) / copy bandwidth: each byte is read once per step
share     floor / seconds of a step, including planning, sampling and the transfer to the host
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.shapes import SHAPES, WARM_UP_STEPS
from octavo.attention import make_backend
from octavo.checkpoint.hf_config import hf_model_config
from octavo.checkpoint.model_config import ModelConfig
from octavo.kvcache.block import BlockId
from octavo.kvcache.spec import KVCacheSpec
from octavo.models.decoder import Decoder
from octavo.models.loader import expected_shapes
from octavo.models.ops import LayerOps
from octavo.models.weights import RawTensor
from octavo.request import RequestId, SequenceId
from octavo.runner.graphs import Capture
from octavo.runner.runner import Collect, ModelRunner
from octavo.sampling_params import SamplingParams
from octavo.scheduler.plan import DRAWN, NewSequence, SamplingSnapshot, StepPlan, TableDelta
from octavo.storage.arena import KVArena


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """The result for steps of `num_seqs` sequences with contexts of `context` tokens.

    Attributes:
        seconds: median time of a step.
        floor: seconds that reading the weights and the cache takes at the bandwidth of a copy.
    """

    model: str
    num_seqs: int
    context: int
    seconds: float
    floor: float

    @property
    def share(self) -> float:
        return self.floor / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.num_seqs / self.seconds


class _RandomWeights:
    """Random weights in the shapes of a configuration, made on the device when they are needed."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._shapes = expected_shapes(config)
        self._device = device

    def has(self, name: str) -> bool:
        return name in self._shapes

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(self._shapes[name], dtype=dtype, device=self._device)
        return tensor.fill_(1.0) if "norm" in name else tensor.normal_(std=0.02)

    def raw(self, name: str) -> RawTensor | None:
        return None


class DecodeBench:
    """A model of one of `SHAPES` and a cache for `most_seqs` contexts.

    Args:
        capture: passed to `ModelRunner`.
        ops: the row-wise operations; None for the device's default.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        *,
        most_seqs: int,
        context: int,
        steps: int,
        capture: Capture | None = None,
        ops: LayerOps | None = None,
        block_size: int = 16,
    ) -> None:
        self.name, self._context, self._steps = name, context, steps
        config = hf_model_config(
            {**SHAPES[name], "dtype": str(dtype).removeprefix("torch.")}, Path(name, "config.json")
        )
        self.model = Decoder(config, _RandomWeights(config, device), dtype=dtype, device=device, ops=ops)
        spec = KVCacheSpec.build(self.model.kv_layers, block_size, str(dtype).removeprefix("torch."))
        # All blocks, including those of the last tokens, are allocated from the start, so that no plan changes a table.
        self._blocks = spec.blocks_for_tokens(context + WARM_UP_STEPS + steps + 1)
        attention = make_backend("triton", device)
        arena = KVArena(spec, 1 + most_seqs * self._blocks, device, attention.layout)
        self._spec = spec
        self._runner = ModelRunner(
            self.model,
            arena,
            attention,
            max_num_seqs=most_seqs,
            max_model_len=self._blocks * block_size,
            capture=capture,
        )
        if self._runner.graphs is not None:
            self._runner.graphs.record_after = 1

    def measure(self, num_seqs: int, copy_bandwidth: float) -> DecodeRow:
        """Measure decode steps of `num_seqs` sequences, each launched behind the previous one, as in the engine."""
        ids = torch.randperm(num_seqs * self._blocks) + 1
        tables = [tuple(map(BlockId, row)) for row in ids.view(num_seqs, -1).tolist()]
        seq_ids = tuple(map(SequenceId, range(num_seqs)))
        params = SamplingParams(temperature=0, max_tokens=self._steps + WARM_UP_STEPS, ignore_eos=True)
        sampling = SamplingSnapshot(RequestId("measuring"), params, seed=0, num_prompt_tokens=self._context)
        new = tuple(NewSequence(seq_id, sampling) for seq_id in seq_ids)
        whole = tuple(TableDelta(row, 0, (table,)) for row, table in enumerate(tables))
        took: list[float] = []
        collect: Collect | None = None
        started = time.perf_counter()
        for step in range(WARM_UP_STEPS + self._steps):
            is_first = step == 0
            plan = StepPlan(
                step=step + 1,
                seq_ids=seq_ids,
                starts=(self._context + step,) * num_seqs,
                lengths=(1,) * num_seqs,
                draws=(1,) * num_seqs,
                token_ids=(1 if is_first else DRAWN,) * num_seqs,
                reset=is_first,
                new=new if is_first else (),
                tables=whole if is_first else (),
                num_streams=num_seqs,
                ahead=not is_first,
            )
            before, collect = collect, self._runner.launch(plan)
            if before is not None:
                before()
                took.append(time.perf_counter() - started)
                started = time.perf_counter()
        if collect is not None:
            collect()
        seconds = statistics.median(took[WARM_UP_STEPS:])
        read = self.model.weight_bytes + num_seqs * self._context * self._spec.bytes_per_token
        return DecodeRow(self.name, num_seqs, self._context, seconds, read / copy_bandwidth)
