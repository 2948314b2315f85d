"""The quality loss of a KV cache codec: the same text through the same weights, with and without the codec.

    perplexity     exp of the mean negative log-likelihood of the next token, over windows of English text
    KL             mean Kullback-Leibler divergence of the next token's distribution from the unquantised cache's, nats
    top-1          share of positions whose likeliest token is the same
    needle         share of depths and lengths at which a pass key hidden in text is repeated
    diverges at    mean number of greedy tokens before the first that differs (`GREEDY_TOKENS` if none does)

Each window is computed in chunks, so that all of it except a chunk is read from the cache, as in decode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo.config import KV_CACHE_TABLE
from octavo.llm import LLM
from octavo.runner.runner import ModelRunner
from octavo.sampling_params import SamplingParams
from octavo.workloads.forward_text import CHUNK, Loss, english, log_probs, logits_of_chunks, windows_of
from octavo.workloads.plots import new_figure, save

GREEDY_TOKENS = 48
GREEDY_PROMPTS = 8
_DEPTHS = (0.1, 0.5, 0.9)
_PROMPT = 96  # tokens of a greedy prompt


@dataclass(frozen=True, slots=True)
class Quality:
    """The figures of one codec; the unquantised cache is compared with itself."""

    kv_cache_dtype: str
    bytes_per_token: int
    perplexity: float
    ppl_increase: float
    kl: float
    top1: float
    needle: float
    diverges_at: float


def runner_of(llm: LLM) -> ModelRunner:
    """Return the runner of an engine that computes in this process."""
    assert isinstance(llm.core.runner, ModelRunner), "the options name no other executor"
    return llm.core.runner


class _Measured:
    """What one engine predicts and answers.

    Args:
        windows: of text, whose tokens after the first it predicts.
        needle_lengths: numbers of tokens of text around the hidden pass key.
    """

    def __init__(self, llm: LLM, windows: Sequence[Sequence[int]], needle_lengths: Sequence[int]) -> None:
        runner = runner_of(llm)
        self.bytes_per_token = runner.arena.spec.bytes_per_token
        self.predicted = [
            torch.cat(list(log_probs(logits_of_chunks(runner.model, runner.arena, runner.attention, window[:-1]))))
            for window in windows
        ]
        prompts: list[Any] = [{"prompt_token_ids": window[:_PROMPT]} for window in windows[:GREEDY_PROMPTS]]
        greedy = SamplingParams(max_tokens=GREEDY_TOKENS, temperature=0, ignore_eos=True)
        self.answers = [out.outputs[0].token_ids for out in llm.generate(prompts, greedy, use_tqdm=False)]
        self.needle = _needle(llm, needle_lengths)


def measure(
    make: Callable[[str], LLM], codecs: Sequence[str], *, windows: int, window: int, needle_lengths: Sequence[int]
) -> list[Quality]:
    """Compare each of `codecs` with the model's own type, one engine after the other.

    Args:
        windows: number of pieces of text, of `window` tokens each, spread evenly over it.
        needle_lengths: numbers of tokens of text around the hidden pass key.
    """

    def measured(llm: LLM) -> tuple[list[list[int]], _Measured]:
        pieces = windows_of(llm.tokenizer.encode(english()), windows, window + 1, "the text")
        return pieces, _Measured(llm, pieces, needle_lengths)

    own, (pieces, plain) = _unquantised(make, measured)
    results = [_compared(own, pieces, plain, plain)]
    for codec in codecs:
        with make(codec) as llm:
            name = Path(codec).name if codec.endswith(KV_CACHE_TABLE) else runner_of(llm).arena.spec.dtype
            results.append(_compared(name, pieces, _Measured(llm, pieces, needle_lengths), plain))
    return results


def _unquantised(
    make: Callable[[str], LLM], measured: Callable[[LLM], tuple[list[list[int]], _Measured]]
) -> tuple[str, tuple[list[list[int]], _Measured]]:
    """Return the type of the model's activations, and what a cache in it gives; "auto" may be a checkpoint's codec."""
    with make("auto") as llm:
        runner = runner_of(llm)
        own = str(runner.model.dtype).removeprefix("torch.")
        if runner.arena.spec.dtype == own:
            return own, measured(llm)
    with make(own) as llm:
        return own, measured(llm)


def _compared(name: str, windows: Sequence[Sequence[int]], found: _Measured, plain: _Measured) -> Quality:
    """Return the figures of `found`, compared with those of the unquantised cache."""
    in_chunks = ([torch.split(each, CHUNK) for each in side.predicted] for side in (found, plain))
    ours, theirs = (Loss.of(windows, plain.predicted, chunks) for chunks in in_chunks)
    agree = [_common(a, b) for a, b in zip(found.answers, plain.answers, strict=True)]
    return Quality(
        kv_cache_dtype=name,
        bytes_per_token=found.bytes_per_token,
        perplexity=round(ours.perplexity, 4),
        ppl_increase=round(ours.perplexity / theirs.perplexity - 1, 6),
        kl=round(ours.kl, 6),
        top1=round(ours.agreement, 4),
        needle=round(found.needle, 4),
        diverges_at=round(sum(agree) / len(agree), 1),
    )


def hidden_key(llm: LLM, text: Sequence[int], depth: float, key: str) -> list[int]:
    """Return a prompt that asks for a pass key, which is hidden in a text at a depth from 0 to 1."""
    cut, tokenizer = int(len(text) * depth), llm.tokenizer
    hidden = tokenizer.encode(f"\n\nThe pass key is {key}. Remember it: {key} is the pass key.\n\n", False)
    return [*text[:cut], *hidden, *text[cut:], *tokenizer.encode("\n\nWhat is the pass key? The pass key is", False)]


def _needle(llm: LLM, lengths: Sequence[int]) -> float:
    """Return the share of pass keys that are repeated, over all lengths of text and depths in it."""
    tokens, prompts, keys = llm.tokenizer.encode(english()), list[Any](), list[str]()
    for i, length in enumerate(lengths):
        for depth in _DEPTHS:
            keys.append(str(10_000 + 7919 * (len(keys) + 1) % 90_000))
            text = tokens[1000 * i : 1000 * i + length]
            prompts.append({"prompt_token_ids": hidden_key(llm, text, depth, keys[-1])})
    if not prompts:
        return 0.0
    params = SamplingParams(max_tokens=12, temperature=0)
    answers = [out.outputs[0].text for out in llm.generate(prompts, params, use_tqdm=False)]
    return sum(key in answer for key, answer in zip(keys, answers, strict=True)) / len(keys)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def plot(results: Sequence[Quality], path: str) -> None:
    """Plot the increase of perplexity and KL over bytes per token."""
    figure = new_figure(10, 4)
    axes = figure.subplots(1, 2)
    for axis, name, values in (
        (axes[0], "increase of perplexity, %", [100 * r.ppl_increase for r in results]),
        (axes[1], "mean KL divergence, nats", [r.kl for r in results]),
    ):
        axis.scatter([r.bytes_per_token for r in results], values)
        for result, value in zip(results, values, strict=True):
            axis.annotate(result.kv_cache_dtype, (result.bytes_per_token, value), fontsize=8)
        axis.set_xlabel("bytes of a token's keys and values")
        axis.set_ylabel(name)
        axis.set_yscale("symlog", linthresh=0.01)
    save(figure, path)
