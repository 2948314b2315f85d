"""Decode steps as CUDA graphs: recorded once for each padded size, then replayed in one launch.

    sequences   1 2 3 4 5 … 8 9 … 16 … 256         a step is padded to the next size
    context     256  512  1024 …                   and its longest context to the next power of two

A graph is recorded when its sizes first come up. Only pure decode steps have one: their shapes repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from octavo.attention.base import AttentionBackend
from octavo.models.decoder import LlamaDecoder
from octavo.runner.step_inputs import StepInputs, padded_size
from octavo.storage.layer_kv import LayerKV

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
"""Records what a function launches, and gives what launches it all again. Runs the function at least once."""

_LEAST_CONTEXT = 256


def padded_context(max_context_len: int, max_model_len: int) -> int:
    """The power of two that holds a context, from 256 up to the longest there is."""
    return min(max(_LEAST_CONTEXT, 1 << (max_context_len - 1).bit_length()), max_model_len)


class DecodeGraphs:
    """Computes decode steps by replaying recorded ones.

    Args:
        inputs: where each step finds its numbers, padded to at least the size of the step.
        capture: `CudaCapture()`; tests have another.
    """

    def __init__(
        self,
        model: LlamaDecoder,
        kv: Sequence[LayerKV],
        attention: AttentionBackend,
        inputs: StepInputs,
        capture: Capture,
        *,
        max_model_len: int,
    ) -> None:
        self._model = model
        self._kv = kv
        self._attention = attention
        self._inputs = inputs
        self._capture = capture
        self._max_model_len = max_model_len
        self._replays: dict[tuple[int, int], Replay] = {}
        # Tables that grew later would lie elsewhere than where recorded steps look.
        model.reserve_positions(max_model_len)
        # One buffer for all sizes: logits of their own would stay in each graph's memory.
        self._logits = torch.empty(inputs.capacity, model.vocab_size, dtype=torch.float32, device=model.device)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(sequences, context) of the steps recorded so far."""
        return list(self._replays)

    def logits(self, num_seqs: int, max_context_len: int) -> torch.Tensor:
        """float32 [num_seqs, vocab_size] of the step that lies in the inputs; the next call writes over them."""
        size, context = padded_size(num_seqs), padded_context(max_context_len, self._max_model_len)
        replay = self._replays.get((size, context))
        if replay is None:
            replay = self._replays[size, context] = self._capture(self._step(size, context))
        replay()
        return self._logits[:num_seqs]

    def _step(self, size: int, context: int) -> Callable[[], None]:
        inputs, batch = self._inputs, self._inputs.batch(size, context)

        def step() -> None:
            logits = self._model.forward(
                inputs.device_token_ids(size), batch, self._kv, self._attention, inputs.logits_indices(size)
            )
            self._logits[:size].copy_(logits)

        return step


class CudaCapture:
    """Records on a stream of its own; all graphs share one pool of memory, since no two run at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], None]) -> Replay:
        # Once without recording: kernels are compiled and libraries take their workspaces, neither of which may happen
        # while a graph is recorded. That it stores the same keys and values again does no harm.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            step()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads (stores of swapped blocks) may use the GPU meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            step()
        replay: Replay = graph.replay
        return replay
