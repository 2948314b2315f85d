"""Beams to compare: transformers' own, and those of an output, each with its score."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.engine.outputs import CompletionOutput

Beams = list[tuple[list[int], float]]

# Between two orders of float32 sums through a whole model; some ten times what was seen.
LOGPROB_ERROR = 5e-5


def expected_beams(model: Any, prompts: list[list[int]], width: int, num_tokens: int, **options: Any) -> list[Beams]:
    """transformers' own `width` best beams of each prompt, best first, each with its score.

    The prompts are searched in one left-padded batch, and padding behind a beam's end is cut off.
    """
    eos = options.get("eos_token_id") or ()
    longest = max(map(len, prompts))
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([[0] * (longest - len(p)) + p for p in prompts]),
            attention_mask=torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts]),
            num_beams=width,
            do_sample=False,
            max_new_tokens=num_tokens,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **{"num_return_sequences": width, **options},
        )
    beams = []
    for tokens, score in zip(out.sequences[:, longest:].tolist(), out.sequences_scores.tolist(), strict=True):
        end = next((i + 1 for i, token in enumerate(tokens) if token in eos), len(tokens))
        beams.append((tokens[:end], score))
    per_prompt = len(beams) // len(prompts)
    return [beams[i : i + per_prompt] for i in range(0, len(beams), per_prompt)]


def scored(completions: list[CompletionOutput], length_penalty: float = 1.0) -> Beams:
    return [(c.token_ids, c.cumulative_logprob / len(c.token_ids) ** length_penalty) for c in completions]


def assert_same_beams(got: Beams, expected: Beams, length_penalty: float = 1.0) -> None:
    """The same tokens in the same order, and scores that differ no more than rounding explains.

    A score is a sum of `length` log-probabilities, each with its own rounding error, over length ** length_penalty.
    """
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
    for (tokens, score), (_, expected_score) in zip(got, expected, strict=True):
        rounding = LOGPROB_ERROR * len(tokens) ** (1 - length_penalty)
        assert score == pytest.approx(expected_score, rel=0, abs=rounding)
