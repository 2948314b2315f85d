"""Draws from rows of logits, and scores of tokens, each row in one thread from the first pass to the last."""

from __future__ import annotations

import torch

from octavo.kernels.library import native


def draw_tokens(
    token_ids: torch.Tensor,
    valid: torch.Tensor,
    logits: torch.Tensor,
    rows: torch.Tensor,
    numbers: torch.Tensor,
    allowed: torch.Tensor | None = None,
    mask_of: torch.Tensor | None = None,
) -> None:
    """One token a draw: the largest logit, or by the filters and the inversion of `sampling/draw.py`.

    Args:
        token_ids: int64 [draws], written: the lowest of equals where the largest is wanted.
        valid: uint8 [draws], written: 1 where the logits that are looked at make a distribution, else the token is
            void.
        logits: float32 [*, vocab]; only read.
        rows: int64 [draws], the row of logits that each draw looks at.
        numbers: float64 [draws, 5]: a uniform number in [0, 1), temperature (0: the largest logit), min_p (0: off),
            top_p (1: off), top_k (0: off).
        allowed: int32 [masks, ceil(vocab / 32)]: a bit for each token that may be drawn.
        mask_of: int64 [draws], the row of `allowed` that holds for each draw, or -1: all tokens may be drawn. Given if
            `allowed` is.

    Raises:
        ValueError: mismatched shapes or dtypes, a row that there is not, a parameter that means nothing.
    """
    native.draw_tokens(logits, rows, numbers, allowed, mask_of, token_ids, valid)


def penalise_repetition(
    logits: torch.Tensor,
    rows: torch.Tensor,
    bounds: torch.Tensor,
    num_sorted: torch.Tensor,
    token_ids: torch.Tensor,
    penalties: torch.Tensor,
) -> None:
    """Make some tokens of some rows less likely, in place: x / r where x > 0, x * r elsewhere, each token once.

    Args:
        logits: float32 [*, vocab].
        rows: int64 [n], rising.
        bounds: int64 [n + 1]; row i's tokens are token_ids[bounds[i] : bounds[i + 1]].
        num_sorted: int64 [n]; so many of them rise and are all different, and the others are all different.
        token_ids: int64; those outside the vocabulary are passed over.
        penalties: float32 [n].

    Raises:
        ValueError: mismatched shapes or dtypes, a row that there is not, bounds beyond the tokens.
    """
    native.penalise_repetition(logits, rows, bounds, num_sorted, token_ids, penalties)


def add_amounts(
    logits: torch.Tensor, rows: torch.Tensor, bounds: torch.Tensor, token_ids: torch.Tensor, amounts: torch.Tensor
) -> None:
    """Add an amount to some tokens of some rows, in place.

    Args:
        logits: float32 [*, vocab].
        rows: int64 [n], rising.
        bounds: int64 [n + 1]; row i's tokens are token_ids[bounds[i] : bounds[i + 1]].
        token_ids: int64; those outside the vocabulary are passed over.
        amounts: float32, one a token.

    Raises:
        ValueError: mismatched shapes or dtypes, a row that there is not, bounds beyond the tokens.
    """
    native.add_amounts(logits, rows, bounds, token_ids, amounts)


def score_tokens(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, num_top: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probability and rank of a token of each row, and the row's most likely tokens, equals by rising id.

    Args:
        logits: float32 [*, vocab].
        rows, token_ids, num_top: int64 [scores]; num_top at most `vocab`.

    Returns:
        float32 [scores] log-probabilities, int64 [scores] ranks from 1; int64 and float32 [scores, most of num_top],
        the most likely tokens and their log-probabilities, void past a row's own num_top.

    Raises:
        ValueError: mismatched shapes or dtypes, a row or a token that there is not.
    """
    count, most = len(token_ids), max(1, int(num_top.max())) if len(num_top) else 1
    logprobs, ranks = torch.empty(count), torch.empty(count, dtype=torch.int64)
    top_ids, top_logprobs = torch.empty(count, most, dtype=torch.int64), torch.empty(count, most)
    native.score_tokens(logits, rows, token_ids, num_top, logprobs, ranks, top_ids, top_logprobs)
    return logprobs, ranks, top_ids, top_logprobs
