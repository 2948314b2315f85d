"""What a GPU's figures are compared with: the attention of torch and FlashInfer, and decodes of transformers."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from benchmarks.gpu.shapes import SHAPES, WARM_UP_STEPS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FLASHINFER_WORKSPACE = 128 << 20  # bytes, as in its documentation


def torch_attention(query: torch.Tensor, context: int, kv_heads: int) -> Callable[[], torch.Tensor]:
    """Return a call of `scaled_dot_product_attention` over contiguous keys and values, all that it supports.

    Args:
        query: [sequences, queries, heads, head_dim]; more than one query are the last of the context.
        context: tokens of each sequence.
    """
    num_seqs, queries, _, dim = query.shape
    by_head = query.transpose(1, 2)
    key, value = (
        torch.randn((num_seqs, kv_heads, context, dim), device=query.device).to(query.dtype) for _ in range(2)
    )
    return lambda: functional.scaled_dot_product_attention(by_head, key, value, is_causal=queries > 1, enable_gqa=True)


def has_flashinfer() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


def flashinfer_attention(
    query: torch.Tensor, tables: torch.Tensor, contexts: Sequence[int], kv_heads: int, block_size: int
) -> Callable[[], torch.Tensor]:
    """Return a call of FlashInfer's attention over the same blocks, planned beforehand as by the engines that use it.

    Args:
        query: [sequences, queries, heads, head_dim]; more than one query are the last of the context, and causal.
        tables: [sequences, blocks] int32, block numbers, padded.
        contexts: tokens of each sequence.
    """
    import flashinfer

    device, dtype = query.device, query.dtype
    num_seqs, queries, heads, dim = query.shape
    counts = [-(-context // block_size) for context in contexts]
    pages = torch.cat([row[:count] for row, count in zip(tables, counts, strict=True)]).int()
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(device)
    last = torch.tensor(
        [context - (count - 1) * block_size for context, count in zip(contexts, counts, strict=True)],
        dtype=torch.int32,
        device=device,
    )
    shape = (int(tables.max()) + 1, block_size, kv_heads, dim)
    cache = tuple(torch.randn(shape, device=device).to(dtype) for _ in range(2))
    workspace = torch.zeros(_FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device)
    if queries == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(starts, pages, last, heads, kv_heads, dim, block_size, q_data_type=dtype, kv_data_type=dtype)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        of_queries = torch.arange(0, num_seqs * queries + 1, queries, dtype=torch.int32, device=device)
        wrapper.plan(
            of_queries, starts, pages, last, heads, kv_heads, dim, block_size, causal=True, q_data_type=dtype,
            kv_data_type=dtype,
        )  # fmt: skip
    rows = query.reshape(-1, heads, dim)
    return lambda: wrapper.run(rows, cache)


class _Arrivals:
    """A streamer for `generate` that records when each step's tokens arrived on the host."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, token_ids: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def transformers_model(name: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Return transformers' model of one of `SHAPES`, with random weights made on the device."""
    import transformers

    raw = {key: value for key, value in SHAPES[name].items() if key not in ("architectures", "model_type")}
    config = transformers.AutoConfig.for_model(SHAPES[name]["model_type"], **raw)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config).eval()
    finally:
        torch.set_default_dtype(before)
    return model


def measure_generate(model: PreTrainedModel, *, num_seqs: int, context: int, steps: int) -> float:
    """Measure transformers' `generate`.

    Returns:
        The median time between the arrivals of tokens, in seconds; the prompt's step is not counted.
    """
    ids = torch.ones(num_seqs, context, dtype=torch.int64, device=model.device)
    arrivals = _Arrivals()
    # The prompt arrives first, then one token per step.
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=WARM_UP_STEPS + steps,
            min_new_tokens=WARM_UP_STEPS + steps,
            do_sample=False,
            pad_token_id=0,
            streamer=arrivals,
        )
    after = arrivals.times[WARM_UP_STEPS:]
    return statistics.median(later - sooner for sooner, later in pairwise(after))


def measure_generate_batch(model: PreTrainedModel, *, num_seqs: int, context: int, steps: int) -> float:
    """Measure transformers' continuous batching, `generate_batch`, over its own paged cache.

    Returns:
        The median time between two tokens of the last request to begin, in seconds: all others are decoding by then.

    Raises:
        RuntimeError: a request failed, or got fewer tokens than it asked for.
    """
    import transformers

    wanted = WARM_UP_STEPS + steps
    options: dict[str, Any] = {}
    if model.device.type == "cpu":
        # By itself it takes most of the memory, and touches all of it.
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        options["continuous_batching_config"] = ContinuousBatchingConfig(num_blocks=2 * num_seqs, max_batch_tokens=256)
    config = transformers.GenerationConfig(max_new_tokens=wanted, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # Prompts that differ from the first token on, so that none is found in another's blocks.
    prompts = [[1 + index, *[1] * (context - 1)] for index in range(num_seqs)]
    found: dict[str, Any] = model.generate_batch(prompts, generation_config=config, record_timestamps=True, **options)
    if len(found) != num_seqs or any(output.error or len(output.timestamps) < wanted for output in found.values()):
        reasons = {output.error for output in found.values()}
        raise RuntimeError(f"{len(found)} of {num_seqs} requests ended, not all with {wanted} tokens: {reasons}")
    times: list[float] = max((output.timestamps for output in found.values()), key=lambda own: own[0])
    return statistics.median(later - sooner for sooner, later in pairwise(times[WARM_UP_STEPS:]))
