"""The quality loss of KV budgets: the same text and questions, with everything kept, with each budget, and in codecs.

    memory         bytes that a sequence of `window` tokens holds while it is continued
    perplexity     exp of the mean negative log-likelihood of the next token, over the first `window` tokens of English
                   text: of those within the first budget, and of those after it, which are computed as answers are
    needle         share of eleven depths at which a pass key hidden in text is repeated, for each length of text
    questions      share of documents with two pass keys of which the first is repeated; the second, asked in the next
                   turn, whose prompt has document, first question and answer; and the second, asked within the answer
                   to the first, when a budget has already chosen what to keep without knowing it
    sums           share of sums that are right after many worked examples

A model that keeps everything cannot be asked about more than its context; there it has no figure (None). Budgets whose
prompts are computed alike share an engine, and so its prefix cache.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.kv_budget import KVBudget
from octavo.llm import LLM
from octavo.planner.calculator import SequenceCost
from octavo.sampling_params import SamplingParams
from octavo.structured_outputs import StructuredOutputsParams
from octavo.workloads.forward_text import english
from octavo.workloads.plots import new_figure, save
from octavo.workloads.quality import hidden_key

_DEPTHS = tuple(i / 10 for i in range(11))
_DOCUMENTS = 8
_SUMS = 16
_ROOM = 96  # tokens of a hidden pass key, its question and the answer
_GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


_Variant = tuple[KVBudget | None, str | None]  # a budget, and a codec if it is not that of all budgets


@dataclass(frozen=True, slots=True)
class BudgetQuality:
    """The figures of one budget, or of everything kept (None), in a cache of one dtype."""

    budget: str | None
    kv_cache_dtype: str
    num_bytes: int
    perplexity_within: float | None
    perplexity_after: float | None
    needle: dict[int, float | None]
    questions: tuple[float | None, float | None, float | None]
    sums: float | None


def measure(
    make: Callable[[KVBudget | None, str | None], LLM],
    budgets: Sequence[KVBudget],
    codecs: Sequence[str] = (),
    *,
    window: int,
    needle_lengths: Sequence[int] = (),
) -> list[BudgetQuality]:
    """Measure a model that keeps everything, then with each of the budgets, then with everything in each of the codecs.

    Args:
        make: makes an engine with a budget, which is the most that its requests may have, and a codec, if it is not
            that of all budgets.
        window: number of tokens of text whose perplexity is measured.
        needle_lengths: numbers of tokens of text around a hidden pass key; by default five up to the model's context,
            and twice that if some budget goes beyond it.
    """
    variants: list[_Variant] = [(None, None), *((kept, None) for kept in budgets), *((None, codec) for codec in codecs)]
    engines: dict[Any, list[_Variant]] = {}
    for variant in variants:
        engines.setdefault(_engine_of(*variant), []).append(variant)
    results: dict[_Variant, BudgetQuality] = {}
    least = min(budget.tokens for budget in budgets)
    for (codec, limits), alike in engines.items():
        most = None if limits is None else max((kept for kept, _ in alike if kept), key=lambda kept: kept.tokens)
        with make(most, codec) as llm:
            needle_lengths = needle_lengths or _lengths(llm, beyond=any(budget.slides for budget in budgets))
            for kept, _ in alike:
                results[kept, codec] = _measured(_Asked(llm, kept), window, least, needle_lengths)
    return [results[variant] for variant in variants]


def _engine_of(kept: KVBudget | None, codec: str | None) -> tuple[str | None, Any]:
    """Return what variants have in common that share an engine: the codec, and what its budget limits."""
    as_dense = kept is None or (kept.measures and not kept.layers)
    return codec, None if as_dense or kept is None else (kept.mode, kept.layers)


def _lengths(llm: LLM, *, beyond: bool) -> list[int]:
    longest = llm.core.inputs.max_model_len
    contexts = [*(longest >> halvings for halvings in (4, 3, 2, 1, 0)), *[2 * longest] * beyond]
    return [context - _ROOM for context in contexts if context > _ROOM]


def _measured(asked: _Asked, window: int, least: int, needle_lengths: Sequence[int]) -> BudgetQuality:
    spec, kept = asked.llm.core.scheduler.kv.spec, asked.kept
    within, after = _perplexities(asked, window, least)
    return BudgetQuality(
        None if kept is None else str(kept),
        spec.dtype,
        SequenceCost.of(spec, window, 1, kept).num_bytes,
        within,
        after,
        {length: asked.share(*_needles(asked, length)) for length in needle_lengths},
        _questions(asked, 2 * least),
        asked.share(*_sums(asked, 2 * least)),
    )


def plot(results: Sequence[BudgetQuality], path: str) -> None:
    """Plot each measure over memory."""
    curves: dict[str, list[BudgetQuality]] = {}
    for result in results:
        budget = None if result.budget is None else KVBudget.parse(result.budget)
        name = f"everything, {result.kv_cache_dtype}" if budget is None else budget.mode
        curves.setdefault(name + " by entropy" * (budget is not None and bool(budget.layers)), []).append(result)
    panels: dict[str, Callable[[BudgetQuality], float]] = {
        "perplexity after the budget": lambda result: result.perplexity_after or math.nan,
        "pass keys found, %": lambda result: _mean(result.needle.values()),
        "questions answered, %": lambda result: _mean(result.questions),
        "sums right, %": lambda result: _mean([result.sums]),
    }
    figure = new_figure(11, 8)
    axes = figure.subplots(2, 2)
    for axis, (title, of) in zip(axes.flat, panels.items(), strict=True):
        for name, of_name in curves.items():
            of_name.sort(key=lambda result: result.num_bytes)
            axis.plot([result.num_bytes / 2**20 for result in of_name], list(map(of, of_name)), "o-", label=name)
        axis.set_xlabel("KV cache of a sequence, MiB")
        axis.set_ylabel(title)
        axis.set_ylim(*(() if "perplexity" in title else (-4, 104)))
    axes[0, 0].legend(fontsize=8)
    save(figure, path)


def _mean(shares: Iterable[float | None]) -> float:
    known = [share for share in shares if share is not None]
    return 100 * sum(known) / len(known) if known else math.nan


class _Asked:
    """An engine that answers questions under a budget, and the tokens of a text unrelated to them."""

    def __init__(self, llm: LLM, kept: KVBudget | None) -> None:
        self.llm = llm
        self.kept = kept
        self.tokens = llm.tokenizer.encode(english())
        self.longest = llm.core.inputs.max_model_len

    def encode(self, text: str) -> list[int]:
        return self.llm.tokenizer.encode(text, add_special_tokens=False)

    def answers(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[str] | None:
        """Return the answer to each prompt; None if one is longer than the context."""
        if max(map(len, prompts)) + max(each.max_tokens or 0 for each in params) > self.longest:
            return None
        answers = []
        for prompt, each in zip(prompts, params, strict=True):  # one by one: each finds what those before it computed
            asked: Any = {"prompt_token_ids": prompt}
            (output,) = self.llm.generate(asked, replace(each, kv_budget=self.kept), use_tqdm=False)
            answers.append(output.outputs[0].text)
        return answers

    def share(
        self, prompts: Sequence[list[int]], expected: Sequence[str], params: Sequence[SamplingParams] = ()
    ) -> float | None:
        """Return the share of prompts whose answer has what is expected."""
        answers = self.answers(prompts, params or [_GREEDY] * len(prompts))
        if answers is None:
            return None
        found = [key in answer for key, answer in zip(expected, answers, strict=True)]
        return sum(found) / len(found)


def _perplexities(asked: _Asked, window: int, kept: int) -> tuple[float | None, float | None]:
    tokens, budget = asked.tokens[: min(window, asked.longest - 1)], asked.kept
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
    for depth in _DEPTHS:
        keys.append(_key(rng))
        prompts.append(hidden_key(asked.llm, asked.tokens[:length], depth, keys[-1]))
    return prompts, keys


def _questions(asked: _Asked, length: int) -> tuple[float | None, float | None, float | None]:
    rng, firsts, turns, within, keys = random.Random(2), [], [], [], []
    for document in range(_DOCUMENTS):
        red, blue = _key(rng), _key(rng)
        text = asked.tokens[document * 500 : document * 500 + length]
        places = [int(length * part) for part in (0.3, 0.6)]
        hidden = [asked.encode(f"\n\nThe {name} key is {key}.\n\n") for name, key in (("red", red), ("blue", blue))]
        whole = [*text[: places[0]], *hidden[0], *text[places[0] : places[1]], *hidden[1], *text[places[1] :]]
        firsts.append([*whole, *asked.encode("\n\nWhat is the red key? The red key is")])
        next_question = f" {red}.\n\nWhat is the blue key? The blue key is"
        turns.append([*firsts[-1], *asked.encode(next_question)])
        within.append(_written(next_question, len(turns[-1]) - len(firsts[-1])))
        keys.append((red, blue))
    reds, blues = zip(*keys, strict=True)
    answer = [_written()] * _DOCUMENTS
    return asked.share(firsts, reds, answer), asked.share(turns, blues, answer), asked.share(firsts, blues, within)


def _written(text: str = "", num_tokens: int = 0) -> SamplingParams:
    """Return parameters of an answer that is a text of so many tokens, and then a key."""
    regex = text.replace(".", r"\.").replace("?", r"\?") + " [0-9]{5}"
    most = num_tokens + (_GREEDY.max_tokens or 0)
    return replace(_GREEDY, max_tokens=most, structured_outputs=StructuredOutputsParams(regex=regex))


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
