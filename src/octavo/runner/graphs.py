"""Decode steps as CUDA graphs: recorded once for each padded size, then replayed in one launch.

    sequences   1 2 3 4 5 … 8 9 … 16 … 256         a step is padded to the next size
    context     256 │ 512  1024 …                  all within 256 tokens, or their mean to the next power of two

Only pure decode steps have graphs, because their shapes repeat. Before it serves, the engine records as many as it has
time for, starting with short contexts. Others are recorded once their sizes have occurred often enough to be expected
again, because recording takes the time of several steps, in which no request gets a token. Until then such a step is
launched kernel by kernel.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch

from octavo.attention.base import AttentionBackend, AttentionBatch
from octavo.kvcache.splits import SPLIT
from octavo.models.decoder import Decoder
from octavo.runner.inputs import StepInputs, padded_size
from octavo.storage.layer_kv import LayerKV

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
"""Records what a function launches, and returns a function that launches it again. Calls the function at least once."""

logger = logging.getLogger(__name__)

_LEAST_CONTEXT = SPLIT
_RECORD_AFTER = 10  # launches
# Memory that recording leaves free for other steps.
_LEFT_FREE = 1 << 30


def padded_context(longest: int, mean: int, max_model_len: int) -> int:
    """Return 256 if the longest context fits, else the first power of two that is not below their mean.

    The longest decides only whether each context is one split of the attention; programs are launched for their sum.
    """
    least = longest if longest <= _LEAST_CONTEXT else max(mean, _LEAST_CONTEXT + 1)
    return min(max(_LEAST_CONTEXT, 1 << (least - 1).bit_length()), max_model_len)


class DecodeGraphs:
    """Computes decode steps by replaying recorded ones.

    Args:
        inputs: the buffers of the steps' inputs, padded to at least the size of the step.
        capture: `CudaCapture`; tests pass another.

    Attributes:
        record_after: how many times sizes must occur before their step is recorded.
    """

    def __init__(
        self,
        model: Decoder,
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
        self._launches: Counter[tuple[int, int]] = Counter()
        self._may_record = True
        self.record_after = _RECORD_AFTER
        # Reserve now: tables that grew later would move away from the addresses in recorded steps.
        model.reserve_positions(max_model_len)
        # One buffer for all sizes, so that graphs do not keep their own logits.
        self._logits = torch.empty(inputs.capacity, model.vocab_size, dtype=torch.float32, device=model.device)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(sequences, context) of the steps recorded so far."""
        return list(self._replays)

    def logits(self, batch: AttentionBatch) -> torch.Tensor:
        """Compute the step in the input buffers: float32 [num_seqs, vocab_size], overwritten by the next call."""
        size = padded_size(batch.num_seqs)
        total = batch.total_decode_len + size - batch.num_seqs  # padding is sequences of one token
        sizes = size, padded_context(batch.max_context_len, -(-total // size), self._max_model_len)
        replay = self._replays.get(sizes)
        if replay is None:
            self._launches[sizes] += 1
            step = self._step(*sizes)
            replay = self._record(sizes) or step if self._launches[sizes] >= self.record_after else step
        replay()
        return self._logits[: batch.num_seqs]

    def record(self, seconds: float) -> int:
        """Record steps for at most about `seconds`, all sizes of one context before the next; returns how many."""
        self._inputs.pad(0)
        self._inputs.push()
        end = time.perf_counter() + seconds
        count = 0
        for sizes in self._all_sizes():
            if time.perf_counter() > end or self._record(sizes) is None:
                break
            count += 1
        return count

    def _all_sizes(self) -> Iterator[tuple[int, int]]:
        # The largest first, so that their memory is enough for the others.
        counts = sorted({padded_size(count) for count in range(1, self._inputs.capacity + 1)}, reverse=True)
        context = 0
        while context < self._max_model_len:
            context = padded_context(context + 1, context + 1, self._max_model_len)
            yield from ((count, context) for count in counts)

    def _record(self, sizes: tuple[int, int]) -> Replay | None:
        """Record a step; None if that fails, as for too little memory: then it is always launched kernel by kernel."""
        step = self._replays[sizes] = self._step(*sizes)
        if not self._may_record:
            return None
        try:
            replay = self._replays[sizes] = self._capture(step)
        except torch.OutOfMemoryError as error:
            logger.warning("decodes of %d sequences within %d tokens are not recorded: %s", *sizes, error)
            return None
        except RuntimeError:
            # A step that cannot be recorded can still be launched; if the GPU itself has failed, that fails too.
            logger.exception(
                "decodes of %d sequences within %d tokens cannot be recorded; no others will be: steps are launched "
                "kernel by kernel, as with --enforce-eager",
                *sizes,
            )
            self._may_record = False
            return None
        return replay

    def _step(self, size: int, context: int) -> Callable[[], None]:
        inputs = self._inputs
        longest = context if context <= _LEAST_CONTEXT else self._max_model_len
        token_ids, batch, indices = inputs.views(size, size, size)
        batch.max_context_len, batch.total_decode_len = longest, size * context

        def step() -> None:
            logits = self._model.forward(token_ids, batch, self._kv, self._attention, indices)
            self._logits[:size].copy_(logits)

        return step


class CudaCapture:
    """Records on its own stream; all graphs share one memory pool, because no two run at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], None]) -> Replay:
        free, _ = torch.cuda.mem_get_info(self._stream.device)
        if free < _LEFT_FREE:
            # Memory that earlier steps used is free, but torch keeps it.
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info(self._stream.device)
        if free < _LEFT_FREE:
            raise torch.OutOfMemoryError(
                f"{free >> 20} MiB of the GPU's memory are free, and {_LEFT_FREE >> 20} MiB are kept for other steps; "
                "a smaller --gpu-memory-utilization leaves more"
            )
        # Run once without recording, because kernels must not be compiled, nor libraries allocate their workspaces,
        # while a graph is recorded. Storing the same keys and values twice does no harm.
        computing = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(computing)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            step()
            # Recording allocates from the graphs' pool, and must not wait for memory that is still in use.
            self._stream.synchronize()
            # Not `torch.cuda.graph`, which collects Python's garbage and empties torch's cache of memory each time.
            # Other threads (stores of swapped blocks) may use the GPU meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step()
            finally:
                graph.capture_end()
        computing.wait_stream(self._stream)
        replay: Replay = graph.replay
        return replay
