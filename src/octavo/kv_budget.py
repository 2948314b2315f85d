"""KV budgets: how much of its keys and values a sequence keeps (docs/serve/kv_budgets.md).

    mode          keeps             reads in a step                                          published as
    sinks         `tokens` tokens   all it keeps: the first block, and the most recent ones  StreamingLLM (Xiao 2024)
    bounded       `tokens` tokens   all it keeps: the first block, both ends of the prompt,  H2O (Zhang 2023), SnapKV
                  and the prompt,   the most recent ones, and those with the most attention  (Li 2024), by blocks as
                  while it lasts    since they were written (`kvcache/attended.py`);         PagedEviction (2025)
                                    with `layers`, in groups of like layers, as many in the  Kim and Jung (2025)
                                    mean of the groups
    sparse_read   all tokens        `tokens` of them: the first block, the most recent ones, Quest (Tang et al. 2024)
                                    and blocks whose keys may score highest in a layer;
                                    with `layers`, as many in the mean of the layers         Kim and Jung (2025)

A budget that a sequence never exceeds changes nothing: it computes the same bits as without one.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError, FieldError, shown
from octavo.option import json_object
from octavo.text_file import read_toml, write_text

MODES = ("sinks", "bounded", "sparse_read")
MEASURED_ROWS = 64
"""The last tokens of a prompt, whose attention is measured."""

BUDGET_FILE = ".toml"
_MOST_FILE_BYTES = 1 << 20
_SHARE_OF_RECENT = 8
_SHARE_OF_LEAST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class KVBudget:
    """A budget of one sequence.

    Attributes:
        mode: see above.
        tokens: the most tokens whose keys and values are kept, or read, in layers without a sliding window.
        dense_prompt: but of sinks, whether tokens of the prompt read everything, so that it is exact and shared. If
            not, only its first `tokens` do: a budget's loss can be measured on a text, and bounded holds no more.
        layers: of bounded, the entropy of attention in each layer without a sliding window (`calibration/entropy.py`),
            and of sparse_read, in each that reads sparsely: `tokens` times their number is divided by it; empty:
            evenly. A server's apply to all requests.
    """

    mode: str
    tokens: int
    dense_prompt: bool = True
    layers: tuple[float, ...] = ()

    @property
    def slides(self) -> bool:
        """Whether it keeps a window of positions, and lets go of what the window has passed."""
        return self.mode == "sinks"

    @property
    def measures(self) -> bool:
        """Whether it lets go of the blocks that have least of the attention."""
        return self.mode == "bounded"

    @property
    def evicts(self) -> bool:
        """Whether it frees the blocks of tokens beyond it."""
        return self.mode != "sparse_read"

    def num_dense(self, num_prompt_tokens: int) -> int:
        """Return how many of a prompt's tokens a sequence is certain to keep until they are computed."""
        return num_prompt_tokens if self.dense_prompt else min(num_prompt_tokens, self.tokens)

    def first_eviction(self, num_prompt_tokens: int) -> int:
        """Return the number of computed tokens at which a sequence lets go of its first block."""
        return max(self.tokens, self.num_dense(num_prompt_tokens)) if self.measures else self.tokens + 1

    def tokens_until_eviction(self, start: int, num_prompt_tokens: int, block_size: int) -> int:
        """Return how many tokens from position `start` on see the same blocks, and those after them, for certain.

        What a measured sequence lets go of is not known before its tokens have been computed, so no step goes on.
        """
        if not self.measures:
            return sys.maxsize
        first = self.first_eviction(num_prompt_tokens)
        return first - start if start < first else block_size - start % block_size

    def measured_from(self, num_prompt_tokens: int, max_tokens: int) -> int | None:
        """Return the first position whose attention is measured; None if a sequence never exceeds its budget."""
        if not self.measures or num_prompt_tokens + max_tokens - 1 <= self.tokens:
            return None
        return max(0, self.num_dense(num_prompt_tokens) - MEASURED_ROWS)

    def num_recent(self, block_size: int) -> int:
        """Return how many of the blocks that a token reads are the most recent ones: an eighth, at least one."""
        return max(1, self.tokens // block_size // _SHARE_OF_RECENT)

    def blocks_read(self, block_size: int) -> tuple[int, ...]:
        """Return how many blocks a token reads in each of `layers`, or in every layer."""
        return self.divided(self.layers, block_size) if self.layers else (self.tokens // block_size,)

    def divided(self, entropies: Sequence[float], block_size: int) -> tuple[int, ...]:
        """Return how many blocks each of several layers, or groups of as many layers, keeps or reads.

        Each has a quarter of the mean at least, and the rest in proportion to its entropy; fractions of blocks go to
        those that lack most of one (Kim and Jung, "Entropy-guided KV caching", Mathematics 13(15):2366).
        """
        mean, count, entropy = self.tokens // block_size, len(entropies), math.fsum(entropies)
        least = min(mean, max(mean // _SHARE_OF_LEAST, self.num_recent(block_size) + 1))
        exact = [count * (mean - least) * each / entropy for each in entropies]
        left = count * (mean - least) - sum(map(int, exact))
        lacking = set(sorted(range(count), key=lambda index: int(exact[index]) - exact[index])[:left])
        return tuple(least + int(blocks) + (index in lacking) for index, blocks in enumerate(exact))

    def reads_all_before(self, num_prompt_tokens: int, block_size: int) -> int:
        """Return the first position whose token may be computed from fewer than all tokens before it."""
        if self.measures:
            return self.first_eviction(num_prompt_tokens)
        within = self.tokens if self.evicts else min(self.blocks_read(block_size)) * block_size
        return max(within, num_prompt_tokens) if self.dense_prompt and not self.evicts else within

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> KVBudget:
        """Read a JSON object; raises `FieldError` naming what is wrong with it."""
        names = [field.name for field in fields(cls)]
        for name in given:
            if name not in names:
                raise FieldError("kv_budget", f"has no {shown(name)}; its fields are {', '.join(names)}")
        if (mode := given.get("mode")) not in MODES:
            raise FieldError("kv_budget.mode", f"must be one of {', '.join(MODES)}, got {shown(mode)}")
        tokens = given.get("tokens")
        if type(tokens) is not int or tokens < 1:
            raise FieldError("kv_budget.tokens", f"must be a positive integer, got {shown(tokens)}")
        if type(dense := given.get("dense_prompt", True)) is not bool or ("dense_prompt" in given and mode == "sinks"):
            raise FieldError("kv_budget.dense_prompt", "must be true or false; the mode must not be sinks")
        layers = given.get("layers", ())
        if not isinstance(layers, list | tuple) or ("layers" in given and (mode == "sinks" or not layers)):
            raise FieldError("kv_budget.layers", "must be a list of the layers' entropies; the mode must not be sinks")
        for entropy in layers:
            if type(entropy) not in (int, float) or not 0 < entropy <= 1:
                raise FieldError("kv_budget.layers", f"must be above 0 and at most 1, got {shown(entropy)}")
        return cls(mode=str(mode), tokens=tokens, dense_prompt=dense, layers=tuple(map(float, layers)))

    @classmethod
    def parse(cls, given: str | Mapping[str, Any]) -> KVBudget:
        """Read an option, a JSON object, its text, or a .toml file; raises `ConfigError`."""
        if isinstance(given, str) and given.endswith(BUDGET_FILE):
            values = read_toml(given, "the KV budget", _MOST_FILE_BYTES).parsed
        else:
            values = json_object(given, "kv_budget")
        try:
            return cls.of(values)
        except FieldError as error:
            raise ConfigError(str(error)) from error

    def _given(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not True and value != ()}

    def __str__(self) -> str:
        return json.dumps(self._given())

    def write(self, path: Path, comment: str) -> None:
        """Write a file for `parse`; raises `ConfigError` if that is impossible."""
        lines = [f"# {comment}", *(f"{name} = {json.dumps(value)}" for name, value in self._given().items())]
        write_text(path, "\n".join(lines) + "\n", "the KV budget")


def choose_budget(
    given: KVBudget | None,
    default: KVBudget | None,
    *,
    block_size: int,
    longest: int,
    refusal: str,
    measures_refusal: str = "",
) -> KVBudget | None:
    """Return the budget of a request; None if it keeps everything.

    Args:
        given: the request's own.
        default: the engine's, which is also the most that a request may have.
        longest: context length of the model, beyond which it was not trained to attend.
        refusal: why the model cannot have budgets; empty if it can.
        measures_refusal: why attention cannot be measured.

    Raises:
        FieldError: the request's budget is not within the engine's, or makes no sense here.
    """
    budget = default if given is None else given
    if budget is None:
        return None
    if refusal:
        raise FieldError("kv_budget", f"is not possible here: {refusal}")
    if budget.measures and measures_refusal:
        raise FieldError("kv_budget.mode", f"{budget.mode} is not possible here: {measures_refusal}")
    if not budget.evicts and default is None:
        raise FieldError(
            "kv_budget.mode", f"{budget.mode} needs bounds of keys in the blocks: start the server with --kv-budget"
        )
    if given is not None and default is not None and (given.mode != default.mode or given.tokens > default.tokens):
        raise FieldError("kv_budget", f"must be within this server's, {default}, got {given}")
    if default is not None and budget.layers != default.layers:
        if budget.layers:
            raise FieldError("kv_budget.layers", "can be set for the server only: leave it out of requests")
        budget = replace(budget, layers=default.layers)
    if not 2 * block_size <= budget.tokens <= longest:
        numbers = f"must be from {2 * block_size}, two KV blocks, to {longest}, the model's context"
        raise FieldError("kv_budget.tokens", f"{numbers}, got {budget.tokens}")
    return budget
