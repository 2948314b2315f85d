"""Limits on the requests that can ever be served: sequence length, and number of sequences at once."""

from __future__ import annotations

import bisect
from collections.abc import Mapping

from octavo.errors import CapacityError, ContextLengthError
from octavo.kvcache.spec import KVCacheSpec
from octavo.scheduler.kv_limits import KVLimits


class Capacity:
    """Checks whether a request could ever be served, however long it waits.

    Args:
        num_blocks: number of blocks in the pool, without the null block.
        max_step: maximum number of tokens in a step, for which a sliding window holds blocks too.
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
        """Refuse a request that can never be served, with the numbers in the error.

        Args:
            max_tokens: maximum number of output tokens; if 0, only the prompt is computed.
            n: number of sequences computed from one prompt.
            n_param: the name of the parameter that sets `n`.
            tenant: the tenant whose floor and cap apply.

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
                # Others' floors are the reason, but no tenant is told of another's.
                limit_is = f"at most {most} are available to this API key's tenant"
            raise CapacityError(
                f"{num_prompt_tokens} prompt tokens and {max_tokens} output tokens need {blocks} KV blocks of "
                f"{self._spec.block_size} tokens, but {limit_is}",
                param="max_tokens",
            )

    def set_limits(self, limits: Mapping[str, KVLimits]) -> None:
        """Replace the tenants' floors and caps. Thread-safe like `check`, because nothing is changed in place."""
        self._limits = limits

    def max_sequence_tokens(self, tenant: str = "") -> int:
        """Return the length of a tenant's longest sequence that `check` accepts, in tokens; 0 if none fits."""
        most = self._most_blocks(tenant)
        if self._longest[0] != most:
            # Bisect: the number of blocks never falls as tokens are added.
            lengths = range(1, self._max_model_len + 1)
            longest = bisect.bisect_left(lengths, True, key=lambda total: self._blocks(total) > most)
            self._longest = (most, longest)
            return longest
        return self._longest[1]

    def _cap(self, tenant: str) -> int:
        limits = self._limits.get(tenant)
        return self._num_blocks if limits is None or limits.cap is None else limits.cap

    def _most_blocks(self, tenant: str) -> int:
        """Return the blocks that a tenant can have if no other tenant holds more than its floor."""
        if not self._limits:
            return self._num_blocks
        kept = sum(limits.floor for other, limits in self._limits.items() if other != tenant)
        return min(self._num_blocks - kept, self._cap(tenant))

    def _blocks(self, total: int) -> int:
        # The last token's key and value are never computed.
        return self._spec.peak_blocks(total - 1, self._max_step)
