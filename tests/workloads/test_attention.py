from __future__ import annotations

import json

import pytest
import torch

from octavo import kernels
from octavo.workloads import attention
from octavo.workloads.attention import AttentionCase, HeadCounts, cases
from tests.commands.conftest import OctavoCommand

BACKENDS = ["reference", pytest.param("native", marks=pytest.mark.skipif(not kernels.available(), reason="no kernels"))]
HEADS = HeadCounts(4, 2, 32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "new_tokens"), [("decode", 1), ("prefill", 8)])
def test_every_block_size_computes_the_same(backend: str, kind: str, new_tokens: int) -> None:
    case = AttentionCase(kind, backend, HEADS, "float32", seqs=2, context=48, new_tokens=new_tokens)  # type: ignore[arg-type]
    outputs = []
    for size in (16, 32, "max"):
        torch.manual_seed(0)
        (call,) = case.calls(size, num_layers=1)
        outputs.append(call())
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0])


@pytest.fixture(autouse=True)
def small_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "DECODE_TOKENS", 256)
    monkeypatch.setattr(attention, "CHUNK", 128)


def test_work_is_counted_per_query_and_key_seen() -> None:
    case = AttentionCase("prefill", "reference", HEADS, "bfloat16", seqs=1, context=3, new_tokens=2)
    assert case.flops == 4 * 4 * 32 * (2 + 3)
    assert case.kv_bytes == 3 * 2 * (32 + 32) * 2
    assert case.num_layers(working_set=10 * case.kv_bytes) == 10


def test_decode_holds_the_same_context_whatever_its_length_and_prefill_is_a_chunk_of_the_end() -> None:
    found = list(cases(["decode", "prefill"], ["reference"], [64, 256]))
    assert [(c.kind, c.seqs, c.context, c.new_tokens) for c in found] == [
        ("decode", 4, 64, 1),
        ("decode", 1, 256, 1),
        ("prefill", 1, 64, 64),
        ("prefill", 1, 256, 128),
    ]


def test_the_command_compares_blocks_with_contiguous_memory(octavo_command: OctavoCommand) -> None:
    argv = ["--contexts", "32,64", "--heads", "4,2,32", "--working-set-mib", 1]
    argv += ["--seconds", 0, "--num-threads", 1, "--attention-backend", "reference", "--block-sizes", "16,max"]
    code, out, _ = octavo_command("bench", "attention", *argv, "--json")
    assert code == 0
    result = json.loads(out.splitlines()[-1])
    assert result["read_gb_per_s"] > 0
    assert len(result["figures"]) == 2 * 2 * 2
    assert {f["slower_percent"] for f in result["figures"] if f["block_size"] == "max"} == {0.0}
    slower = [f["slower_percent"] for f in result["figures"] if f["block_size"] == 16]
    assert result["worst_slower_percent"] == {"reference": {"16": max(slower)}}
    assert all((f["gb_per_s"] is None) == (f["kind"] == "prefill") for f in result["figures"])


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--heads", "9,3"], 1, "heads must be Q,KV,DIM"),
        (["--heads", "9,2,64"], 1, "heads must be Q,KV,DIM"),
        (["--contexts", "512,0"], 1, "contexts must be at least 1, got 0"),
        (["--contexts", "512,x"], 2, "must be a list of integers, got 'x'"),
        (["--block-sizes", "16,most"], 2, "must be a list of integers or max, got 'most'"),
        (["--block-sizes", ","], 2, "is set but has no value"),
        (["--kind", "encode"], 2, "invalid choice: 'encode'"),
    ],
)
def test_what_cannot_be_timed_is_refused(
    octavo_command: OctavoCommand, argv: list[str], code: int, message: str
) -> None:
    refused, _, err = octavo_command("bench", "attention", *argv)
    assert (refused, message in err) == (code, True), err
