"""What the GPU's kernels are compared with computes the same attention as they do."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from benchmarks.gpu.peers import flashinfer_attention, measure_generate_batch, torch_attention


class _Wrapper:
    """FlashInfer's two wrappers as documented: pages of tokens in `indices`, between the starts in `indptr`."""

    indptr: torch.Tensor
    indices: torch.Tensor
    last: torch.Tensor
    queries: torch.Tensor
    page_size: int

    def __init__(self, workspace: torch.Tensor, kv_layout: str, use_tensor_cores: bool = False) -> None:
        assert (workspace.dtype, kv_layout) == (torch.uint8, "NHD")

    def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        rows = []
        for i, (begin, end) in enumerate(zip(self.indptr[:-1], self.indptr[1:], strict=True)):
            tokens = (end - begin - 1) * self.page_size + self.last[i]
            key, value = (part[self.indices[begin:end].long()].flatten(0, 1)[:tokens].transpose(0, 1) for part in cache)
            own = q[self.queries[i] : self.queries[i + 1]].transpose(0, 1)
            causal = torch.ones(own.shape[1], int(tokens), dtype=torch.bool).tril(int(tokens) - own.shape[1])
            attend = functional.scaled_dot_product_attention
            rows.append(attend(own, key, value, attn_mask=causal, enable_gqa=True).transpose(0, 1))
        return torch.cat(rows)


class _Decode(_Wrapper):
    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, **dtypes: torch.dtype,
    ) -> None:  # fmt: skip
        self.indptr, self.indices, self.last, self.page_size = indptr, indices, last_page_len, page_size
        self.queries = torch.arange(len(indptr))


class _Prefill(_Wrapper):
    def plan(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int,
        *, causal: bool, **dtypes: torch.dtype,
    ) -> None:  # fmt: skip
        assert causal
        self.indptr, self.indices, self.last = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        self.page_size, self.queries = page_size, qo_indptr


@pytest.mark.parametrize(("contexts", "queries"), [((33, 5, 16), 1), ((7,), 7)])
def test_flashinfer_is_given_the_same_blocks(
    contexts: Sequence[int], queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrappers = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=_Decode, BatchPrefillWithPagedKVCacheWrapper=_Prefill)
    monkeypatch.setitem(sys.modules, "flashinfer", wrappers)
    made: list[torch.Tensor] = []

    def randn(shape: Sequence[int], **_: Any) -> torch.Tensor:
        made.append(torch.rand(*shape))
        return made[-1]

    monkeypatch.setattr(torch, "randn", randn)
    query = torch.rand(len(contexts), queries, 4, 8)
    tables = torch.tensor([[3, 1, 6], [2, 0, 0], [4, 0, 0]][: len(contexts)], dtype=torch.int32)
    result = flashinfer_attention(query, tables, contexts, 2, 16)().view_as(query)
    key, value = made
    assert key.shape == (int(tables.max()) + 1, 16, 2, 8)
    for row, context in enumerate(contexts):
        blocks = tables[row, : -(-context // 16)].long()
        own = [part[blocks].flatten(0, 1)[:context].transpose(0, 1) for part in (key, value)]
        expected = functional.scaled_dot_product_attention(
            query[row].transpose(0, 1), own[0], own[1], is_causal=queries > 1, enable_gqa=True
        )
        torch.testing.assert_close(result[row], expected.transpose(0, 1))


def test_torch_attends_over_as_many_tokens() -> None:
    assert torch_attention(torch.rand(2, 1, 4, 8), context=9, kv_heads=2)().shape == (2, 4, 1, 8)


@pytest.mark.parametrize(("error", "tokens"), [("out of memory", 5), (None, 3)])
def test_a_request_that_transformers_did_not_finish_is_an_error(error: str | None, tokens: int) -> None:
    def generate_batch(prompts: list[list[int]], **_: Any) -> dict[str, Any]:
        return {str(i): SimpleNamespace(error=error, timestamps=[0.0] * tokens) for i in range(len(prompts))}

    model: Any = SimpleNamespace(generate_batch=generate_batch, device=torch.device("cpu"))
    with pytest.raises(RuntimeError, match="not all with 5 tokens"):
        measure_generate_batch(model, num_seqs=2, context=4, steps=2)
