"""Which requests could ever be served: the longest sequence, and the most of them at once."""

from __future__ import annotations

import bisect
from collections.abc import Mapping

from octavo.errors import CapacityError, ContextLengthError
from octavo.kvcache.spec import KVCacheSpec
from octavo.scheduler.kv_limits import KVLimits


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
        self._limits: Mapping[str, KVLimits] = {}
        self._longest = (-1, 0)  # blocks, and the longest sequence that they hold

    def check(self, num_prompt_tokens: int, max_tokens: int, n: int = 1, n_param: str = "n", tenant: str = "") -> None:
        """Refuse what can never be served, with the numbers.

        Args:
            max_tokens: 0: the prompt is computed to its end, and nothing after it.
            n: sequences that are computed of one prompt.
            n_param: the parameter that says so.
            tenant: whose floor and cap count.

        Raises:
            ContextLengthError: prompt + max_tokens is over max_model_len.
            CapacityError: one sequence needs more blocks than its tenant can have, or n is over max_num_seqs.
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
        if (blocks := self._blocks(num_prompt_tokens + max(1, max_tokens))) > (most := self._most_blocks(tenant)):
            if most == self._num_blocks:
                limit_is = f"the cache has {most} in all"
            elif most == self._cap(tenant):
                limit_is = f"this API key's tenant may hold {most} at once (kv_cap)"
            else:
                kept = self._num_blocks - most
                limit_is = f"of the {self._num_blocks} of the cache {kept} are kept for other tenants (kv_floor)"
            raise CapacityError(
                f"{num_prompt_tokens} prompt tokens and {max_tokens} output tokens need {blocks} KV blocks of "
                f"{self._spec.block_size} tokens, but {limit_is}",
                param="max_tokens",
            )

    def set_limits(self, limits: Mapping[str, KVLimits]) -> None:
        """Tenants' floors and caps from now on. Thread-safe, as `check` is: nothing is changed in place."""
        self._limits = limits

    def max_sequence_tokens(self, tenant: str = "") -> int:
        """Prompt and output tokens of a tenant's longest sequence that `check` lets through; 0 where none fits."""
        most = self._most_blocks(tenant)
        if self._longest[0] != most:
            # Blocks only grow with tokens.
            lengths = range(1, self._max_model_len + 1)
            longest = bisect.bisect_left(lengths, True, key=lambda total: self._blocks(total) > most)
            self._longest = (most, longest)
            return longest
        return self._longest[1]

    def _cap(self, tenant: str) -> int:
        limits = self._limits.get(tenant)
        return self._num_blocks if limits is None or limits.cap is None else limits.cap

    def _most_blocks(self, tenant: str) -> int:
        """Blocks that a tenant can have when nobody else holds more than its floor."""
        if not self._limits:
            return self._num_blocks
        kept = sum(limits.floor for other, limits in self._limits.items() if other != tenant)
        return min(self._num_blocks - kept, self._cap(tenant))

    def _blocks(self, total: int) -> int:
        # The last token's key and value are never needed.
        return self._spec.peak_blocks(total - 1, self._max_step)
