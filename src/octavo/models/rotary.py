"""Rotary position embedding: frequencies, and tables of their cosines and sines."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from octavo.attention.base import AttentionBatch
from octavo.checkpoint.model_config import RopeConfig
from octavo.errors import UnsupportedModelError


@dataclass(frozen=True)
class Rotation:
    """The rotary tables with the positions of one step.

    Attributes:
        cos, sin: float32 [number of positions, rotary_dim / 2]
        positions: int64 [tokens]
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor

    @staticmethod
    def none(positions: torch.Tensor) -> Rotation:
        """No rotation: tables without frequencies."""
        empty = positions.new_empty(1, 0, dtype=torch.float32)
        return Rotation(empty, empty, torch.zeros_like(positions))

    @cached_property
    def token_cos(self) -> torch.Tensor:
        """float32 [tokens, rotary_dim / 2], the table's rows at `positions`, for operations that do not index it."""
        return self.cos[self.positions]

    @cached_property
    def token_sin(self) -> torch.Tensor:
        return self.sin[self.positions]


class RotaryTable:
    """Tables of cos and sin of position * frequency (Su et al. 2021, section 3.4.2) in float32; they grow on demand.

    Args:
        num_positions: positions that the table may hold: the model's own context. Rows of later positions, which only
            sequences with a budget reach, are computed for each step, in float64, which holds their angles exactly.
    """

    _MIN_POSITIONS = 1024

    def __init__(self, config: RopeConfig, device: torch.device, num_positions: int) -> None:
        self.num_positions = num_positions
        self.inv_freq = inverse_frequencies(config).to(device)
        self._factor = config.attention_factor
        self._cos = self._sin = self.inv_freq.new_empty(0, len(self.inv_freq))

    def tables(self, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, float32 [positions, rotary_dim / 2], for at least `limit` positions."""
        if limit > len(self._cos):
            # Powers of two, so that a growing context recomputes the table only a logarithmic number of times.
            size = max(self._MIN_POSITIONS, 1 << (limit - 1).bit_length())
            angles = torch.arange(size, dtype=torch.float32, device=self.inv_freq.device)[:, None] * self.inv_freq
            self._cos, self._sin = angles.cos().mul_(self._factor), angles.sin().mul_(self._factor)
        return self._cos, self._sin

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, float32 [tokens, rotary_dim / 2], of int64 `positions` [tokens], however large."""
        table, far = self.tables(self.num_positions), positions >= self.num_positions
        near = positions.clamp(max=self.num_positions - 1)
        angles = positions[far, None].double() * self.inv_freq.double()
        cos, sin = (each[near] for each in table)
        cos[far], sin[far] = angles.cos().float() * self._factor, angles.sin().float() * self._factor
        return cos, sin


class StepRotations(NamedTuple):
    """The angles of one step.

    Attributes:
        tables: cos and sin of each table, float32 [rows, rotary_dim / 2].
        rows: int64 [tokens], the row of each token's position.
        sink_rows: the row of each token's position for the sinks, the same as in `rows` where that is its own; None if
            no token sees sinks apart.
    """

    tables: list[tuple[torch.Tensor, torch.Tensor]]
    rows: torch.Tensor
    sink_rows: torch.Tensor | None


def step_rotations(tables: Collection[RotaryTable], batch: AttentionBatch) -> StepRotations:
    """Return the angles of a step's tokens."""
    positions, limit = batch.positions, batch.max_context_len
    sink_positions = None if batch.sinks is None else batch.sinks.positions
    if all(limit <= table.num_positions for table in tables):
        return StepRotations([table.tables(limit) for table in tables], positions, sink_positions)
    rows = torch.arange(len(positions), device=positions.device)
    if sink_positions is None:
        return StepRotations([table.rows(positions) for table in tables], rows, None)
    both = torch.cat((positions, sink_positions))
    sink_rows = torch.where(positions == sink_positions, rows, rows + len(rows))
    return StepRotations([table.rows(both) for table in tables], rows, sink_rows)


def inverse_frequencies(config: RopeConfig) -> torch.Tensor:
    """Return the inverse frequencies, float32 [rotary_dim / 2], bit for bit as in transformers' `modeling_rope_utils`.

    Raises:
        UnsupportedModelError: `frequency_factors` has the wrong length.
    """
    dim = config.rotary_dim
    inv_freq = 1.0 / (config.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    if config.frequency_factors is not None:
        if len(config.frequency_factors) != len(inv_freq):
            raise UnsupportedModelError(
                f"{len(config.frequency_factors)} RoPE frequency factors for {len(inv_freq)} frequencies"
            )
        return inv_freq / torch.tensor(config.frequency_factors, dtype=torch.float32)
    if config.kind == "linear":
        return inv_freq / config.factor
    if config.kind == "llama3":
        return _llama3_frequencies(inv_freq, config)
    if config.kind == "yarn":
        return _yarn_frequencies(inv_freq, config)
    return inv_freq


def _yarn_frequencies(inv_freq: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Scale as in YaRN (Peng et al. 2023, section 3.2): high frequencies unchanged, low ones slowed by `factor`."""
    dim, context = config.rotary_dim, config.original_max_position

    def dimension(rotations: float) -> float:
        """Return the dimension that turns so often within the original context."""
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    first, last = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last += 0.001 if first == last else 0
    slowed = ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    powers = config.theta ** (torch.arange(0, dim, 2).float() / dim)
    kept = 1 - slowed
    return 1.0 / (config.factor * powers) * (1 - kept) + inv_freq * kept


def _llama3_frequencies(inv_freq: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Scale as in Llama 3.1: short wavelengths unchanged, long ones slowed by `factor`, those between interpolated."""
    old_context = config.original_max_position
    wavelength = 2 * math.pi / inv_freq
    longest_kept = old_context / config.high_freq_factor
    shortest_slowed = old_context / config.low_freq_factor
    stretched = torch.where(wavelength > shortest_slowed, inv_freq / config.factor, inv_freq)
    smooth = (old_context / wavelength - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    between = (wavelength >= longest_kept) & (wavelength <= shortest_slowed)
    return torch.where(between, (1 - smooth) * stretched / config.factor + smooth * stretched, stretched)
