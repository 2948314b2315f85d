"""Row-wise kernels between the matrix products: normalisation with the residual sum, and gated activations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.attention.triton.launch import INTERPRETED, padded

_GATED_AT_ONCE = 1024


# Sizes that change between steps must not be specialised, because each compilation takes seconds.
@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x, residual, weight, out, num_rows, x_stride, eps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, PADDED)
    mask = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    element = out.dtype.element_ty
    values = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    if ADD:
        place = residual + rows[:, None] * WIDTH + columns[None, :]
        # The sum is rounded before it is normalised, as if it were a separate tensor.
        values = (values + tl.load(place, mask=mask, other=0.0).to(tl.float32)).to(element)
        tl.store(place, values, mask=mask)
        values = values.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(values * values, 1) / WIDTH + eps)
    normalised = (values * factor[:, None]).to(element).to(tl.float32)
    of_weight = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + rows[:, None] * WIDTH + columns[None, :], (normalised * of_weight[None, :]).to(element), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _gate(
    gate_up, out, num_rows, stride,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    element = out.dtype.element_ty
    place = gate_up + rows[:, None] * stride + columns[None, :]
    x = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(place + WIDTH, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        # 0.5 x (1 + tanh(y)) = x / (1 + e^-2y), y = sqrt(2 / pi) (x + 0.044715 x^3)
        activated = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        activated = x / (1.0 + tl.exp(-x))
    activated = activated.to(element).to(tl.float32)
    tl.store(out + rows[:, None] * WIDTH + columns[None, :], (activated * up).to(element), mask=mask)


def _rows_at_once(num_rows: int) -> int:
    return padded(min(num_rows, 64)) if INTERPRETED else 1


def _warps(width: int) -> int:
    return min(16, max(1, width // 256))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x [rows, width] normalised, times weight [width]."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _normalise(x, None, weight, out, eps)
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `rms_norm` of x + residual; the sum is stored in `residual` [rows, width], which must be contiguous."""
    out = torch.empty_like(residual)
    _normalise(x, residual, weight, out, eps)
    return out


def _normalise(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, out: torch.Tensor, eps: float
) -> None:
    num_rows, width = x.shape
    rows = _rows_at_once(num_rows)
    _rms_norm[(-(-num_rows // rows),)](
        x,
        out if residual is None else residual,
        weight,
        out,
        num_rows,
        x.stride(0),
        eps,
        WIDTH=width,
        PADDED=padded(width),
        ROWS=rows,
        ADD=residual is not None,
        num_warps=padded(_warps(width)),
    )


def gate(gate_up: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    """Return activation(gate) * up [rows, n] for gate_up [rows, 2 n] = | gate | up |, with SiLU or tanh GELU."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    rows, columns = _rows_at_once(num_rows), min(padded(width), _GATED_AT_ONCE)
    _gate[(-(-num_rows // rows), -(-width // columns))](
        gate_up, out, num_rows, gate_up.stride(0), WIDTH=width, COLUMNS=columns, ROWS=rows, GELU=gelu, num_warps=4
    )
    return out
