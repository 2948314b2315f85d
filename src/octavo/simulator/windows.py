"""What layers with sliding windows save, for estimates: they do not attend to tokens before the window.

                 window
            ┌──────────────┐
    tokens  0 1 2 3 4 5 6 7 8
            └ saved ┘       └ query

`StepTimes` takes all layers to attend to the whole context. Measured step times are fitted as they are, so nothing is
taken off them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.kvcache.spec import KVCacheSpec
from octavo.scheduler.step_time import StepTimes


@dataclass(frozen=True, slots=True)
class WindowedLayers:
    """Layers with windows of one size.

    Attributes:
        size: tokens that a query attends to, itself included.
        per_context_token: seconds to read one token's keys and values in these layers.
        per_chunk_work: seconds per pair of a query of a chunk and a token, in these layers.
    """

    size: int
    per_context_token: float
    per_chunk_work: float

    def saved(self, starts: Sequence[int], lengths: Sequence[int]) -> float:
        """Return the seconds by which a step is shorter; `starts` and `lengths` are those of its plan."""
        size, tokens, work = self.size, 0, 0.0
        for start, length in zip(starts, lengths, strict=True):
            # The first query reaches back furthest, to `start + 1 - size`.
            if start >= size:
                tokens += start + 1 - size
                work += (length - 1) * (start + 0.5 * length - size)
            elif length > 1 and (beyond := start + length - size) > 0:
                work += 0.5 * beyond * (beyond - 1)
        return self.per_context_token * tokens + self.per_chunk_work * work


def windows_of(times: StepTimes, spec: KVCacheSpec, max_model_len: int) -> tuple[WindowedLayers, ...]:
    """Return the layers with windows that contexts of up to `max_model_len` tokens exceed; `times` know no windows."""
    layers = list(zip(spec.layers, spec.formats, strict=True))
    attended = sum(layer.key_dim + layer.value_dim for layer in spec.layers)
    found = []
    for size in sorted({layer.sliding_window for layer in spec.layers if layer.sliding_window is not None}):
        if size >= max_model_len:
            continue
        own = [(layer, format) for layer, format in layers if layer.sliding_window == size]
        bytes_share = sum(layer.token_bytes(format) for layer, format in own) / spec.bytes_per_token
        work_share = sum(layer.key_dim + layer.value_dim for layer, _ in own) / attended
        found.append(WindowedLayers(size, times.per_context_token * bytes_share, times.per_chunk_work * work_share))
    return tuple(found)
