"""Folders with quantised weights give the logits of the weights that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from octavo import kernels
from octavo.attention.reference import ReferenceAttention
from octavo.checkpoint.model_source import load_model_config, model_of, resolve_model
from octavo.config import EngineConfig
from octavo.errors import ConfigError, CorruptModelError
from octavo.models.loader import open_weights
from octavo.models.native_decoder import make_decoder
from tests.models.paged import assert_same_logits, paged_logits, random_sequences, whole_logits
from tests.models.tiny import make_model, write_hf_model

Parts = dict[str, torch.Tensor]
GROUP = 32


def packed_rows(rows: list[list[int]], bits: int = 4) -> torch.Tensor:
    """Numbers in int32, the first in the lowest bits, without a gap."""
    words = [sum(number << bits * place for place, number in enumerate(row)) for row in rows]
    packed = [word.to_bytes(len(row) * bits // 8, "little") for word, row in zip(words, rows, strict=True)]
    return torch.from_numpy(np.frombuffer(b"".join(packed), np.int32).reshape(len(rows), -1).copy())


def fp8_in_blocks(
    weight: torch.Tensor, block: tuple[int, int] = (16, 16), part: str = "weight_scale_inv"
) -> tuple[Parts, torch.Tensor]:
    quants = (weight * 50).to(torch.float8_e4m3fn)
    scales = torch.rand([-(-size // step) for size, step in zip(weight.shape, block, strict=True)]) * 0.04
    meant = quants.float().clone()
    for row in range(weight.shape[0]):
        for column in range(weight.shape[1]):
            meant[row, column] *= scales[row // block[0], column // block[1]]
    return {"weight": quants, part: scales}, meant


def fp8_in_channels(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    quants, scales = (weight * 50).to(torch.float8_e4m3fn), torch.rand(len(weight), 1) * 0.04
    return {"weight": quants, "weight_scale": scales}, quants.float() * scales


def fp8_whole(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    quants = (weight * 50).to(torch.float8_e4m3fn)
    return {
        "weight": quants,
        "weight_scale": torch.tensor(0.02),
        "input_scale": torch.tensor(0.1),
    }, quants.float() * 0.02


def int8(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    quants = (weight * 40).round().clamp(-127, 127).to(torch.int8)
    return {"weight": quants, "weight_scale": torch.tensor([0.02])}, quants.float() * 0.02


def mixed(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    return (fp8_in_channels if weight.shape[0] == weight.shape[1] else int8)(weight)


def _quants(weight: torch.Tensor, bits: int = 4) -> tuple[list[list[int]], torch.Tensor]:
    """The bits of each weight, and a scale for each group of inputs: [out][in], [out, groups]."""
    half = 1 << bits - 1
    quants = ((weight + 2) * half / 2).round().clamp(0, 2 * half - 1).int()
    return quants.tolist(), torch.rand(len(weight), weight.shape[1] // GROUP) * 0.3


def packed(weight: torch.Tensor, bits: int = 4, ordered: bool = False) -> tuple[Parts, torch.Tensor]:
    quants, scales = _quants(weight, bits)
    order = torch.randperm(weight.shape[1]) if ordered else torch.arange(weight.shape[1])
    group, zero = order // GROUP, 1 << bits - 1
    meant = [[(q - zero) * scales[o, group[i]].item() for i, q in enumerate(row)] for o, row in enumerate(quants)]
    parts = {
        "weight_packed": packed_rows(quants, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    return parts | ({"weight_g_idx": group.int()} if ordered else {}), torch.tensor(meant)


def packed_with_zeros(weight: torch.Tensor, ordered: bool = False) -> tuple[Parts, torch.Tensor]:
    quants, scales = _quants(weight)
    zeros = torch.randint(0, 16, scales.shape)
    parts, _ = packed(weight, ordered=ordered)
    group = parts.get("weight_g_idx", torch.arange(weight.shape[1]) // GROUP)
    meant = [
        [(q - int(zeros[o, group[i]])) * scales[o, group[i]].item() for i, q in enumerate(row)]
        for o, row in enumerate(quants)
    ]
    parts |= {"weight_scale": scales, "weight_zero_point": packed_rows(zeros.T.tolist()).T.contiguous()}
    return parts, torch.tensor(meant)


def _groups(weight: torch.Tensor, bits: int = 4) -> tuple[list[list[int]], torch.Tensor, list[list[int]]]:
    """Quants [in][out], scales [groups, out], zero points [groups][out]."""
    quants, scales = _quants(weight, bits)
    columns = [list(column) for column in zip(*quants, strict=True)]
    return columns, scales.T.contiguous(), torch.randint(1, 1 << bits, scales.T.shape).tolist()


def gptq(weight: torch.Tensor, bits: int = 4) -> tuple[Parts, torch.Tensor]:
    quants, scales, zeros = _groups(weight, bits)
    order = torch.randperm(len(quants)) // GROUP  # of activations
    meant = [
        [(q - zeros[order[i]][o]) * scales[order[i], o].item() for i, q in enumerate(column)]
        for o, column in enumerate(zip(*quants, strict=True))
    ]
    return {
        "qweight": packed_rows([list(row) for row in zip(*quants, strict=True)], bits).T.contiguous(),
        "qzeros": packed_rows([[zero - 1 for zero in row] for row in zeros], bits),
        "scales": scales,
        "g_idx": order.int(),
    }, torch.tensor(meant)


def awq(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    quants, scales, zeros = _groups(weight)
    meant = [
        [(q - zeros[i // GROUP][o]) * scales[i // GROUP, o].item() for i, q in enumerate(column)]
        for o, column in enumerate(zip(*quants, strict=True))
    ]

    def mixed(rows: list[list[int]]) -> torch.Tensor:
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return packed_rows([[row[i + k] for i in range(0, len(row), 8) for k in order] for row in rows])

    return {"qweight": mixed(quants), "qzeros": mixed(zeros), "scales": scales}, torch.tensor(meant)


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    """`quantization_config` of compressed-tensors, with one group of modules."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "format": None}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}


SCHEMES: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], tuple[Parts, torch.Tensor]]]] = {
    "fp8": ({"quant_method": "fp8", "weight_block_size": [16, 16]}, fp8_in_blocks),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_whole),
    "W8A8, fp8": (compressed("float-quantized"), fp8_in_channels),
    "W8A8, fp8 in blocks": (
        compressed("float-quantized", block_structure=[24, 40]),
        partial(fp8_in_blocks, block=(24, 40), part="weight_scale"),
    ),
    "W8A8, int8": (compressed("int-quantized"), int8),
    "mixed": (compressed("mixed-precision"), mixed),
    "W4A16": (compressed("pack-quantized"), packed),
    "W4A16 with zeros": (compressed("pack-quantized"), packed_with_zeros),
    "W4A16 ordered": (compressed("pack-quantized", actorder="group"), partial(packed_with_zeros, ordered=True)),
    "W3A16": (compressed("pack-quantized"), partial(packed, bits=3)),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}, gptq),
    "gptq in 3 bits": ({"quant_method": "gptq", "bits": 3, "group_size": GROUP}, partial(gptq, bits=3)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
}


def write(folder: Path, scheme: str) -> tuple[Any, Parts]:
    """Write a tiny model with quantised projections; returns the model with what they stand for, and the tensors."""
    quantization, quantise = SCHEMES[scheme]
    model = make_model("Llama")
    tensors: Parts = {}
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "_proj" not in name:
                tensors[name] = tensor.clone()
                continue
            parts, meant = quantise(tensor)
            tensor.copy_(meant)
            tensors |= {f"{name.removesuffix('.weight')}.{part}": values for part, values in parts.items()}
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return model, tensors


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantised_weights_give_the_logits_of_what_they_stand_for(scheme: str, tmp_path: Path) -> None:
    model, _ = write(tmp_path, scheme)
    source = resolve_model(str(tmp_path))
    config = load_model_config(source)
    assert config.runs_natively
    ours = make_decoder(config, open_weights(source, config), dtype=torch.float32, device=torch.device("cpu"))
    sequences = random_sequences(config.vocab_size, [20, 7])
    paged = paged_logits(ours, sequences, attention=ReferenceAttention())
    assert_same_logits(paged, whole_logits(model, sequences), tolerance=1e-3)


def test_experts_in_mxfp4_give_the_logits_of_what_they_stand_for(tmp_path: Path) -> None:
    model = make_model("GptOss", num_local_experts=4, head_dim=16, initializer_range=0.2)
    tensors: Parts = {}
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                tensors[name] = tensor.clone()
                continue
            experts, inputs, outputs = tensor.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(120, 124, blocks.shape[:-1], dtype=torch.uint8)
            tensor.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    quantization = {"quant_method": "mxfp4"}
    config = {**model.config.to_dict(), "architectures": ["GptOssForCausalLM"], "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    source = resolve_model(str(tmp_path))
    read = load_model_config(source)
    assert read.runs_natively
    weights = open_weights(source, read)
    raw = weights.raw("model.layers.0.mlp.experts.down_proj[3].weight")
    assert raw is not None
    down = model.state_dict()["model.layers.0.mlp.experts.down_proj"][3].T
    assert np.array_equal(gguf.dequantize(raw.rows, raw.type), down.numpy())
    ours = make_decoder(read, weights, dtype=torch.float32, device=torch.device("cpu"))
    sequences = random_sequences(read.vocab_size, [20, 7])
    assert_same_logits(paged_logits(ours, sequences, attention=ReferenceAttention()), whole_logits(model, sequences))


@pytest.mark.slow
def test_parts_that_do_not_fit_together_are_corrupt(tmp_path: Path) -> None:
    _, tensors = write(tmp_path, "gptq")
    tensors["model.layers.1.mlp.down_proj.scales"] = torch.ones(2, 64)  # of three groups
    save_file(tensors, tmp_path / "model.safetensors")
    source = resolve_model(str(tmp_path))
    with pytest.raises(CorruptModelError, match=r"layers.1.mlp.down_proj.weight: its quantised parts do not fit"):
        open_weights(source, load_model_config(source)).get("model.layers.1.mlp.down_proj.weight", torch.float32)
    write(tmp_path, "fp8")
    stated = json.loads((tmp_path / "config.json").read_text())
    for block in ([16, []], [16, 0], 16):
        stated["quantization_config"]["weight_block_size"] = block
        (tmp_path / "config.json").write_text(json.dumps(stated))
        with pytest.raises(CorruptModelError, match=r"down_proj.weight: its quantised parts do not fit"):
            open_weights(source, load_model_config(source)).raw("model.layers.1.mlp.down_proj.weight")


@pytest.mark.slow
def test_a_matrix_in_fp8_without_its_scale_is_corrupt(tmp_path: Path) -> None:
    _, tensors = write(tmp_path, "fp8")
    del tensors["model.layers.1.mlp.down_proj.weight_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors")
    source = resolve_model(str(tmp_path))
    with pytest.raises(CorruptModelError, match=r"down_proj.weight is stored in 8 bits \(torch.float8_e4m3fn\), but"):
        open_weights(source, load_model_config(source)).get("model.layers.1.mlp.down_proj.weight", torch.float32)


NEAREST = {"W4A16": "Q4_0", "W3A16": "Q4_1", "W4A16 with zeros": "Q4_1", "awq": "Q4_1"}  # and Q8_0
EXACT = {"W8A8, int8", *NEAREST}  # the others are fp8, or their order of activations mixes groups


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_matrices_are_repacked_to_the_nearest_format_of_the_kernels(scheme: str, tmp_path: Path) -> None:
    model, _ = write(tmp_path, scheme)
    source = resolve_model(str(tmp_path))
    config = load_model_config(source)
    weights = open_weights(source, config)
    for name, meant in model.state_dict().items():
        if "_proj" not in name:
            assert weights.raw(name) is None
            continue
        raw = weights.raw(name)
        assert raw is not None
        assert (raw.type.name, raw.shape) == (NEAREST.get(scheme, "Q8_0"), tuple(meant.shape))
        blocks = meant.reshape(-1, 32)
        off = (torch.from_numpy(gguf.dequantize(raw.rows, raw.type)).reshape(-1, 32) - blocks).abs().amax(1)
        rows = raw.rows.reshape(-1, gguf.GGML_QUANT_SIZES[raw.type][1])
        scales = torch.from_numpy(rows[:, :2].copy().view(np.float16)).float()[:, 0].abs()
        # Scales, and their products with zero points of up to 15, are rounded to fp16; the others' weights to a scale.
        assert (off <= scales * (16 * 2**-10 if scheme in EXACT else 0.5 + 2**-3) + 127 * 2**-25).all()
    packed = make_decoder(
        config, weights, dtype=torch.bfloat16, device=torch.device("cpu"), quantised=kernels.available()
    )
    in_bf16 = sum(2 * weight.numel() for weight in model.state_dict().values())
    assert not kernels.available() or packed.weight_bytes < 0.8 * in_bf16


@pytest.mark.parametrize(("online", "projections"), [("Q8_0", "Q8_0"), ("Q4_0", "Q4_0")])
def test_floats_can_be_quantised_as_they_are_read(online: str, projections: str, tmp_path: Path) -> None:
    write_hf_model(tmp_path, "Llama")
    source = resolve_model(str(tmp_path))
    config = load_model_config(source)
    weights = open_weights(source, config, online)
    kinds = {name: raw.type.name for name in weights.names() if (raw := weights.raw(name)) is not None}
    assert kinds.pop("model.embed_tokens.weight") == kinds.pop("lm_head.weight") == "Q8_0"
    assert set(kinds.values()) == {projections}
    assert len(kinds) == 7 * config.num_layers


def test_a_format_that_the_file_does_not_hold_is_refused_with_what_it_holds(tmp_path: Path) -> None:
    write(tmp_path, "awq")
    for given in ("awq", "awq_marlin", "auto", "none"):
        model_of(EngineConfig(model=str(tmp_path), quantization=given))
    with pytest.raises(ConfigError, match=r"quantization is 'gptq', but .* contains weights in awq"):
        model_of(EngineConfig(model=str(tmp_path), quantization="gptq"))
    with pytest.raises(ConfigError, match=r"'q8_0' is for floats, and .* contains weights in awq"):
        model_of(EngineConfig(model=str(tmp_path), quantization="q8_0"))
    write_hf_model(tmp_path / "floats", "Llama")
    with pytest.raises(ConfigError, match=r"quantization is 'fp8', but .* contains floats"):
        model_of(EngineConfig(model=str(tmp_path / "floats"), quantization="fp8"))
