"""Run a text through a model with any KV cache, to find scales, and what a codec of the cache loses."""

from __future__ import annotations

import math
import pydoc_data.topics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from octavo.attention.base import AttentionBackend, AttentionBatch, GroupBatch
from octavo.errors import ConfigError
from octavo.kvcache.spec import KVCacheSpec
from octavo.models.base import CausalLM
from octavo.storage.arena import KVArena

CHUNK = 64


def english() -> str:
    """Return Python's own language reference, which every installation has."""
    return "\n\n".join(text.strip() for _, text in sorted(pydoc_data.topics.topics.items()))


def windows_of(tokens: Sequence[int], count: int, length: int, what: str) -> list[list[int]]:
    """Return up to `count` windows of `length` tokens, spread evenly; a short text gives one shorter window.

    Raises:
        ConfigError: the text has fewer than 32 tokens.
    """
    if len(tokens) < 32:
        raise ConfigError(f"{what} has {len(tokens)} tokens; at least 32 are needed")
    length = min(length, len(tokens))
    count = max(1, min(count, len(tokens) // length))
    last = len(tokens) - length
    return [list(tokens[last * i // max(1, count - 1) :][:length]) for i in range(count)]


@dataclass(frozen=True, slots=True)
class Loss:
    """Differences between predictions with a quantised and with the unquantised cache.

    Attributes:
        kl: mean KL divergence of the next token's distribution, in nats.
        nll: mean negative log-likelihood of the next token.
        agreement: share of positions whose likeliest token is the same.
    """

    kl: float
    nll: float
    agreement: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll)

    @classmethod
    def of(
        cls,
        windows: Sequence[Sequence[int]],
        plain: Sequence[torch.Tensor],
        predicted: Iterable[Iterable[torch.Tensor]],
    ) -> Loss:
        """Compare predictions after each token of windows of text.

        Args:
            plain: for each window, the unquantised cache's log-probabilities, float32 [tokens, vocab_size].
            predicted: for each window, those to compare, in chunks.
        """
        kl = nll = 0.0
        agreed = count = guessed = 0
        for window, expected, chunks in zip(windows, plain, predicted, strict=True):
            first = 0
            for ours in chunks:
                theirs = expected[first : first + len(ours)]
                kl += (theirs.exp() * (theirs - ours)).sum().item()
                agreed += int((ours.argmax(1) == theirs.argmax(1)).sum())
                following = torch.tensor(window[first + 1 : first + 1 + len(ours)])
                nll -= ours[: len(following)].gather(1, following[:, None]).double().sum().item()
                first, count, guessed = first + len(ours), count + len(ours), guessed + len(following)
        return cls(max(0.0, kl / count), nll / guessed, agreed / count)


def log_probs(logits: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the log-probabilities of chunks of logits, in the memory of the CPU."""
    return (chunk.log_softmax(1).cpu() for chunk in logits)


def block_tables(spec: KVCacheSpec, num_tokens: int, first_block: int = 1) -> list[torch.Tensor]:
    """Return one block table per group, with consecutive blocks from `first_block`."""
    per_group = spec.blocks_for_tokens(num_tokens)
    return [torch.arange(per_group) + first_block + group * per_group for group in range(len(spec.groups))]


@torch.inference_mode()
def logits_of_chunks(
    model: CausalLM,
    arena: KVArena,
    attention: AttentionBackend,
    tokens: Sequence[int],
    *,
    first_block: int = 1,
    chunk: int = CHUNK,
    wanted: bool = True,
) -> Iterator[torch.Tensor]:
    """Compute one sequence in chunks, so that all of it except the current chunk is read from the cache, as in decode.

    Yields:
        float32 [chunk, vocab_size], or [0, vocab_size] if logits are not `wanted`; the next chunk may overwrite it.
    """
    spec, device = arena.spec, model.device
    tables = [table.to(device) for table in block_tables(spec, len(tokens), first_block)]
    for first in range(0, len(tokens), chunk):
        positions = torch.arange(first, min(first + chunk, len(tokens)), device=device)
        count = len(positions)
        context = first + count
        slots = [
            table[positions // spec.block_size] * spec.block_size + positions % spec.block_size for table in tables
        ]
        batch = AttentionBatch(
            query_start=torch.tensor([0, count], dtype=torch.int32, device=device),
            context_lens=torch.tensor([context], dtype=torch.int32, device=device),
            table_rows=torch.zeros(1, dtype=torch.int64, device=device),
            positions=positions,
            groups=tuple(GroupBatch(t.int()[None], s) for t, s in zip(tables, slots, strict=True)),
            num_seqs=1,
            num_tokens=count,
            max_query_len=count,
            max_context_len=context,
            total_decode_len=context,
        )
        rows = torch.arange(count if wanted else 0, device=device)
        piece = torch.tensor(tokens[first : first + count], device=device)
        yield model.forward(piece, batch, arena.layers, attention, rows)
