"""Weights come out as transformers loads them, bit by bit, whatever file they lie in."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from octavo.checkpoint.model_source import load_model_config, resolve_model
from octavo.errors import CorruptModelError, ModelNotFoundError, UnsupportedModelError
from octavo.models.loader import expected_shapes, open_weights
from octavo.models.weights import WeightSource
from tests.models import tiny


def opened(path: Path) -> WeightSource:
    source = resolve_model(str(path))
    return open_weights(source, load_model_config(source))


def assert_same_bits(weights: dict[str, torch.Tensor], model: Any) -> None:
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    assert weights.keys() == state.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor.view(torch.int32), state[name].view(torch.int32)), name


def test_the_expected_tensors_are_those_of_transformers(tmp_path: Path) -> None:
    for family, overrides in (
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Mistral", {"head_dim": 8}),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Qwen3", {"head_dim": 24, "attention_bias": True}),
    ):
        model = tiny.write_hf_model(tmp_path / family, family, **overrides)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            del shapes["lm_head.weight"]
        assert expected_shapes(load_model_config(tmp_path / family)) == shapes


@pytest.mark.parametrize("shards", [False, True])
def test_safetensors_are_read_whole_or_in_shards(shards: bool, tmp_path: Path) -> None:
    model = tiny.write_hf_model(tmp_path, "Llama", shards=shards)
    assert (tmp_path / "model.safetensors.index.json").exists() == shards
    source = resolve_model(str(tmp_path))
    assert_same_bits(tiny.load_weights(source, load_model_config(source)), model)


def test_names_of_a_model_saved_without_its_head_get_their_first_part(tmp_path: Path) -> None:
    tiny.write_hf_model(tmp_path, "Qwen3", tie_word_embeddings=True)
    source, base = resolve_model(str(tmp_path)), "model."
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name.removeprefix(base): each for name, each in tensors.items()}, tmp_path / "model.safetensors")
    loaded = tiny.load_weights(source, load_model_config(source))
    assert loaded.keys() == tensors.keys()
    for name, tensor in loaded.items():
        assert torch.equal(tensor, tensors[name]), name


def test_a_head_may_lie_next_to_names_without_their_first_part(tmp_path: Path) -> None:
    model = tiny.write_hf_model(tmp_path, "Qwen3")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name.removeprefix("model."): each for name, each in tensors.items()}, tmp_path / "model.safetensors")
    source = resolve_model(str(tmp_path))
    assert_same_bits(tiny.load_weights(source, load_model_config(source)), model)


def test_a_model_without_its_head_says_that_it_can_only_embed(tmp_path: Path) -> None:
    tiny.write_hf_model(tmp_path, "Qwen3")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CorruptModelError, match=r"without its head, and cannot generate.*tie_word_embeddings"):
        opened(tmp_path)
    source = replace(resolve_model(str(tmp_path)), overrides={"tie_word_embeddings": True})
    assert open_weights(source, load_model_config(source)).has("model.embed_tokens.weight")


def test_a_dtype_is_converted_as_torch_rounds(tmp_path: Path) -> None:
    model = tiny.write_hf_model(tmp_path, "Llama")
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(opened(tmp_path).get(name, torch.bfloat16), model.state_dict()[name].to(torch.bfloat16))


def test_safetensors_have_no_raw_bytes(tmp_path: Path) -> None:
    tiny.write_hf_model(tmp_path, "Llama")
    assert opened(tmp_path).raw("model.norm.weight") is None


def test_a_missing_tensor_is_named_with_the_shape_it_should_have(tmp_path: Path) -> None:
    tiny.write_hf_model(tmp_path, "Llama")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CorruptModelError, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight.*\[96, 64\]"):
        opened(tmp_path)


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(tmp_path: Path) -> None:
    model = tiny.write_hf_model(tmp_path, "Llama", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = model.lm_head.weight.detach().clone()
    save_file(tensors, tmp_path / "model.safetensors")
    opened(tmp_path)
    tensors["lm_head.weight"][7, 3] += 0.5
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        CorruptModelError, match=r"contains a lm_head\.weight that differs .*\"tie_word_embeddings\": false"
    ):
        opened(tmp_path)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    tiny.write_hf_model(tmp_path, "Llama")
    stated = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stated | {"intermediate_size": 80}))
    with pytest.raises(CorruptModelError, match=r"mlp\.gate_proj\.weight is \[96, 64\].* says \[80, 64\]"):
        opened(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(stated | {"head_dim": 1 << 30, "hidden_size": 1 << 31}))
    with pytest.raises(CorruptModelError, match=r"q_proj\.weight is \[4294967296, 2147483648\] by the configuration"):
        opened(tmp_path)


def test_a_truncated_safetensors_file_is_corrupt(tmp_path: Path) -> None:
    tiny.write_hf_model(tmp_path, "Llama")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CorruptModelError, match="truncated or corrupt"):
        opened(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    tiny.write_hf_model(tmp_path, "Llama", shards=True)
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(CorruptModelError, match=f"{shard.name} is missing"):
        opened(tmp_path)


def test_an_index_that_names_the_wrong_shard_is_corrupt(tmp_path: Path) -> None:
    tiny.write_hf_model(tmp_path, "Llama", shards=True)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shards = sorted(set(index["weight_map"].values()))
    name = next(name for name, shard in index["weight_map"].items() if shard == shards[0])
    index["weight_map"][name] = shards[1]
    path.write_text(json.dumps(index))
    with pytest.raises(CorruptModelError, match=f"does not contain {name}"):
        opened(tmp_path)


def test_an_index_whose_shards_are_no_names_is_corrupt(tmp_path: Path) -> None:
    tiny.write_hf_model(tmp_path, "Llama", shards=True)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": 3, "x": "y"}}')
    with pytest.raises(CorruptModelError, match="no weight_map of names of files"):
        opened(tmp_path)


def test_pickled_weights_are_refused_and_the_message_converts_them(tmp_path: Path) -> None:
    tiny.write_hf_model(tmp_path, "Llama")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin.*save_pretrained"):
        opened(tmp_path)


def test_a_folder_without_weights_is_not_found(tmp_path: Path) -> None:
    tiny.write_hf_model(tmp_path, "Llama")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"no model\.safetensors"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("Llama", "F32"),
        ("Llama", "F16"),
        ("Llama", "BF16"),
        ("Llama", "Q8_0"),
        ("Llama", "Q4_0"),
        ("Llama", "Q4_1"),
        ("Mistral", "Q4_0"),
        ("Qwen2", "Q8_0"),
        ("Qwen3", "Q4_1"),
    ],
)
def test_gguf_weights_are_bit_by_bit_those_transformers_loads(family: str, quantization: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    tiny.write_gguf(path, tiny.make_model(family), quantization=quantization)
    source = resolve_model(str(path))
    theirs = tiny.load_gguf_with_transformers(path)
    assert_same_bits(tiny.load_weights(source, load_model_config(source)), theirs)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_are_bit_by_bit_those_transformers_loads(quantization: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    model = tiny.make_model("Llama", hidden_size=256, intermediate_size=256)
    tiny.write_gguf(path, model, quantization=quantization)
    source = resolve_model(str(path))
    theirs = tiny.load_gguf_with_transformers(path)
    assert_same_bits(tiny.load_weights(source, load_model_config(source)), theirs)


def test_rows_of_queries_and_keys_come_back_in_hugging_face_order(tmp_path: Path) -> None:
    model = tiny.make_model("Llama")
    tiny.write_gguf(tmp_path / "tiny.gguf", model)
    weights = opened(tmp_path)
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"):
        assert torch.equal(weights.get(name, torch.float32), model.state_dict()[name])


def test_a_llama_file_with_biases_reorders_them_like_their_rows(tmp_path: Path) -> None:
    model = tiny.make_model("Llama", attention_bias=True)
    tiny.write_gguf(tmp_path / "tiny.gguf", model)
    name = "model.layers.0.self_attn.q_proj.bias"
    assert torch.equal(opened(tmp_path).get(name, torch.float32), model.state_dict()[name])


@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_0", "Q4_1"])
def test_raw_rows_are_the_stored_bytes_in_the_order_of_the_values(quantization: str, tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "tiny.gguf", tiny.make_model("Llama"), quantization=quantization)
    weights = opened(tmp_path)
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        raw = weights.raw(name)
        assert raw is not None
        assert raw.type is gguf.GGMLQuantizationType[quantization]
        values = gguf.dequantize(raw.rows, raw.type)
        assert values.shape == raw.shape
        assert np.array_equal(values, weights.get(name, torch.float32).numpy())
    assert weights.raw("model.norm.weight") is None


def test_a_tensor_type_that_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    model = tiny.make_model("Llama", hidden_size=256, intermediate_size=256)
    tiny.write_gguf(tmp_path / "tiny.gguf", model, quantization="NVFP4")
    with pytest.raises(UnsupportedModelError, match=r"stored as NVFP4; supported: F32, .*Q6_K, .*IQ4_XS"):
        opened(tmp_path)


def test_a_gguf_file_that_lacks_a_tensor_is_corrupt(tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "tiny.gguf", tiny.make_model("Llama"), leave_out=("blk.1.ffn_up.weight",))
    with pytest.raises(CorruptModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        opened(tmp_path)


def test_loaded_weights_do_not_write_through_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    tiny.write_gguf(path, tiny.make_model("Llama"))
    before = path.read_bytes()
    opened(path).get("model.norm.weight", torch.float32).zero_()
    assert path.read_bytes() == before
    assert not torch.equal(opened(path).get("model.norm.weight", torch.float32), torch.zeros(64))


@pytest.mark.slow
def test_the_packaged_model_is_bit_by_bit_what_gguf_and_transformers_make_of_it() -> None:
    # Not through transformers' own loader, which spends most of a minute on the metadata of this file.
    source = resolve_model("smollm2")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(source.path).tensors}
    reorder = LlamaTensorProcessor({"num_attention_heads": 9, "num_key_value_heads": 3})
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    for name, tensor in tiny.load_weights(source, load_model_config(source)).items():
        stem, kind = name.rsplit(".", 1)
        theirs = stored[f"{names.get_name(stem)}.{kind}"]
        expected = reorder.process(gguf.dequantize(theirs.data, theirs.tensor_type), theirs.name).weights
        assert np.array_equal(tensor.numpy().view(np.int32), np.ascontiguousarray(expected).view(np.int32)), name


@pytest.mark.slow
def test_the_shapes_of_a_model_are_found_without_importing_torchs_compiler() -> None:
    """That import takes longer than all else that is done to load the default model."""
    code = (
        "import sys; from dataclasses import replace; from octavo.models.loader import expected_shapes\n"
        "from octavo.checkpoint.model_source import load_model_config, resolve_model\n"
        "config = load_model_config(resolve_model('smollm2')); expected_shapes(config)\n"
        "expected_shapes(replace(config, layer=replace(config.layer, norm_offset=1.0)))\n"  # as Gemma's
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
