"""Decode speed of models with random weights and real shapes, as a share of what the memory bandwidth allows.

floor     (weights + keys and values of all contexts) / copy bandwidth: each byte is read once per step
share     floor / seconds of a step, including planning, sampling and the transfer to the host
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from octavo.attention import make_backend
from octavo.checkpoint.hf_config import hf_model_config
from octavo.checkpoint.model_config import ModelConfig
from octavo.kvcache.block import BlockId
from octavo.kvcache.spec import KVCacheSpec
from octavo.models.decoder import LlamaDecoder
from octavo.models.loader import expected_shapes
from octavo.models.ops import LayerOps
from octavo.models.weights import RawTensor
from octavo.request import RequestId, SequenceId
from octavo.runner.executor import Collect
from octavo.runner.graphs import Capture
from octavo.runner.runner import ModelRunner
from octavo.sampling_params import SamplingParams
from octavo.scheduler.plan import DRAWN, NewSequence, SamplingSnapshot, StepPlan
from octavo.storage.arena import KVArena

_WARM_UP = 3

SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 8192, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
    },
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 8192, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "SmolLM2-135M": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
        "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "max_position_embeddings": 8192, "rope_theta": 100000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    },
    "tiny": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    },
}  # fmt: skip
"""The parts of the models' `config.json` that matter here."""


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
        self.model = LlamaDecoder(config, _RandomWeights(config, device), dtype=dtype, device=device, ops=ops)
        spec = KVCacheSpec.build(self.model.kv_layers, block_size, str(dtype).removeprefix("torch."))
        # All blocks, including those of the last tokens, are allocated from the start, so that no plan changes a table.
        self._blocks = spec.blocks_for_tokens(context + _WARM_UP + steps + 1)
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
        params = SamplingParams(temperature=0, max_tokens=self._steps + _WARM_UP, ignore_eos=True)
        sampling = SamplingSnapshot(RequestId("measuring"), params, seed=0, num_prompt_tokens=self._context)
        new = tuple(NewSequence(seq, sampling, (table,)) for seq, table in zip(seq_ids, tables, strict=True))
        took: list[float] = []
        collect: Collect | None = None
        started = time.perf_counter()
        for step in range(_WARM_UP + self._steps):
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
        seconds = statistics.median(took[_WARM_UP:])
        read = self.model.weight_bytes + num_seqs * self._context * self._spec.bytes_per_token
        return DecodeRow(self.name, num_seqs, self._context, seconds, read / copy_bandwidth)


class _Arrivals:
    """A streamer for `generate` that records when each step's tokens arrived on the host."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, token_ids: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def measure_transformers(
    name: str, device: torch.device, dtype: torch.dtype, *, num_seqs: int, context: int, steps: int
) -> float:
    """Measure transformers' `generate` with a model of the same shape.

    Returns:
        The median time between the arrivals of tokens, in seconds; the prompt's step is not counted.
    """
    import transformers

    raw = {key: value for key, value in SHAPES[name].items() if key not in ("architectures", "model_type")}
    config = transformers.AutoConfig.for_model(SHAPES[name]["model_type"], **raw)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(config).eval()
    finally:
        torch.set_default_dtype(before)
    ids = torch.ones(num_seqs, context, dtype=torch.int64, device=device)

    arrivals = _Arrivals()
    # The prompt arrives first, then one token per step.
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=_WARM_UP + steps,
            min_new_tokens=_WARM_UP + steps,
            do_sample=False,
            pad_token_id=0,
            streamer=arrivals,
        )
    after = arrivals.times[_WARM_UP:]
    return statistics.median(later - sooner for sooner, later in pairwise(after))
