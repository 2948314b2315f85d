"""Draws tokens from logits with one uniform number per row: temperature, filters, draw.

All filters keep a row's most likely tokens, in the order and with the meaning that they have in vLLM:

    x = logits / temperature
    min_p   keeps  p(x) >= min_p * max p
    top_k   keeps  x >= the k-th largest (equals of the k-th stay too, as in vLLM and transformers)
    top_p   keeps  the fewest most likely remaining tokens whose share reaches top_p (Holtzman et al. 2020);
                   equals by ascending token id

The draw inverts the distribution function **in vocabulary order**. A last-bit difference of the logits, from another
batch size or other chunks of the prompt, then moves each boundary only slightly, whereas in order of probability it
could swap two neighbours and so change the token. Masses are summed in float64.

This is the plain form of what `csrc/sampling.cpp` and `triton_choice.py` compute without sorting: their oracle, and
what draws where neither runs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SECOND = np.uint64(0xD1B54A32D192ED03)


def random_streams(seeds: npt.NDArray[np.uint64], *, again: bool = False) -> npt.NDArray[np.uint64]:
    """Return where each seed's stream of random numbers starts: uint64 [rows].

    Sequences have consecutive integers as seeds, whose raw streams would be the same stream shifted by one step, so
    seeds are mixed.

    Args:
        again: whether to return a second stream for each seed, independent of the first.
    """
    start = _mix(seeds + _GOLDEN)
    return _mix(start ^ _SECOND) if again else start


def uniforms(streams: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) for each (stream, position): float64 [rows], multiples of 2^-53.

    The number is output `position` of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
    generators").
    """
    drawn = _mix(streams + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def draw(logits: torch.Tensor, numbers: npt.NDArray[np.float64]) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row, or find its largest logit.

    Args:
        logits: float32 [rows, vocab].
        numbers: float64 [rows, 5], of `SamplingBatch.numbers`.

    Returns:
        int64 [rows] token ids, and bool [rows]: whether the row's logits are a distribution; if not, its id is
            meaningless.
    """
    best = logits.argmax(-1)
    valid = logits.gather(1, best.unsqueeze(1)).squeeze(1).isfinite()  # a NaN counts as the largest
    is_greedy = numbers[:, 1] == 0.0
    if is_greedy.all():
        return best, valid
    table = torch.from_numpy(numbers).to(logits.device)
    uniform, temperature = table[:, 0], table[:, 1].float()
    scaled = logits / torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
    masses = (scaled - scaled.amax(-1, keepdim=True)).double().exp_()
    min_p, top_p, top_k = numbers[:, 2:].T
    is_filtered = (min_p > 0.0) | (top_p < 1.0) | ((top_k > 0) & (top_k < logits.shape[1]))
    if len(filtered := np.flatnonzero(is_filtered & ~is_greedy)):
        rows = torch.from_numpy(filtered).to(logits.device)
        masses[rows] = _filtered(scaled[rows], masses[rows], *table[rows, 2:, None].unbind(1))
    cumulative = masses.cumsum_(-1)
    total = cumulative[:, -1]
    # A product of u < 1 may round up to the total itself. A token without mass is never chosen.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1)
    return torch.where(temperature > 0, drawn.clamp_(max=logits.shape[1] - 1), best), valid


def _filtered(
    scaled: torch.Tensor, masses: torch.Tensor, min_p: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor
) -> torch.Tensor:
    """Return the masses that the filters leave, float64 [rows, vocab]; the filters are float64 [rows, 1]."""
    values, ids = scaled.sort(dim=-1, descending=True, stable=True)
    masses = masses.gather(1, ids)
    limit = torch.where(top_k > 0, top_k.long(), values.shape[1]).clamp_(max=values.shape[1])
    masses *= values >= values.gather(1, limit - 1)
    masses *= values >= values[:, :1] + min_p.float().log()
    before = masses.cumsum(-1) - masses
    is_kept = (before < top_p * masses.cumsum(-1)[:, -1:]) | (top_p >= 1.0)
    is_kept[:, 0] = True
    return torch.zeros_like(masses).scatter_(1, ids, masses * is_kept)


def largest(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Return the tokens of each row's k largest values, int64 [rows, min(k, vocab)]: equals by ascending id, NaN first.

    The id is part of the key that is sorted by, because `topk` leaves open which of several equals it returns.
    """
    bits = (logits.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf) + 0.0).view(torch.int32).long()
    order = torch.where(bits < 0, bits ^ 0x7FFF_FFFF, bits)
    last = 0x7FFF_FFFF
    keys = (order << 31) + (last - torch.arange(logits.shape[1], device=logits.device))
    return last - (keys.topk(min(k, logits.shape[1]), dim=-1).values & last)
