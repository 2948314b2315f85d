"""Search for the codec of the keys and values of each layer that loses least within a budget of bits.

First, sensitivities: everything is in the widest codec except one layer, whose values, or keys and values, are in a
narrower one; the cost of that is what it adds to the KL divergence of next-token distributions from those of the
unquantised cache. Then, assuming that these costs add up, the least sum for every budget at once (a knapsack by dynamic
programming), which is the Pareto frontier. Because they only add up approximately, the table at the budget is measured
along with the uniform ones that fit, and the best of them is improved by moving bits from one layer to another if that
measures better. A table that was picked among many with one text looks better on it than it is, so the finalist with
the least loss over other text is chosen; no table is preferred to a uniform codec that loses less. Follows KVTuner (Li
et al. 2025) and KVmix (2025), which also search per layer and side.

Keys never get fewer bits than values: an error in a key changes every weight of a softmax, and no kernel supports such
a layer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from octavo.attention.base import AttentionBackend
from octavo.errors import ConfigError
from octavo.kvcache.formats import CODES, KVFormat, kv_format, pair_format, spelled
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from octavo.models.base import CausalLM
from octavo.models.kv_scale_file import Scales
from octavo.models.kv_scales import apply_scales
from octavo.storage.arena import KVArena
from octavo.workloads.forward_text import CHUNK, Loss, log_probs, logits_of_chunks

_NEAREST = 24  # number of exchanges to draw from: those with the least cost by the sensitivities


class Probe:
    """Measures the loss of caches over the same windows of text.

    Args:
        make_attention: returns a new backend; one per measurement, because a backend may remember the layers it saw.
    """

    def __init__(
        self,
        model: CausalLM,
        make_attention: Callable[[], AttentionBackend],
        windows: Sequence[Sequence[int]],
        block_size: int = 16,
    ) -> None:
        self._model = model
        self._make_attention = make_attention
        self.windows = windows
        self._block_size = block_size
        own = str(model.dtype).removeprefix("torch.")
        self._plain = [torch.cat(list(log_probs(self._logits(own, window)))) for window in windows]
        self.plain = Loss.of(windows, self._plain, (torch.split(each, CHUNK) for each in self._plain))

    @property
    def tokens(self) -> int:
        return sum(map(len, self.windows))

    def bytes_per_token(self, dtype: str) -> int:
        return KVCacheSpec.build(self._model.kv_layers, self._block_size, dtype).bytes_per_token

    def loss(self, dtype: str, scales: Scales | None = None) -> Loss:
        """Measure the loss of a cache in `dtype`, which may name a codec per layer, with `scales` if calibrated."""
        predicted = (log_probs(self._logits(dtype, window, scales)) for window in self.windows)
        return Loss.of(self.windows, self._plain, predicted)

    def _logits(self, dtype: str, window: Sequence[int], scales: Scales | None = None) -> Iterator[torch.Tensor]:
        spec = KVCacheSpec.build(self._model.kv_layers, self._block_size, dtype)
        attention = self._make_attention()
        num_blocks = 1 + len(spec.groups) * spec.blocks_for_tokens(len(window))
        arena = KVArena(spec, num_blocks, self._model.device, attention.layout)
        if scales is not None:
            apply_scales(arena.calibrated_layers, scales, "calibration")
        return logits_of_chunks(self._model, arena, attention, window)


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome of a search.

    Attributes:
        formats: the format of each layer.
        bits: mean number of bits per number, not counting scales.
        loss: the loss over the text of the search.
        predicted: what the table with the least cost by the sensitivities, before any exchange, adds to the KL
            divergence according to them.
        finalists: the loss of each finalist over the text that decides between them.
        costs: for each layer, what each format that it may have adds to the KL divergence.
        frontier: (mean bits, dtype) of the tables with the least predicted loss, from the fewest bits to the most.
    """

    formats: tuple[KVFormat, ...]
    bits: float
    loss: Loss
    predicted: float
    costs: list[dict[str, float]]
    frontier: list[tuple[float, str]]
    finalists: dict[str, Loss]

    @property
    def dtype(self) -> str:
        return spelled(self.formats)


def check_candidates(names: Sequence[str]) -> None:
    """Raise `ConfigError` for codecs that a search cannot choose from."""
    known = [name for name, code in CODES.items() if not code.calibrated]
    for name in names:
        if name not in known:
            raise ConfigError(f"a search can choose from {', '.join(known)} (codecs without scales), not {name!r}")


def search(
    probe: Probe,
    layers: Sequence[LayerKVSpec],
    candidates: Sequence[str],
    bits: float,
    *,
    decide: Probe,
    exchanges: int = 12,
    say: Callable[[str], None] = lambda line: None,
) -> Found:
    """Find the table of `candidates` that loses least with a mean of at most `bits` per number.

    Args:
        probe: measures over the text of the search.
        decide: measures over other text, which decides between the finalists.
        exchanges: number of measured attempts to improve on what the sensitivities predict.
        say: called with lines of progress.

    Raises:
        ConfigError: no table of the candidates is that small, or a candidate is unknown or needs scales.
    """
    check_candidates(candidates)
    codes = sorted({CODES[name] for name in candidates}, key=lambda code: -code.bits)
    if bits < codes[-1].bits:
        raise ConfigError(
            f"{bits:g} bits a number are fewer than the {codes[-1].bits} of {codes[-1].name}, the smallest candidate"
        )
    formats = [pair_format(k.name, v.name) for k in codes for v in codes if k.bits >= v.bits]
    sizes = [{format.name: _bits(layer, format) for format in formats} for layer in layers]
    elements = sum(layer.elements_per_token for layer in layers)
    costs = _sensitivities(probe, len(layers), formats, say)
    most = int(bits * elements + 1e-6)
    frontier = _frontier(sizes, costs, most)
    size, predicted, names = frontier[-1]
    tables = {names: probe.loss(_dtype(names))}
    say(f"{size / elements:.2f} bits as predicted ({predicted:+.5f}): KL {tables[names].kl:.5f}")
    for format in formats:
        uniform = (format.name,) * len(layers)
        if sum(size[format.name] for size in sizes) <= most and uniform not in tables:
            tables[uniform] = probe.loss(_dtype(uniform))
    start = min(tables, key=lambda names: tables[names].kl)
    improved, loss = _exchange(probe, start, tables[start], sizes, costs, exchanges, say)
    tables[improved] = loss
    finalists = {names: decide.loss(_dtype(names)) for names in tables}
    names = min(finalists, key=lambda names: finalists[names].kl)
    for finalist, of in finalists.items():
        say(f"{_dtype(finalist)}: KL {of.kl:.5f} over other text{', the least' if finalist == names else ''}")
    return Found(
        tuple(map(kv_format, names)),
        sum(size[name] for size, name in zip(sizes, names, strict=True)) / elements,
        tables[names],
        predicted,
        costs,
        [(size / elements, _dtype(names)) for size, _, names in frontier],
        {_dtype(names): loss for names, loss in finalists.items()},
    )


def _bits(layer: LayerKVSpec, format: KVFormat) -> int:
    """Return the number of bits of one token's codes."""
    return layer.num_kv_heads * (layer.key_dim * format.keys.bits + layer.value_dim * format.values.bits)


def _dtype(names: Sequence[str]) -> str:
    return spelled([kv_format(name) for name in names])


def _sensitivities(
    probe: Probe, num_layers: int, formats: Sequence[KVFormat], say: Callable[[str], None]
) -> list[dict[str, float]]:
    widest = formats[0].name
    base = probe.loss(_dtype([widest] * num_layers)).kl
    say(f"everything in {widest}: KL {base:.5f}")
    costs: list[dict[str, float]] = []
    for index in range(num_layers):
        costs.append({widest: 0.0})
        for format in formats[1:]:
            names = [widest] * index + [format.name] + [widest] * (num_layers - index - 1)
            costs[-1][format.name] = probe.loss(_dtype(names)).kl - base
        differences = ", ".join(f"{name} {cost:+.5f}" for name, cost in costs[-1].items() if name != widest)
        say(f"layer {index}: {differences}")
    return costs


def _frontier(
    sizes: Sequence[Mapping[str, int]], costs: Sequence[Mapping[str, float]], most: int
) -> list[tuple[int, float, tuple[str, ...]]]:
    """Return (bits, predicted loss, formats) of the tables that lose least for their size, of at most `most` bits."""
    reached: dict[int, tuple[float, tuple[str, ...]]] = {0: (0.0, ())}
    for size, cost in zip(sizes, costs, strict=True):
        grown: dict[int, tuple[float, tuple[str, ...]]] = {}
        for used, (total, chosen) in reached.items():
            for name, bits in size.items():
                if used + bits <= most and (used + bits not in grown or total + cost[name] < grown[used + bits][0]):
                    grown[used + bits] = total + cost[name], (*chosen, name)
        reached = grown
    frontier: list[tuple[int, float, tuple[str, ...]]] = []
    for bits, (total, chosen) in sorted(reached.items()):
        if not frontier or total < frontier[-1][1]:
            frontier.append((bits, total, chosen))
    return frontier


def _exchange(
    probe: Probe,
    names: tuple[str, ...],
    loss: Loss,
    sizes: Sequence[Mapping[str, int]],
    costs: Sequence[Mapping[str, float]],
    exchanges: int,
    say: Callable[[str], None],
) -> tuple[tuple[str, ...], Loss]:
    """Try to improve a table by changing the formats of two layers such that its size stays the same."""
    rng, tried = random.Random(0), {names}
    for _ in range(exchanges):
        moves = [
            (costs[index][name] - costs[index][now], sizes[index][name] - sizes[index][now], index, name)
            for index, now in enumerate(names)
            for name in sizes[index]
            if name != now
        ]
        pairs = [
            (first[0] + second[0], first[2:], second[2:])
            for first in moves
            for second in moves
            if first[2] < second[2] and first[1] + second[1] == 0
        ]
        others = []
        for _, *changes in sorted(pairs):
            changed = list(names)
            for index, name in changes:
                changed[index] = name
            if tuple(changed) not in tried:
                others.append(tuple(changed))
        if not others:
            break
        other = rng.choice(others[:_NEAREST])
        tried.add(other)
        found = probe.loss(_dtype(other))
        if found.kl < loss.kl:
            names, loss = other, found
            say(f"better by an exchange: KL {loss.kl:.5f}")
    return names, loss
