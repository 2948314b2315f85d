"""Rotary position embedding: frequencies, and tables of their cosines and sines."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
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

        | positions of the model's context | a chunk of later positions | another | …

    Args:
        num_positions: length of the model's context. Only sequences with a budget reach later positions, whose chunks
            are computed in float64, which holds their angles exactly.
    """

    CHUNK = 256
    _MIN_POSITIONS = 1024

    def __init__(self, config: RopeConfig, device: torch.device, num_positions: int) -> None:
        self.inv_freq = inverse_frequencies(config).to(device)
        self._factor = config.attention_factor
        self._first_chunk = self._size(num_positions)
        self._cos = self._sin = self.inv_freq.new_empty(0, len(self.inv_freq))

    def tables(self, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, float32 [rows, rotary_dim / 2], for at least `limit` positions of the context."""
        if limit > len(self._cos):
            angles = torch.arange(self._size(limit), dtype=torch.float32, device=self.inv_freq.device)
            self._cos, self._sin = self._turned(angles[:, None] * self.inv_freq)
        return self._cos, self._sin

    def put_chunk(self, index: int, first: int) -> None:
        """Compute the rows of `CHUNK` positions from `first` on, in place of the chunk that has this index."""
        row = self._first_chunk + index * self.CHUNK
        self.tables(self._first_chunk)
        if row + self.CHUNK > len(self._cos):
            more = self._cos.new_empty((index + 1) * self.CHUNK, len(self.inv_freq))  # twice as many chunks
            self._cos, self._sin = torch.cat((self._cos, more)), torch.cat((self._sin, more))
        positions = torch.arange(first, first + self.CHUNK, dtype=torch.float64, device=self.inv_freq.device)
        cos, sin = self._turned(positions[:, None] * self.inv_freq.double())
        self._cos[row : row + self.CHUNK], self._sin[row : row + self.CHUNK] = cos, sin

    def row(self, index: int) -> int:
        """Return the first row of the chunk that has this index."""
        return self._first_chunk + index * self.CHUNK

    def _turned(self, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return angles.cos().float().mul_(self._factor), angles.sin().float().mul_(self._factor)

    @classmethod
    def _size(cls, limit: int) -> int:
        # Powers of two, so that a growing context recomputes the table only a logarithmic number of times.
        return max(cls._MIN_POSITIONS, 1 << (limit - 1).bit_length())


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


class RotaryTables(dict[RopeConfig, RotaryTable]):
    """A model's rotary tables, all with the same rows.

    Chunks of positions beyond the context are kept while sequences advance through them, in memory that depends on the
    number of sequences and not on their lengths.
    """

    _MOST_CHUNKS = 64  # unless a step needs more than half as many

    def __init__(self, ropes: Iterable[RopeConfig | None], device: torch.device, num_positions: int) -> None:
        super().__init__({rope: RotaryTable(rope, device, num_positions) for rope in ropes if rope is not None})
        self._num_positions = num_positions
        self._chunks: dict[int, int] = {}  # index in the tables, by first position / CHUNK
        self._free: list[int] = []

    def reserve(self, num_positions: int) -> None:
        """Compute the tables for so many positions now, so that no step within the context moves them."""
        self._reserved = [table.tables(min(num_positions, self._num_positions)) for table in self.values()]

    def of_step(self, batch: AttentionBatch) -> StepRotations:
        """Return the angles of a step's tokens."""
        positions, limit = batch.positions, batch.max_context_len
        sink_rows = None if batch.sinks is None else batch.sinks.positions  # within the context, unless its own
        if limit <= self._num_positions or not self:
            return StepRotations([table.tables(limit) for table in self.values()], positions, sink_rows)
        rows = torch.from_numpy(self._rows(positions.cpu().numpy())).to(positions.device)
        if sink_rows is not None:
            sink_rows = torch.where(sink_rows == positions, rows, sink_rows)
        return StepRotations([table.tables(self._num_positions) for table in self.values()], rows, sink_rows)

    def _rows(self, positions: np.ndarray) -> np.ndarray:
        size, far = RotaryTable.CHUNK, positions >= self._num_positions
        numbers, inverse = np.unique(positions[far] // size, return_inverse=True)
        wanted = numbers.tolist()
        if any(number not in self._chunks for number in wanted):
            self._put_chunks(wanted)
        first_chunk = next(iter(self.values())).row(0)
        indices = np.array([self._chunks[number] for number in wanted], dtype=np.int64)
        rows = positions.copy()
        rows[far] = first_chunk + indices[inverse] * size + positions[far] % size
        return rows

    def _put_chunks(self, wanted: list[int]) -> None:
        if len(self._chunks) + len(wanted) > max(self._MOST_CHUNKS, 2 * len(wanted)):
            self._free += [self._chunks.pop(number) for number in self._chunks.keys() - set(wanted)]
        for number in wanted:
            if number not in self._chunks:
                index = self._chunks[number] = self._free.pop() if self._free else len(self._chunks)
                for table in self.values():
                    table.put_chunk(index, number * RotaryTable.CHUNK)


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
