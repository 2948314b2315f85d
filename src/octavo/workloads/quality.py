"""The quality loss of a KV cache codec: the same text through the same weights, with and without the codec.

    perplexity     exp of the mean negative log-likelihood of the next token, over windows of English text
    KL             mean Kullback-Leibler divergence of the next token's distribution from the unquantised cache's, nats
    top-1          share of positions whose likeliest token is the same
    needle         share of depths and lengths at which a pass key hidden in text is repeated
    diverges at    mean number of greedy tokens before the first that differs (`GREEDY_TOKENS` if none does)

Each window is computed in chunks, so that all of it except a chunk is read from the cache, as in decode.
"""

from __future__ import annotations

import math
import pydoc_data.topics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo.config import KV_CACHE_TABLE
from octavo.llm import LLM
from octavo.runner.runner import ModelRunner
from octavo.sampling_params import SamplingParams
from octavo.workloads.forward_text import CHUNK, logits_of_chunks
from octavo.workloads.plots import new_figure, save

GREEDY_TOKENS = 48
GREEDY_PROMPTS = 8
_DEPTHS = (0.1, 0.5, 0.9)


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


@dataclass(frozen=True, slots=True)
class Readings:
    """The measurements of one engine that are compared."""

    bytes_per_token: int
    log_probs: list[torch.Tensor]
    nll: float
    needle: float
    greedy: list[list[int]]


def english() -> str:
    """Return Python's own language reference, which every installation has."""
    return "\n\n".join(text.strip() for _, text in sorted(pydoc_data.topics.topics.items()))


def read(llm: LLM, text: str, *, windows: int, window: int, needle_lengths: Sequence[int]) -> Readings:
    """Take all measurements of one engine.

    Args:
        windows: number of pieces of text, of `window` tokens each, spread evenly over it.
        needle_lengths: numbers of tokens of text around the hidden pass key.
    """
    tokens = llm.tokenizer.encode(text)
    last = max(0, len(tokens) - window - 1)
    starts = [last * i // max(1, windows - 1) for i in range(windows)]
    runner = llm.core.runner
    assert isinstance(runner, ModelRunner)
    log_probs: list[torch.Tensor] = []
    total, count = 0.0, 0
    for start in starts:
        piece = tokens[start : start + window + 1]
        found = next_token_log_probs(runner, piece[:-1])
        total -= found.gather(1, torch.tensor(piece[1:])[:, None]).double().sum().item()
        count += len(piece) - 1
        log_probs.append(found)
    prompts: list[Any] = [{"prompt_token_ids": tokens[start : start + 96]} for start in starts[:GREEDY_PROMPTS]]
    greedy = SamplingParams(max_tokens=GREEDY_TOKENS, temperature=0, ignore_eos=True)
    answers = [out.outputs[0].token_ids for out in llm.generate(prompts, greedy, use_tqdm=False)]
    return Readings(
        runner.arena.spec.bytes_per_token, log_probs, total / count, _needle(llm, tokens, needle_lengths), answers
    )


def compare(name: str, found: Readings, plain: Readings) -> Quality:
    """Return the figures of `found`, compared with those of the unquantised cache."""
    kl, same, count = 0.0, 0, 0
    for ours, theirs in zip(found.log_probs, plain.log_probs, strict=True):
        for first in range(0, len(ours), CHUNK):  # a few rows of the vocabulary at a time
            a, b = theirs[first : first + CHUNK], ours[first : first + CHUNK]
            kl += (a.exp() * (a - b)).sum().item()
            same += int((a.argmax(1) == b.argmax(1)).sum())
            count += len(a)
    agree = [_common(a, b) for a, b in zip(found.greedy, plain.greedy, strict=True)]
    perplexity = math.exp(found.nll)
    return Quality(
        kv_cache_dtype=name,
        bytes_per_token=found.bytes_per_token,
        perplexity=round(perplexity, 4),
        ppl_increase=round(perplexity / math.exp(plain.nll) - 1, 6),
        kl=round(max(0.0, kl / count), 6),
        top1=round(same / count, 4),
        needle=round(found.needle, 4),
        diverges_at=round(sum(agree) / len(agree), 1),
    )


def measure(
    make: Callable[[str], LLM], codecs: Sequence[str], *, windows: int, window: int, needle_lengths: Sequence[int]
) -> list[Quality]:
    """Compare each of `codecs` with the model's own type, one engine after the other."""
    text = english()

    def readings(llm: LLM) -> Readings:
        return read(llm, text, windows=windows, window=window, needle_lengths=needle_lengths)

    own, plain = _unquantised(make, readings)
    results = [compare(own, plain, plain)]
    for codec in codecs:
        with make(codec) as llm:
            assert isinstance(llm.core.runner, ModelRunner)
            name = Path(codec).name if codec.endswith(KV_CACHE_TABLE) else llm.core.runner.arena.spec.dtype
            results.append(compare(name, readings(llm), plain))
    return results


def _unquantised(make: Callable[[str], LLM], readings: Callable[[LLM], Readings]) -> tuple[str, Readings]:
    """Return the type of the model's activations, and what a cache in it gives; "auto" may be a checkpoint's codec."""
    with make("auto") as llm:
        runner = llm.core.runner
        assert isinstance(runner, ModelRunner)
        own = str(runner.model.dtype).removeprefix("torch.")
        if runner.arena.spec.dtype == own:
            return own, readings(llm)
    with make(own) as llm:
        return own, readings(llm)


def next_token_log_probs(runner: ModelRunner, tokens: Sequence[int]) -> torch.Tensor:
    """Return the log-probabilities float32 [tokens, vocab_size] after each token of one sequence."""
    chunks = logits_of_chunks(runner.model, runner.arena, runner.attention, tokens)
    return torch.cat([logits.log_softmax(1).cpu() for logits in chunks])


def _needle(llm: LLM, tokens: list[int], lengths: Sequence[int]) -> float:
    """Return the share of pass keys that are repeated, over all lengths of text and depths in it."""
    tokenizer = llm.tokenizer
    prompts: list[Any] = []
    keys: list[str] = []
    for i, length in enumerate(lengths):
        for depth in _DEPTHS:
            key = str(10_000 + 7919 * (len(keys) + 1) % 90_000)
            hidden = tokenizer.encode(f"\n\nThe pass key is {key}. Remember it: {key} is the pass key.\n\n")
            text, cut = tokens[1000 * i : 1000 * i + length], int(length * depth)
            asked = tokenizer.encode("\n\nWhat is the pass key? The pass key is")
            prompts.append({"prompt_token_ids": [*text[:cut], *hidden, *text[cut:], *asked]})
            keys.append(key)
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
