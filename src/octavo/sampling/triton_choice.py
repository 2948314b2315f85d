"""Chooses tokens on a GPU, with one Triton kernel for the whole batch, which neither sorts nor waits for the host.

It finds the same tokens as `Choice` from the same random numbers, unless a number falls on a boundary between two
tokens, or a filter's cut on a token, because masses are summed in another order.

A program of the kernel handles one row, and reads it once for each line:

    largest logit                greedy rows are done
    top_k                        8 times: the k-th largest, four bits of it at a time
    mass of the rest
    top_p                        8 times: the smallest logit that it keeps, likewise; and the mass above it
    mass of the rest, and the token in which the uniform number's share of it lies, in vocabulary order

Four bits at a time means that floats are ordered like integers, and each pass cuts the range of integers in 16 parts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from octavo.attention.triton.launch import INTERPRETED
from octavo.sampling.choice import Choice, DrawMasks, DrawRows, look_at
from octavo.storage.device_copy import to_device


class TritonChoice(Choice):
    """A `Choice` whose draws are one kernel, which also applies masks."""

    def _draw(
        self, logits: torch.Tensor, rows: DrawRows, numbers: npt.NDArray[np.float64], masks: DrawMasks | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits, table = look_at(logits, rows), _table(logits, numbers)
        draws = np.arange(0) if masks is None else np.flatnonzero(masks.mask_of >= 0)
        if masks is None or not len(draws):
            token_ids, valid = draw_rows(logits, table)
            return token_ids, valid.bool()
        words = torch.from_numpy(masks.words[masks.mask_of[draws]].view(np.int32)).to(logits.device)
        chosen, proper = draw_rows(look_at(logits, draws), look_at(table, draws), words)
        if len(draws) == len(rows):
            return chosen, proper.bool()
        token_ids, valid = draw_rows(logits, table)
        place(token_ids, draws, chosen)
        place(valid, draws, proper)
        return token_ids, valid.bool()


def draw_masked_row(vocab_size: int, device: torch.device) -> int:
    """Draw a token under a mask that allows the last one only, which compiles the kernel; returns that token."""
    logits = torch.zeros(1, vocab_size, device=device)
    table = torch.tensor([[0.5, 1.0, -torch.inf, 1.0, 0.0, 0.0]], dtype=torch.float64, device=device)
    masks = torch.zeros(1, -(-vocab_size // 32), dtype=torch.int32, device=device)
    masks[0, -1] = int(np.array(1 << (vocab_size - 1) % 32, np.uint32).view(np.int32))
    token_ids, _ = draw_rows(logits, table, masks)
    return int(token_ids.item())


def _table(logits: torch.Tensor, numbers: npt.NDArray[np.float64]) -> torch.Tensor:
    """Return the table of `PARAMETERS`, float64 [draws, 6], moved to the device in one transfer."""
    uniform, temperature, min_p, top_p, top_k = numbers.T
    is_greedy = temperature == 0.0
    with np.errstate(divide="ignore"):
        log_min_p = np.log(min_p.astype(np.float32))
    top_k = np.where(top_k < logits.shape[1], top_k, 0.0)
    columns = (uniform, np.where(is_greedy, 1.0, temperature), log_min_p, top_p, top_k, is_greedy)
    return to_device(np.column_stack(columns), logits.device)


_TILE = 1024
_WARPS = 8

# The columns of a table of draws; see `SamplingBatch.numbers`.
PARAMETERS = ("uniform", "temperature", "log_min_p", "top_p", "top_k", "greedy")


@triton.jit
def _order(x):
    """Map floats to int32 in the same order; -0.0 is treated as 0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _load(row, mask_row, start, vocab, temperature, MASKED: tl.constexpr, TILE: tl.constexpr):
    """Load logits divided by the temperature; -inf past the vocabulary, and if the bit of a mask is 0."""
    columns = start + tl.arange(0, TILE)
    inside = columns < vocab
    if MASKED:
        word = tl.load(mask_row + columns // 32, mask=inside, other=0)
        inside = inside & (((word >> (columns % 32)) & 1) != 0)
    x = tl.load(row + columns, mask=inside, other=float("-inf"))
    return tl.div_rn(x, tl.broadcast_to(temperature, x.shape)), columns


@triton.jit
def _smallest_kept(
    row, mask_row, vocab, temperature, best, floor, wanted,
    BY_MASS: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the smallest number, as int64 in `_order`, above which there is less than `wanted`, measured in tokens or
    in the mass of those from `floor` on."""
    low = tl.full([], -2147483648, tl.int64)
    for step in range(8):
        width = tl.full([], 1, tl.int64) << (28 - 4 * step)
        ends = (low + (tl.arange(0, 16) + 1) * width - 1).to(tl.int32)
        # Each thread sums its own columns before the final sum, so that counts stay exact in float32.
        parts = tl.zeros([TILE, 16], tl.float32)
        for start in tl.range(0, vocab, TILE, num_stages=3):
            x, columns = _load(row, mask_row, start, vocab, temperature, MASKED, TILE)
            order = _order(x)
            if BY_MASS:
                weight = tl.where(order >= floor, tl.exp(x - best), 0.0)
            else:
                weight = (columns < vocab).to(tl.float32)
            parts += tl.where(order[:, None] > ends[None, :], weight[:, None], 0.0)
        above = tl.sum(parts.to(tl.float64), 0)
        low += tl.sum((above >= wanted).to(tl.int64), 0) * width
    return low


@triton.jit
def _kept(x, best, floor, cut, above, wanted, equals, FILTERED: tl.constexpr):
    """Return the masses that the filters keep in a tile, and how many tokens so far equal the cut of top_p."""
    order = _order(x).to(tl.int64)
    mass = tl.exp(x - best)
    keep = order >= floor
    if FILTERED:
        is_cut = order == cut
        rank = equals + tl.cumsum(is_cut.to(tl.int32), 0)
        # Of those equal to the cut, keep as many as needed by ascending id.
        before = above + (rank - 1).to(tl.float64) * mass.to(tl.float64)
        keep = keep & ((order > cut) | (is_cut & (before < wanted)))
        equals += tl.sum(is_cut.to(tl.int32), 0)
    return tl.where(keep, mass, 0.0), equals


@triton.jit
def _draw(
    logits, table, masks, token_ids, valid, vocab, stride, mask_stride,
    MASKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    mask_row = masks + index * mask_stride
    table += index * 6
    uniform = tl.load(table)
    temperature = tl.load(table + 1).to(tl.float32)
    log_min_p = tl.load(table + 2).to(tl.float32)
    top_p = tl.load(table + 3)
    top_k = tl.load(table + 4)
    is_greedy = tl.load(table + 5) > 0.0

    largest = tl.full([TILE], float("-inf"), tl.float32)
    where_largest = tl.full([TILE], 0, tl.int32)
    num_nan = tl.zeros([TILE], tl.int32)
    for start in tl.range(0, vocab, TILE, num_stages=3):
        x, columns = _load(row, mask_row, start, vocab, temperature, MASKED, TILE)
        better = x > largest
        largest = tl.where(better, x, largest)
        where_largest = tl.where(better, columns, where_largest)
        num_nan += (x != x).to(tl.int32)
    best = tl.max(largest, 0)
    token = tl.min(tl.where(largest == best, where_largest, vocab), 0)
    is_valid = (tl.abs(best) < float("inf")) & (tl.sum(num_nan, 0) == 0)

    if is_valid & (is_greedy == 0):
        floor = _order(best + log_min_p).to(tl.int64)
        if top_k > 0.0:
            kth = _smallest_kept(row, mask_row, vocab, temperature, best, floor, top_k, False, MASKED, TILE)
            floor = tl.maximum(floor, kth)
        cut = tl.full([], -2147483648, tl.int64)
        above = tl.full([], 0.0, tl.float64)
        wanted = tl.full([], float("inf"), tl.float64)
        if top_p < 1.0:
            total = tl.full([], 0.0, tl.float64)
            for start in range(0, vocab, TILE):
                x, columns = _load(row, mask_row, start, vocab, temperature, MASKED, TILE)
                mass, _ = _kept(x, best, floor, cut, above, wanted, 0, False)
                total += tl.sum(mass, 0).to(tl.float64)
            wanted = top_p * total
            cut = _smallest_kept(row, mask_row, vocab, temperature, best, floor, wanted, True, MASKED, TILE)
            for start in range(0, vocab, TILE):
                x, columns = _load(row, mask_row, start, vocab, temperature, MASKED, TILE)
                mass, _ = _kept(x, best, tl.maximum(floor, cut + 1), cut, above, wanted, 0, False)
                above += tl.sum(mass, 0).to(tl.float64)
        total = tl.full([], 0.0, tl.float64)
        equals = 0
        for start in range(0, vocab, TILE):
            x, columns = _load(row, mask_row, start, vocab, temperature, MASKED, TILE)
            mass, equals = _kept(x, best, floor, cut, above, wanted, equals, True)
            total += tl.sum(mass, 0).to(tl.float64)
        target = uniform * total
        seen = tl.full([], 0.0, tl.float64)
        equals = 0
        for start in range(0, vocab, TILE):
            x, columns = _load(row, mask_row, start, vocab, temperature, MASKED, TILE)
            mass, equals = _kept(x, best, floor, cut, above, wanted, equals, True)
            of_tile = tl.sum(mass, 0).to(tl.float64)
            # Use the last tile with mass that starts at or below the target, because u < 1 may round up to the total.
            if (of_tile > 0.0) & (seen <= target):
                inside = tl.cumsum(mass.to(tl.float64), 0)
                all_inside = tl.max(inside, 0)
                share = (target - seen) / of_tile * all_inside
                beyond = tl.min(tl.where((inside > share) & (mass > 0.0), columns, vocab), 0)
                last = tl.max(tl.where(mass > 0.0, columns, 0), 0)
                token = tl.minimum(beyond, last)
            seen += of_tile
    tl.store(token_ids + index, tl.where(is_valid, token, 0).to(tl.int64))
    tl.store(valid + index, is_valid.to(tl.int64))


def draw_rows(
    logits: torch.Tensor, table: torch.Tensor, masks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row, or find its largest logit.

    Args:
        logits: float32 [rows, vocab].
        table: float64 [rows, 6], one column for each of `PARAMETERS`; a greedy row's temperature is 1.
        masks: int32 [rows, ceil(vocab / 32)], with a bit set for each token that may be drawn; if None, all may.

    Returns:
        int64 [rows] token ids, and int64 [rows]: 1 if the row's logits are a distribution, else 0.
    """
    rows, vocab = logits.shape
    # Two tensors, because in a shared one the flags of an odd number of rows would be aligned differently, which
    # compiles another kernel.
    token_ids, valid = (torch.empty(rows, dtype=torch.int64, device=logits.device) for _ in range(2))
    _draw[(rows,)](
        logits,
        table,
        logits if masks is None else masks,
        token_ids,
        valid,
        vocab,
        logits.stride(0),
        0 if masks is None else masks.stride(0),
        MASKED=masks is not None,
        TILE=min(_TILE, triton.next_power_of_2(vocab)) if INTERPRETED else _TILE,
        num_warps=_WARPS,
    )
    return token_ids, valid


def place(tensor: torch.Tensor, rows: DrawRows, values: torch.Tensor) -> None:
    if len(rows) == len(tensor):
        tensor.copy_(values)
    else:
        tensor[torch.from_numpy(rows).to(tensor.device)] = values
