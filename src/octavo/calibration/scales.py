"""Scales of a calibrated KV cache, chosen from the keys and values that a model computes for text.

max           no number is clipped
percentile    only the numbers of each head above this percentile are clipped
mse           the scale with the least squared error, of scales from that of "max" down to a sixteenth of it
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from octavo.attention.base import AttentionBackend
from octavo.kvcache.spec import KVCacheSpec
from octavo.models.base import CausalLM
from octavo.models.kv_scale_file import Scales
from octavo.models.kv_scales import calibrated_sides
from octavo.storage.arena import KVArena
from octavo.storage.codec import VectorCodec
from octavo.workloads.forward_text import block_tables, logits_of_chunks

Method = Literal["max", "percentile", "mse"]

_CHUNK = 256
_SCALES_OF_MSE = tuple(2.0 ** (-i / 4) for i in range(17))
_VECTORS_OF_MSE = 1024


@dataclass(frozen=True, slots=True)
class Calibration:
    """Scales, and the errors that they cause.

    Attributes:
        scales: scales by layer and side.
        tokens: number of tokens of the calibration text.
        errors: relative RMS error by side ("k", "v"), over all layers that need scales: the root of the mean squared
            error of what is stored, divided by the root mean square of the numbers.
        errors_at_one: the same with every scale at 1.0.
    """

    scales: Scales
    tokens: int
    errors: dict[str, float]
    errors_at_one: dict[str, float]


def calibrate(
    model: CausalLM,
    attention: AttentionBackend,
    dtype: str,
    windows: Sequence[Sequence[int]],
    *,
    method: Method,
    percentile: float,
    block_size: int = 16,
) -> Calibration:
    """Choose the scales of a cache in `dtype` from what an unquantised cache holds after reading `windows`."""
    kept = KeptText(model, attention, windows, block_size)
    wanted = KVArena(KVCacheSpec.build(model.kv_layers, block_size, dtype), 2, model.device, attention.layout)
    scales: Scales = {}
    lost = {side: [0.0, 0.0, 0.0] for side in ("k", "v")}  # squares: of errors, of errors at 1.0, of numbers
    for index, layer in wanted.calibrated_layers.items():
        numbers = dict(zip(("k", "v"), kept.keys_and_values(index), strict=True))
        for name, side in calibrated_sides(layer).items():
            x = numbers[name]
            scale = choose(side.codec, x, method, percentile)
            scales.setdefault(index, {})[name] = scale
            few = _some(x)
            for i, used in enumerate((scale, torch.ones_like(scale))):
                lost[name][i] += (_stored(side.codec, few, used) - few).square().sum().item()
            lost[name][2] += few.square().sum().item()
    found = {name: sums for name, sums in lost.items() if sums[2] > 0}
    return Calibration(
        scales,
        sum(map(len, windows)),
        {name: math.sqrt(sums[0] / sums[2]) for name, sums in found.items()},
        {name: math.sqrt(sums[1] / sums[2]) for name, sums in found.items()},
    )


def choose(codec: VectorCodec, x: torch.Tensor, method: Method, percentile: float = 99.9) -> torch.Tensor:
    """Choose the scale of each head, float32 [heads], for vectors [tokens, heads, dim]."""
    size = x.float().abs().nan_to_num(0.0, posinf=0.0)
    if method == "percentile":
        per_head = size.transpose(0, 1).flatten(1)
        rank = max(1, math.ceil(percentile / 100 * per_head.shape[1]))
        most = per_head.kthvalue(rank, dim=1).values
    else:
        most = size.amax((0, 2))
    whole = torch.where(most > 0, most / codec.largest, 1.0)
    if method != "mse":
        return whole
    few = _some(x)
    candidates = torch.stack([whole * part for part in _SCALES_OF_MSE])
    errors = torch.stack([(_stored(codec, few, scale) - few).square().sum((0, 2)) for scale in candidates])
    return candidates.gather(0, errors.argmin(0, keepdim=True))[0]


class KeptText:
    """The keys and values that a model computes for text, in a cache of the model's own dtype."""

    def __init__(
        self, model: CausalLM, attention: AttentionBackend, windows: Sequence[Sequence[int]], block_size: int
    ) -> None:
        spec = KVCacheSpec.build(model.kv_layers, block_size, str(model.dtype).removeprefix("torch."))
        needed = [len(spec.groups) * spec.blocks_for_tokens(len(window)) for window in windows]
        self._arena = KVArena(spec, 1 + sum(needed), model.device, attention.layout)
        self._parts: list[tuple[list[torch.Tensor], int]] = []
        first = 1
        for window, count in zip(windows, needed, strict=True):
            self._parts.append((block_tables(spec, len(window), first), len(window)))
            for _ in logits_of_chunks(
                model, self._arena, attention, window, first_block=first, chunk=_CHUNK, wanted=False
            ):
                pass
            first += count

    def keys_and_values(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of one layer, each float32 [tokens, kv_heads, dim]."""
        keys, values = zip(*self._of_windows(index), strict=True)
        return torch.cat(keys), torch.cat(values)

    def _of_windows(self, index: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        layer = self._arena.layers[index]
        for tables, num_tokens in self._parts:
            key, value = layer.gather(tables[layer.group], num_tokens)
            yield key.float(), value.float()


def _some(x: torch.Tensor) -> torch.Tensor:
    """Return a sample of vectors spread evenly over the text, which is enough for mean errors."""
    return x[:: -(-len(x) // _VECTORS_OF_MSE)].float()


def _stored(codec: VectorCodec, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(x, scale), x.shape[-1], scale)
