"""The native decoder against the Python one and transformers, and its promise about bits."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import pytest
import torch

from octavo import kernels
from octavo.attention.native import NativeAttention
from octavo.attention.reference import ReferenceAttention
from octavo.checkpoint.gguf_file import GGUFFile
from octavo.checkpoint.gguf_requantize import loaded_bytes
from octavo.checkpoint.model_source import load_model_config, resolve_model
from octavo.errors import CorruptModelError
from octavo.kernels import PackedWeight
from octavo.models import packing
from octavo.models.decoder import Decoder
from octavo.models.loader import open_weights
from octavo.models.native_decoder import NativeDecoder, make_decoder
from octavo.models.ops import LayerOps
from octavo.models.packing import native_parts
from octavo.models.program import Multiply, Norm, Register
from octavo.models.weights import RawTensor
from tests.attention.batches import PagedSequences
from tests.levels import LEVELS
from tests.models import test_decoder
from tests.models.paged import assert_same_logits, paged_logits, random_sequences, whole_logits
from tests.models.test_decoder import VOCAB, model_config
from tests.models.tiny import make_model, write_gguf

pytestmark = [
    pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not compiled"),
    pytest.mark.usefixtures("restore_kernels"),
]
CPU = torch.device("cpu")
# Wide enough for whole vectors; the head's bias-free product and the vocabulary keep their odd widths.
WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}
NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


class StateDict(test_decoder.StateDict):
    """A model's tensors, matrices in a GGUF type where one is given for their kind."""

    def __init__(self, model: Any, types: dict[str, str] | None = None) -> None:
        super().__init__(model)
        self.types = types or {}

    def raw(self, name: str) -> RawTensor | None:
        for part, type_name in self.types.items():
            if part in name and self.tensors[name].dim() == 2:
                kind = gguf.GGMLQuantizationType[type_name]
                rows = gguf.quantize(self.tensors[name].float().numpy(), kind)
                return RawTensor(rows, kind, tuple(self.tensors[name].shape))
        return None

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        stored = self.raw(name)
        if stored is None:
            return super().get(name, dtype)
        return torch.from_numpy(np.array(gguf.dequantize(stored.rows, stored.type))).to(dtype)


def build(case: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(test_decoder, "TINY", {**test_decoder.TINY, **WIDE})
    return test_decoder.build(case)


def native(model: Any, dtype: torch.dtype, weights: Any = None, **options: Any) -> NativeDecoder:
    made = make_decoder(model_config(model), weights or StateDict(model), dtype=dtype, device=CPU, **options)
    assert isinstance(made, NativeDecoder)
    return made


def products(model: NativeDecoder, target: Register) -> list[Any]:
    """The products whose results go to `target`, in the order of the layers."""
    program = [instruction for instruction in model._program if isinstance(instruction, Multiply)]
    return [instruction.linear for instruction in program if instruction.target is target]


@pytest.mark.parametrize("case", test_decoder.FAMILY)
def test_logits_are_those_of_transformers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(case, monkeypatch)
    sequences = random_sequences(VOCAB, [37, 5, 21])
    ours = paged_logits(native(model, torch.float32), sequences, attention=NativeAttention())
    assert_same_logits(ours, whole_logits(model, sequences))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "case", ["biases everywhere", "qwen3", "gemma2", "gemma3", "olmo2", "granite", "cohere2", "starcoder2"]
)
def test_every_level_agrees_with_transformers(level: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.force_isa(level)
    model = build(case, monkeypatch)
    sequences = random_sequences(VOCAB, [30, 9])
    whole = whole_logits(model, sequences)
    assert_same_logits(paged_logits(native(model, torch.float32), sequences, attention=NativeAttention()), whole)
    half = paged_logits(native(model, torch.bfloat16), sequences, attention=NativeAttention(), dtype="bfloat16")
    for ours, exact in zip(half, whole, strict=True):
        assert (ours - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("case", test_decoder.FAMILY)
def test_bfloat16_is_that_of_the_python_decoder(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(case, monkeypatch)
    sequences = random_sequences(VOCAB, [40, 18])
    options: dict[str, Any] = {"attention": NativeAttention(), "dtype": "bfloat16"}
    ours = paged_logits(native(model, torch.bfloat16), sequences, **options)
    python = Decoder(model_config(model), StateDict(model), dtype=torch.bfloat16)
    for actual, expected in zip(ours, paged_logits(python, sequences, **options), strict=True):
        assert (actual - expected).norm() < 0.02 * expected.norm()


class Prompts:
    """Sequences of fixed lengths whose logits are collected token by token, however they were dealt into steps."""

    def __init__(self, model: NativeDecoder, lengths: list[int]) -> None:
        self.model, self.tokens = model, random_sequences(VOCAB, lengths, seed=3)
        self.paged = PagedSequences(model.kv_layers, 16, len(lengths), max(lengths), dtype=NAMES[model.dtype])
        self.logits: list[list[torch.Tensor]] = [[] for _ in lengths]

    def step(self, counts: dict[int, int]) -> None:
        starts = {i: self.paged.lengths[i] for i in counts}
        batch = self.paged.step(counts)
        ids = torch.cat([self.tokens[i][starts[i] : self.paged.lengths[i]] for i in counts])
        rows = torch.arange(len(ids))
        logits = self.model.forward(ids, batch, self.paged.kv, NativeAttention(), rows).clone()
        for i, part in zip(counts, logits.split(list(counts.values())), strict=True):
            self.logits[i].append(part)

    def chunks(self, index: int, size: int) -> list[torch.Tensor]:
        while (left := len(self.tokens[index]) - self.paged.lengths[index]) > 0:
            self.step({index: min(left, size)})
        return self.logits[index]


@pytest.mark.parametrize("level", [LEVELS[0], LEVELS[-1]] if LEVELS else [])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "Q4_1"])
def test_a_tokens_logits_have_the_same_bits_in_any_batch_chunk_and_thread_count(
    level: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels.force_isa(level)
    model = build("tied head", monkeypatch)
    quantised = kind == "Q4_1"
    weights = StateDict(model, {"proj": kind, "embed": "Q8_0"} if quantised else None)
    ours = native(model, torch.float32 if kind == "float32" else torch.bfloat16, weights, quantised=quantised)
    lengths = [random.Random(1).randint(40, 70) for _ in range(33)]
    kernels.set_num_threads(1)
    expected = torch.cat(Prompts(ours, lengths).chunks(7, 1))
    for threads in (1, 2, 3):
        kernels.set_num_threads(threads)
        for size in (1, 7, 64):
            assert torch.equal(torch.cat(Prompts(ours, lengths).chunks(7, size)), expected)
        batch = Prompts(ours, lengths)
        batch.step({i: 20 + i % 3 for i in range(33)})
        batch.step(dict.fromkeys(range(33), 1))
        batch.step({i: lengths[i] - batch.paged.lengths[i] for i in range(33)})
        assert torch.equal(torch.cat(batch.logits[7]), expected)


@pytest.mark.parametrize(
    ("types", "formats"),
    [
        ({"proj": "Q4_0"}, ["Q4_0"]),
        ({"v_proj": "Q8_0", "proj": "Q4_1", "embed": "Q8_0"}, ["Q4_1", "Q8_0"]),
        ({"gate_proj": "Q8_0", "up_proj": "Q4_0"}, ["bfloat16"]),
        ({"k_proj": "Q5_0", "proj": "Q4_0", "lm_head": "Q8_0"}, ["Q4_0", "Q5_0", "Q4_0"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("case", ["biases everywhere", "tied head"])
def test_quantised_weights_compute_what_their_values_do(
    types: dict[str, Any], formats: list[str], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(case, monkeypatch)
    weights = StateDict(model, types)
    sequences = random_sequences(VOCAB, [40, 18])
    options: dict[str, Any] = {"attention": NativeAttention(), "dtype": "bfloat16"}
    ours = native(model, torch.bfloat16, weights, quantised=True)
    plain = native(model, torch.bfloat16, weights)
    assert [part.weight.format.removeprefix("compressed ") for part in products(ours, Register.QKV)[0].parts] == formats
    assert ours.weight_bytes < plain.weight_bytes or formats == ["bfloat16"]
    for actual, expected in zip(
        paged_logits(ours, sequences, **options), paged_logits(plain, sequences, **options), strict=True
    ):
        assert (actual - expected).norm() < 0.1 * expected.norm()


def test_float32_dequantises(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("tied head", monkeypatch)
    weights = StateDict(model, {"proj": "Q4_0", "embed": "Q8_0"})
    ours = native(model, torch.float32, weights, quantised=True)
    assert {part.weight.format for linear in products(ours, Register.HIDDEN) for part in linear.parts} == {"float32"}
    sequences = random_sequences(VOCAB, [21])
    python = Decoder(model_config(model), weights, dtype=torch.float32)
    assert_same_logits(paged_logits(ours, sequences, attention=NativeAttention()), paged_logits(python, sequences))


@pytest.mark.parametrize("case", ["tied head", "grouped queries", "biases everywhere"])
def test_what_the_weights_take_is_counted(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(case, monkeypatch)
    ours = native(model, torch.float32)
    linears = [instruction.linear for instruction in ours._program if isinstance(instruction, Multiply)]
    norms = [instruction.weights.weight for instruction in ours._program if isinstance(instruction, Norm)]
    table = 0 if isinstance(ours._embedding, PackedWeight) else ours._embedding.nbytes
    held = table + sum(norm.nbytes for norm in norms) + sum(linear.nbytes for linear in (*linears, ours._head))
    assert ours.weight_bytes == held
    # Of what is loaded, only the head's odd width is padded, to whole panels.
    assert held - sum(parameter.nbytes for parameter in model.parameters()) == (-VOCAB % 32) * 64 * 4


@pytest.mark.parametrize("case", ["tied head", "biases everywhere", "qwen3"])
@pytest.mark.parametrize("block_size", [4, 16])
def test_the_python_pass_serves_where_the_kernels_do_not_reach(
    case: str, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(case, monkeypatch)
    sequences = random_sequences(VOCAB, [37, 5])
    attention = NativeAttention() if block_size == 4 else ReferenceAttention()
    ours = paged_logits(native(model, torch.float32), sequences, block_size=block_size, attention=attention)
    assert_same_logits(ours, whole_logits(model, sequences))


def test_what_the_kernels_do_not_support_goes_to_the_python_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("grouped queries", monkeypatch)
    config, weights = model_config(model), StateDict(model)
    assert NativeDecoder.supports(config, torch.float32, CPU)
    sizes: list[dict[str, Any]] = [{"value_dim": 12}, {"head_dim": 24}, {"head_dim": 592}, {"intermediate_size": 100}]
    for size in sizes:
        assert not NativeDecoder.supports(dataclasses.replace(config, **size), torch.float32, CPU)
    for changed in (
        {"ops": LayerOps()},
        {"dtype": torch.float16},
    ):
        options: dict[str, Any] = {
            "config": config,
            "weights": weights,
            "dtype": torch.float32,
            "device": CPU,
            **changed,
        }
        assert type(make_decoder(**options)) is Decoder
    monkeypatch.setattr(kernels, "available", lambda: False)
    assert type(make_decoder(config, weights, dtype=torch.float32, device=CPU)) is Decoder


def test_only_the_asked_for_rows_become_logits_even_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3", monkeypatch)
    [ids] = random_sequences(VOCAB, [12])
    [expected] = whole_logits(model, [ids])
    ours = native(model, torch.float32)
    paged = PagedSequences(ours.kv_layers, 16, 1, 12)
    batch = paged.step({0: 12})
    rows = [11, 3, *range(12), 3]
    logits = ours.forward(ids, batch, paged.kv, NativeAttention(), torch.tensor(rows))
    none = ours.forward(ids, batch, paged.kv, NativeAttention(), torch.tensor([], dtype=torch.int64))
    torch.testing.assert_close(logits, expected[rows], atol=1e-4, rtol=0)
    assert none.shape == (0, VOCAB)


@pytest.mark.parametrize("backend", [NativeAttention, ReferenceAttention])
def test_logits_in_parts_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    """What is left for later is computed from the rows that the step has kept."""
    ours = native(build("grouped queries", monkeypatch), torch.float32)
    paged = PagedSequences(ours.kv_layers, 16, 1, 12)
    batch, ids, rows = paged.step({0: 12}), torch.arange(12) % VOCAB, torch.tensor([11, 3, 4, 5, 6, 11])
    whole = ours.forward(ids, batch, paged.kv, backend(), rows).clone()
    now, later = ours.forward_in_part(ids, batch, paged.kv, backend(), rows, 1)
    torch.testing.assert_close(now, whole[:1])
    torch.testing.assert_close(later.logits(1, 4), whole[1:4])
    torch.testing.assert_close(later.logits(4, 6), whole[4:])
    assert later.logits(2, 2).shape == (0, VOCAB)
    if backend is NativeAttention:
        assert torch.equal(torch.cat((now, later.logits(1, 6))), whole)
        with pytest.raises(ValueError, match="3 rows from 4 of the last step's 6"):
            later.logits(4, 7)
        for first in (2**62, 2**63 - 1):
            with pytest.raises(ValueError, match=f"1 rows from {first} of the last step's 6 are wanted"):
                ours._native.logits(first, torch.zeros(1, VOCAB))
        with pytest.raises(ValueError, match="logits has 7 rows for 6 logits_indices"):
            ours.forward_in_part(ids, batch, paged.kv, backend(), rows, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_are_what_the_head_reads(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    ours = native(build("grouped queries", monkeypatch), dtype)
    paged = PagedSequences(ours.kv_layers, 16, 1, 12, dtype=NAMES[dtype])
    batch, ids, rows = paged.step({0: 12}), torch.arange(12) % VOCAB, torch.tensor([11, 3, 4])
    found = []
    for backend in (NativeAttention(), ReferenceAttention()):
        _, later = ours.forward_in_part(ids, batch, paged.kv, backend, rows, 1)
        found.append(later.hidden(1, 3))
    assert found[0].dtype is torch.float32
    torch.testing.assert_close(found[0], found[1], atol=1e-4 if dtype is torch.float32 else 0.06, rtol=0)
    _, later = ours.forward_in_part(ids, batch, paged.kv, NativeAttention(), rows, 1)
    with pytest.raises(ValueError, match="2 rows from 2 of the last step's 3"):
        later.hidden(2, 4)


def test_a_cache_may_be_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("sliding window", monkeypatch)
    ours = native(model, torch.float32)
    for seed in (0, 1):
        sequences = random_sequences(VOCAB, [25], seed=seed)
        assert_same_logits(
            paged_logits(ours, sequences, attention=NativeAttention(), seed=seed), whole_logits(model, sequences)
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": [VOCAB]}, rf"token_ids\[0\] is {VOCAB}, must be in \[0, {VOCAB}\)"),
        ({"ids": [-1]}, r"token_ids\[0\] is -1"),
        ({"rows": [1]}, r"logits_indices\[0\] is 1, must be in \[0, 1\)"),
        ({"positions": [5000]}, r"positions\[0\] is 5000"),
        ({"slots": [1 << 40]}, r"slot_mapping\[0\] is"),
        ({"tables": [[999]]}, "refers to block 999"),
        ({"table_rows": [1]}, r"table_rows\[0\] is 1, must be in \[0, 1\)"),
        ({"context_lens": [500]}, "needs 32 blocks for 500 tokens"),
    ],
)
def test_a_step_that_names_what_does_not_exist_is_a_value_error(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = native(build("grouped queries", monkeypatch), torch.float32)
    paged = PagedSequences(ours.kv_layers, 16, 1, 20)
    batch = paged.step({0: 1})
    batch.positions = torch.tensor(change.get("positions", batch.positions.tolist()))
    batch.context_lens = torch.tensor(change.get("context_lens", batch.context_lens.tolist())).int()
    batch.table_rows = torch.tensor(change.get("table_rows", batch.table_rows.tolist()))
    group = batch.groups[0]
    group.slot_mapping = torch.tensor(change.get("slots", group.slot_mapping.tolist()))
    group.block_tables = torch.tensor(change.get("tables", group.block_tables.tolist())).int()
    ids, rows = torch.tensor(change.get("ids", [1])), torch.tensor(change.get("rows", [0]))
    with pytest.raises(ValueError, match=message):
        ours.forward(ids, batch, paged.kv, NativeAttention(), rows)


@pytest.mark.parametrize("case", ["biases everywhere", "tied head", "phi3"])
def test_a_weight_packed_in_pieces_is_that_packed_whole(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(case, monkeypatch)
    weights = StateDict(model, {"v_proj": "Q8_0", "proj": "Q4_0", "embed": "Q8_0"})
    whole = native(model, torch.bfloat16, weights, quantised=True)
    monkeypatch.setattr(packing, "_BYTES_AT_ONCE", 1)
    pieces = native(model, torch.bfloat16, weights, quantised=True)
    for register in (Register.QKV, Register.INNER, Register.HIDDEN):
        for one, other in zip(products(whole, register), products(pieces, register), strict=True):
            for part, same in zip(native_parts(one), native_parts(other), strict=True):
                assert part[0].startswith("Q")
                assert torch.equal(part[1], same[1])
    assert torch.equal(native_parts(whole._head)[0][1], native_parts(pieces._head)[0][1])


def test_a_misshaped_tensor_is_named_with_both_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("grouped queries", monkeypatch)
    weights = StateDict(model, {"k_proj": "Q4_0"})
    weights.tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(16, 64)
    with pytest.raises(CorruptModelError, match=r"k_proj.weight' has shape \[16, 64\], .* declares \[32, 64\]"):
        native(model, torch.bfloat16, weights, quantised=True)


def test_a_gguf_file_is_used_as_it_is(tmp_path: Path) -> None:
    """The whole way from a file: names, row order of q and k, types."""
    write_gguf(tmp_path / "tiny.gguf", make_model("Llama"), quantization="Q8_0")
    source = resolve_model(str(tmp_path / "tiny.gguf"))
    config = load_model_config(source)
    weights = open_weights(source, config)
    ours = make_decoder(config, weights, dtype=torch.bfloat16, device=CPU, quantised=True)
    plain = make_decoder(config, weights, dtype=torch.bfloat16, device=CPU)
    assert ours.weight_bytes < 0.7 * plain.weight_bytes
    sequences = random_sequences(config.vocab_size, [40, 18])
    options: dict[str, Any] = {"attention": NativeAttention(), "dtype": "bfloat16"}
    for actual, expected in zip(
        paged_logits(ours, sequences, **options), paged_logits(plain, sequences, **options), strict=True
    ):
        assert (actual - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize(
    ("stored", "loaded"),
    [
        *((kind, kind) for kind in ("Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")),
        ("IQ3_S", "Q8_0"),
    ],
)
def test_quantised_types_are_loaded_as_planned_and_it_is_said_which_are_converted(
    stored: str, loaded: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "octavo.models.packing")
    write_gguf(tmp_path / "tiny.gguf", make_model("Llama", hidden_size=256, intermediate_size=256), quantization=stored)
    source = resolve_model(str(tmp_path / "tiny.gguf"))
    config = load_model_config(source)
    weights = open_weights(source, config)
    ours = make_decoder(config, weights, dtype=torch.bfloat16, device=CPU, quantised=True)
    assert isinstance(ours, NativeDecoder)
    assert 0 <= ours.weight_bytes - loaded_bytes(GGUFFile(source.path)) < 0.02 * ours.weight_bytes  # norms are float32
    assert (f"of weights in {stored} are multiplied as {loaded}" in caplog.text) == (stored != loaded)
    for layer, linear in enumerate(products(ours, Register.HIDDEN)[::2]):
        ((kind, packed, outputs, inputs, _),) = native_parts(linear)
        assert kind == loaded
        stored_values = weights.get(f"model.layers.{layer}.self_attn.o_proj.weight", torch.float32)
        found = PackedWeight(cast(kernels.WeightFormat, kind), outputs, inputs, packed).rows(
            torch.arange(outputs), torch.float32
        )
        error = (found - stored_values).abs().max()
        assert error <= (0 if stored == loaded else stored_values.abs().max() / 127)
