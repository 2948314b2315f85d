"""Every kernel gives the bits recorded in golden_bits.json, at every instruction-set level.

The kernels are compiled without contraction and without -ffast-math, so their bits follow from the source alone. A
change that may change them records anew: `python -m tests.kernels.test_golden_bits`, and its commit says why.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from octavo import kernels
from octavo.attention.native import NativeAttention
from octavo.kernels import PackedWeight
from octavo.kvcache.spec import LayerKVSpec
from tests.attention.batches import PagedSequences
from tests.levels import ALL_LEVELS

pytestmark = [
    pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not compiled"),
    pytest.mark.usefixtures("restore_kernels"),
]

RECORD = Path(__file__).with_name("golden_bits.json")
ROWS = (1, 2, 5, 8, 19, 40)
# Where the fp16 numbers lie in a block as GGUF stores it.
BLOCKS: dict[Any, tuple[int, ...]] = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),  # its scale is an exponent
}


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Multiples of 1/4096 in [-2, 2): `torch.randn` differs between processors."""
    whole = torch.randint(-8192, 8192, shape, generator=torch.Generator().manual_seed(seed))
    return (whole.float() / 4096).to(dtype)


def quantised(name: Any, outputs: int, inputs: int) -> torch.Tensor:
    """Random blocks, as stored, with scales from 2^-7 to 2^-6."""
    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    blocks = torch.randint(0, 256, (outputs, inputs // weights, size), generator=torch.Generator().manual_seed(3))
    for at in BLOCKS[name]:
        blocks[..., at + 1] = 0x20 | blocks[..., at + 1] & 3
    if name == "MXFP4":
        blocks[..., 0] = 118 + blocks[..., 0] % 4
    return blocks.to(torch.uint8).flatten(1)


def products(name: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    inputs = {"IQ4_XS": 512, "MXFP4": 224}.get(name, 512 if name.endswith("_K") else 192)
    if name in BLOCKS:
        weight = PackedWeight.pack_quantised(name, quantised(name, 96, inputs), inputs)  # type: ignore[arg-type]
    else:
        weight = PackedWeight.pack(numbers(96, 192, dtype=dtype, seed=1))
    if name == "compressed bfloat16":
        weight = weight.compressed()
    for rows in ROWS:
        x = numbers(rows, inputs, dtype=dtype, seed=rows)
        yield weight.linear(x, numbers(96, dtype=dtype, seed=7))
        yield weight.linear(x, activation="silu")
        yield weight.linear(x, activation="gelu_pytorch_tanh")
    yield weight.linear(numbers(70, inputs, dtype=dtype, seed=70), exact=False)
    yield weight.rows(torch.tensor([0, 17, 95]), dtype)


def rowwise(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    for width in (64, 100, 576):
        x, residual = numbers(3, width, dtype=dtype, seed=1), numbers(3, width, dtype=dtype, seed=2)
        yield kernels.rms_norm(x, numbers(width, dtype=dtype, seed=3), 1e-5)
        yield kernels.add_rms_norm(x, residual, numbers(width, dtype=dtype, seed=3), 1e-5)
        yield kernels.gate(x, "silu")
        yield kernels.gate(x, "gelu_pytorch_tanh")


def attention(dtype: torch.dtype, codec: str | None, window: int | None) -> Iterator[torch.Tensor]:
    """Rotated, normalised and stored; then attended by prompts, a chunk and lone tokens."""
    layer = LayerKVSpec(2, 64, 64, window)
    name = codec or str(dtype).removeprefix("torch.")
    sequences = PagedSequences([layer], 16, 3, 700, dtype=name)
    kv, backend = sequences.kv[0], NativeAttention()
    keys, values = kv.for_kernels
    for step, new in enumerate(({0: 600, 1: 33}, {0: 1, 1: 17, 2: 5}, {0: 1, 1: 1, 2: 1})):
        batch = sequences.step(new)
        qkv = numbers(batch.num_tokens, 10 * 64, dtype=dtype, seed=step)
        angles = numbers(1024, 64, seed=9)
        kind: dict[str, Any] = {"query_norm": numbers(64, dtype=dtype), "key_norm": numbers(64, dtype=dtype)}
        cos, sin = angles[:, :32].contiguous(), angles[:, 32:].contiguous()
        slots = batch.groups[0].slot_mapping
        kernels.rope_write(qkv, keys, values, cos, sin, batch.positions, slots, **(kind if step else {}))
        query = qkv[:, :384].view(-1, 6, 64)
        yield query
        yield backend.attend(kv, query, batch, scale=0.125)
        yield backend.attend(kv, query, batch, scale=0.125, softcap=20.0, sinks=numbers(6))


def _cases() -> dict[str, Callable[[], Iterator[torch.Tensor]]]:
    cases: dict[str, Callable[[], Iterator[torch.Tensor]]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        kind = str(dtype).removeprefix("torch.")
        cases[f"row-wise, {kind}"] = partial(rowwise, dtype)
        own = ("bfloat16", "compressed bfloat16") if dtype is torch.bfloat16 else ("float32",)
        for name in (*own, *BLOCKS):
            cases[f"products with {name}, {kind}"] = partial(products, name, dtype)
        for codec in (None, "fp8_e4m3", "fp8_e5m2", "int8", "int4"):
            for window in (None, 100):
                name = f"attention over {codec or kind}, window {window}, {kind}"
                cases[name] = partial(attention, dtype, codec, window)
    return cases


CASES = _cases()


def bits(case: str) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in CASES[case]():
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("case", CASES)
def test_a_kernels_bits_are_those_recorded_at_every_level(case: str) -> None:
    recorded = json.loads(RECORD.read_text()).get(case, {})
    for level in (known := [level for level in ALL_LEVELS if level in recorded]):
        kernels.force_isa(level)
        assert bits(case) == recorded[level], level
    if unknown := set(ALL_LEVELS) - set(known):
        pytest.skip(f"nothing is recorded for {', '.join(sorted(unknown))}: record it on this machine")


def record() -> None:
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for case in CASES:
        for level in ALL_LEVELS:
            kernels.force_isa(level)
            recorded.setdefault(case, {})[level] = bits(case)
    RECORD.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    record()
