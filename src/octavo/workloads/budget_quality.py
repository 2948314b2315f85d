"""The quality loss of KV budgets: the same text and questions, with everything kept, with each budget, and in codecs.

    memory         bytes that a sequence of `window` tokens holds while it is continued
    perplexity     exp of the mean negative log-likelihood of the next token, over the first `window` tokens of English
                   text: of those within the first budget, and of those after it, which are computed as answers are
    needle         share of eleven depths at which a pass key hidden in text is repeated, for each length of text
    questions      share of documents with two pass keys of which the first is repeated, and then the second
    sums           share of sums that are right after many worked examples

A model that keeps everything cannot be asked about more than its context; there it has no figure (None).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.kv_budget import KVBudget
from octavo.llm import LLM
from octavo.planner.calculator import SequenceCost
from octavo.sampling_params import SamplingParams
from octavo.workloads.quality import english

_DEPTHS = tuple(i / 10 for i in range(11))
_DOCUMENTS = 8
_SUMS = 16
_GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class BudgetQuality:
    """The figures of one budget, or of everything kept (None), in a cache of one dtype."""

    budget: str | None
    kv_cache_dtype: str
    num_bytes: int
    perplexity_within: float | None
    perplexity_after: float | None
    needle: dict[int, float | None]
    questions: tuple[float | None, float | None]
    sums: float | None


def measure(
    make: Callable[[KVBudget | None, str | None], LLM],
    budgets: Sequence[KVBudget],
    codecs: Sequence[str] = (),
    *,
    window: int,
    needle_lengths: Sequence[int],
) -> list[BudgetQuality]:
    """Measure a model that keeps everything, then with each of the budgets, then with everything in each of the codecs.

    Args:
        make: makes an engine with a budget, and a codec, if it is not that of all budgets.
        window: number of tokens of text whose perplexity is measured.
        needle_lengths: numbers of tokens of text around a hidden pass key.
    """
    least = min(budget.tokens for budget in budgets)
    variants: list[tuple[KVBudget | None, str | None]] = [(None, None), *((budget, None) for budget in budgets)]
    results = []
    for kept, codec in [*variants, *((None, codec) for codec in codecs)]:
        with make(kept, codec) as llm:
            asked, spec = _Asked(llm), llm.core.scheduler.kv.spec
            within, after = _perplexities(asked, window, least, kept)
            results.append(
                BudgetQuality(
                    None if kept is None else str(kept),
                    spec.dtype,
                    SequenceCost.of(spec, window, 1, kept).num_bytes,
                    within,
                    after,
                    {length: asked.share(*_needles(asked, length)) for length in needle_lengths},
                    _questions(asked, 2 * least),
                    asked.share(*_sums(asked, 2 * least)),
                )
            )
    return results


def plot(results: Sequence[BudgetQuality], path: str) -> None:
    """Plot perplexity after the budget, and the share of needles found, over memory, as a PNG; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves: dict[str, list[BudgetQuality]] = {}
    for result in results:
        budget = None if result.budget is None else KVBudget.parse(result.budget)
        name = f"everything, {result.kv_cache_dtype}" if budget is None else budget.mode
        curves.setdefault(name + " by entropy" * (budget is not None and bool(budget.layers)), []).append(result)
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5))
    for name, of_name in curves.items():
        of_name.sort(key=lambda result: result.num_bytes)
        sizes = [result.num_bytes / 2**20 for result in of_name]
        found = [[share for share in result.needle.values() if share is not None] for result in of_name]
        axes[0].plot(sizes, [result.perplexity_after or math.nan for result in of_name], "o-", label=name)
        axes[1].plot(sizes, [100 * sum(each) / len(each) if each else math.nan for each in found], "o-", label=name)
    for axis, title in zip(axes, ("perplexity after the budget", "pass keys found, %"), strict=True):
        axis.set_xlabel("KV cache of a sequence, MiB")
        axis.set_ylabel(title)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


class _Asked:
    """An engine that is asked questions, and the tokens of a text that it knows nothing of."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.tokens = llm.tokenizer.encode(english())
        self.longest = llm.core.inputs.max_model_len

    def encode(self, text: str) -> list[int]:
        return self.llm.tokenizer.encode(text, add_special_tokens=False)

    def answers(self, prompts: Sequence[list[int]]) -> list[str] | None:
        """Return the answer to each prompt; None if one is longer than the context."""
        if max(map(len, prompts)) + 8 > self.longest:
            return None
        given: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [output.outputs[0].text for output in self.llm.generate(given, _GREEDY, use_tqdm=False)]

    def share(self, prompts: Sequence[list[int]], expected: Sequence[str]) -> float | None:
        """Return the share of prompts whose answer has what is expected."""
        answers = self.answers(prompts)
        if answers is None:
            return None
        return sum(key in answer for key, answer in zip(expected, answers, strict=True)) / len(expected)


def _perplexities(asked: _Asked, window: int, kept: int, budget: KVBudget | None) -> tuple[float | None, float | None]:
    tokens = asked.tokens[: min(window, asked.longest - 1)]
    if budget is not None and not budget.slides:
        budget = replace(budget, dense_prompt=False)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, kv_budget=budget)
    (output,) = asked.llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)
    found = [-entry.logprob for entry in (output.prompt_logprobs or ())[1:] if entry is not None]
    parts = found[: kept - 1], found[kept - 1 :]
    return tuple(round(math.exp(sum(part) / len(part)), 4) if part else None for part in parts)  # type: ignore[return-value]


def _key(rng: random.Random) -> str:
    return str(rng.randrange(10_000, 100_000))


def _needles(asked: _Asked, length: int) -> tuple[list[list[int]], list[str]]:
    rng, prompts, keys = random.Random(length), [], []
    question = asked.encode("\n\nWhat is the pass key? The pass key is")
    for depth in _DEPTHS:
        keys.append(_key(rng))
        hidden = asked.encode(f"\n\nThe pass key is {keys[-1]}. Remember it: {keys[-1]} is the pass key.\n\n")
        text, cut = asked.tokens[:length], int(length * depth)
        prompts.append([*text[:cut], *hidden, *text[cut:], *question])
    return prompts, keys


def _questions(asked: _Asked, length: int) -> tuple[float | None, float | None]:
    rng, firsts, seconds, keys = random.Random(2), [], [], []
    for document in range(_DOCUMENTS):
        red, blue = _key(rng), _key(rng)
        text = asked.tokens[document * 500 : document * 500 + length]
        places = [int(length * part) for part in (0.3, 0.6)]
        hidden = [asked.encode(f"\n\nThe {name} key is {key}.\n\n") for name, key in (("red", red), ("blue", blue))]
        whole = [*text[: places[0]], *hidden[0], *text[places[0] : places[1]], *hidden[1], *text[places[1] :]]
        firsts.append([*whole, *asked.encode("\n\nWhat is the red key? The red key is")])
        answered = asked.encode(f" {red}.\n\nWhat is the blue key? The blue key is")
        seconds.append([*firsts[-1], *answered])
        keys.append((red, blue))
    return asked.share(firsts, [red for red, _ in keys]), asked.share(seconds, [blue for _, blue in keys])


def _sums(asked: _Asked, length: int) -> tuple[list[list[int]], list[str]]:
    rng, prompts, results = random.Random(3), list[list[int]](), list[str]()
    while len(prompts) < _SUMS:
        lines: list[int] = []
        while len(lines) < length:
            a, b = rng.randrange(10, 100), rng.randrange(10, 100)
            lines += asked.encode(f"{a} + {b} = {a + b}\n")
        a, b = rng.randrange(10, 100), rng.randrange(10, 100)
        prompts.append([*lines, *asked.encode(f"{a} + {b} =")])
        results.append(f" {a + b}\n")
    return prompts, results
