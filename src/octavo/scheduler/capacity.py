"""Which requests could ever be served: the longest sequence, and the most of them at once."""

from __future__ import annotations

import bisect
from functools import cached_property

from octavo.errors import CapacityError, ContextLengthError
from octavo.kvcache.spec import KVCacheSpec


class Capacity:
    """The limits that no waiting helps against.

    Args:
        num_blocks: of the pool, without the null block.
        max_step: tokens of a step, of which a sliding window holds blocks too.
    """

    def __init__(self, spec: KVCacheSpec, num_blocks: int, *, max_num_seqs: int, max_model_len: int, max_step: int):
        self._spec = spec
        self._num_blocks = num_blocks
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._max_step = max_step

    def check(self, num_prompt_tokens: int, max_tokens: int, n: int = 1, n_param: str = "n") -> None:
        """Refuse what can never be served, with the numbers.

        Args:
            n: sequences that are computed of one prompt.
            n_param: the parameter that says so.

        Raises:
            ContextLengthError: prompt + max_tokens is over max_model_len.
            CapacityError: one sequence needs more blocks than the pool has, or n is over max_num_seqs.
        """
        limit = self._max_model_len
        total = num_prompt_tokens + max_tokens
        if total > limit:
            raise ContextLengthError(
                f"this model's maximum context length is {limit} tokens, but {total} were requested: "
                f"{num_prompt_tokens} in the prompt and {max_tokens} for the completion (max_tokens)",
                param="max_tokens" if num_prompt_tokens < limit else "prompt",
            )
        if n > self._max_num_seqs:
            raise CapacityError(
                f"{n_param} is {n}, but at most {self._max_num_seqs} sequences run at once", param=n_param
            )
        if (blocks := self._blocks(total)) > self._num_blocks:
            raise CapacityError(
                f"{num_prompt_tokens} prompt tokens and {max_tokens} output tokens need {blocks} KV blocks of "
                f"{self._spec.block_size} tokens, but the cache has {self._num_blocks} in all",
                param="max_tokens",
            )

    @cached_property
    def max_sequence_tokens(self) -> int:
        """Prompt and output tokens of the longest sequence that `check` lets through; 0 where the pool holds none."""
        # Blocks only grow with tokens.
        lengths = range(1, self._max_model_len + 1)
        return bisect.bisect_left(lengths, True, key=lambda total: self._blocks(total) > self._num_blocks)

    def _blocks(self, total: int) -> int:
        # The last token's key and value are never needed.
        return self._spec.peak_blocks(total - 1, self._max_step)
