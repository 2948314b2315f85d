"""Architectures that only transformers implements give the same logits over block tables as by themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from octavo.attention.native import NativeAttention
from octavo.attention.reference import ReferenceAttention
from octavo.checkpoint.hf_config import read_hf_config
from octavo.errors import CorruptModelError, ModelNotFoundError, UnsupportedModelError
from octavo.models.transformers_bridge import TransformersModel
from tests.attention.batches import PagedSequences
from tests.models.paged import assert_same_logits, paged_logits, random_sequences, whole_logits

VOCAB = 61
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
}
GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 128, "vocab_size": VOCAB, "bos_token_id": 1}

SCALED_QUERIES = {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 16}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 9},
    "Gemma": {},
    "Gemma2": {"sliding_window": 9, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
    "Gemma3Text": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "Phi": {},
    "Phi3": {"sliding_window": 9},
    "GPTNeoX": {},
    "GPT2": GPT2,
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "StableLm": {},
    "Starcoder2": {"sliding_window": 9},
    "Granite": {"logits_scaling": 2.0, "attention_multiplier": 0.2, "residual_multiplier": 0.3},
    "Cohere": {"logit_scale": 0.5},
    "Cohere2": {"sliding_window": 9},
    "Ministral3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **SCALED_QUERIES}},
    "Olmo": {"clip_qkv": 1.0},
    "Olmo2": {},
    "Olmo3": {"sliding_window": 9},
    "Glm": {},
    "Glm4": {},
    "SmolLM3": {"no_rope_layers": [1, 1, 0]},
    "Exaone4": {"sliding_window": 9},
    "Ernie4_5": {},
    "Mixtral": EXPERTS,
    "Qwen2Moe": {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4},
    "Qwen3Moe": {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "GptOss": {**EXPERTS, "sliding_window": 9, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "DeepseekV2": {**LATENT, "topk_method": "greedy"},
    "DeepseekV3": LATENT,
    "MiniMaxM2": EXPERTS,
    "ModernBertDecoder": {"local_attention": 18, "global_attn_every_n_layers": 2},
    "HunYuanMoEV1": {"num_experts": 4, "moe_topk": 2},
}


WINDOWED = {
    "Llama": [None, None, None],
    "Mistral": [9, 9, 9],
    "Gemma2": [9, None, 9],
    "Gemma3Text": [9, None, 9],
    "GptOss": [9, None, 9],
}


def build(name: str, **extra: Any) -> Any:
    """A tiny random model of transformers' `name`, attending eagerly."""
    config_class = getattr(transformers, f"{name}Config")
    config = config_class(
        **({**TINY, **ARCHITECTURES.get(name, EXPERTS), **extra} if name != "GPT2" else {**GPT2, **extra})
    )
    config.pad_token_id = 0
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # The usual 0.02 makes such small models nearly blind to their context.
            parameter.normal_(std=0.25) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_paged_logits_are_those_of_transformers(name: str) -> None:
    model = build(name)
    sequences = random_sequences(VOCAB, [37, 5, 21])
    expected = whole_logits(model, sequences)
    assert_same_logits(paged_logits(TransformersModel(model), sequences, block_size=4), expected)


# What Octavo's kernels compute of a layer: all of it, or its attention, its gated MLP and its RMS norms.
FUSED = {
    "Llama": "all",
    "Gemma": "all",
    "Gemma2": "all",
    "Gemma3Text": "all",
    "Phi3": "all",
    "SmolLM3": "all",
    "Exaone4": "attention, MLP, norms",
    "Granite": "attention, MLP, norms",
    "Qwen3Moe": "attention, norms",
    "Phi": "attention",
    "StableLm": "attention, MLP",
    "Ministral3": "MLP, norms",  # queries scaled by their position
    "Olmo": "MLP",  # clipped queries, keys and values
    "Olmo2": "MLP, norms",  # norms over all heads
    "Glm4": "MLP, norms",  # interleaved rotation
    "GPT2": "",
}


@pytest.mark.parametrize("name", FUSED)
def test_modules_that_kernels_compute_are_recognised_by_their_results(name: str) -> None:
    model = build(name)
    bridge = TransformersModel(model, packed=True)
    parts = {type(module.forward.__self__).__name__ for module in model.modules() if "forward" in vars(module)}
    names = {"_Attention": "attention", "_GatedMLP": "MLP", "_Norm": "norms"}
    found = ", ".join(shown for part, shown in names.items() if part in parts)
    assert ("all" if bridge._fused.all else found) == FUSED[name]
    assert bridge._fused.keep_rows == bridge._fused.all


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_matrices_give_the_logits_of_transformers(name: str) -> None:
    # Heads that the attention kernels take.
    wide = {} if name == "GPT2" or "head_dim" in ARCHITECTURES[name] else {"hidden_size": 64, "head_dim": 16}
    model = build(name, **wide)
    sequences = random_sequences(VOCAB, [37, 5, 21])
    expected = whole_logits(model, sequences)
    before = sum(parameter.nbytes for parameter in model.parameters())
    packed = TransformersModel(model, packed=True)
    assert_same_logits(paged_logits(packed, sequences, attention=NativeAttention()), expected)
    assert not any(type(module) is torch.nn.Linear for module in model.modules())
    left = sum(parameter.nbytes for parameter in model.parameters())
    assert left < before / 3  # the embedding, norms and routers


def test_a_head_tied_to_the_embedding_is_packed_once() -> None:
    model = build("Llama", tie_word_embeddings=True)
    sequences = random_sequences(VOCAB, [9])
    expected = whole_logits(model, sequences)
    packed = TransformersModel(model, packed=True)
    assert_same_logits(paged_logits(packed, sequences, block_size=4), expected)
    assert not any(parameter.shape[0] == VOCAB for parameter in model.parameters())


@pytest.mark.parametrize(("format", "within"), [("Q8_0", 0.1), ("Q4_0", 0.8)])
def test_matrices_can_be_quantised_when_they_are_packed(format: Any, within: float) -> None:
    sequences = random_sequences(VOCAB, [21])
    [expected] = whole_logits(build("Llama"), sequences)
    whole = TransformersModel(build("Llama"), packed=True)
    quantised = TransformersModel(build("Llama"), packed=True, format=format)
    [logits] = paged_logits(quantised, sequences, block_size=4)
    assert 0 < (logits - expected).norm() / expected.norm() < within
    assert quantised.weight_bytes < whole.weight_bytes / 1.5


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 16,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("name", "rope", "max_len", "lengths"),
    [
        ("Phi3", LONGROPE, None, [37, 21]),
        ("Phi3", LONGROPE, 16, [16, 5]),
        ("Llama", DYNAMIC, None, [37, 5]),
        ("Llama", DYNAMIC, 128, [128]),
    ],
)
def test_a_rope_that_grows_is_fixed_by_the_longest_sequence(
    name: str, rope: dict[str, Any], max_len: int | None, lengths: list[int]
) -> None:
    model = build(name, rope_parameters=rope)
    sequences = random_sequences(VOCAB, lengths)
    expected = whole_logits(model, sequences)
    bridge = TransformersModel(model, max_len=max_len)
    assert_same_logits(paged_logits(bridge, sequences, block_size=4), expected)
    # Alone or together, and after a longer one.
    for ids, logits in zip(reversed(sequences), reversed(expected), strict=True):
        assert_same_logits(paged_logits(bridge, [ids], block_size=4), [logits])


def test_torch_takes_one_thread_next_to_the_kernels_where_rows_are_few() -> None:
    before, seen = torch.get_num_threads(), set()
    bridge = TransformersModel(build("Olmo"), packed=True)
    bridge._decoder.register_forward_pre_hook(lambda module, inputs: seen.add(torch.get_num_threads()))
    torch.set_num_threads(3)
    try:
        paged_logits(bridge, random_sequences(VOCAB, [21, 5]), block_size=4)
        assert torch.get_num_threads() == 3
        assert seen == {1}
    finally:
        torch.set_num_threads(before)


def test_a_hybrid_with_attention_alone_runs() -> None:
    sizes = {"shared_intermediate_size": 48, "mamba_n_heads": 4, "mamba_d_head": 16}
    model = build("GraniteMoeHybrid", layer_types=["full_attention"] * 3, **sizes)
    sequences = random_sequences(VOCAB, [21, 5])
    expected = whole_logits(model, sequences)
    assert_same_logits(paged_logits(TransformersModel(model, packed=True), sequences, block_size=4), expected)


WRAPPERS: dict[str, Any] = {
    "Mistral3": lambda: transformers.Mistral3Config(
        text_config={"model_type": "mistral", **TINY},
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
        },
    ),
    "Qwen2_5_VL": lambda: transformers.Qwen2_5_VLConfig(
        text_config={
            **TINY,
            "head_dim": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        },
        vision_config={"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 4, "out_hidden_size": 32},
    ),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_text_of_a_wrapper_is_served_without_its_encoders(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(WRAPPERS[name](), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.25) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path)
    sequences = random_sequences(VOCAB, [21, 5])
    bridge = TransformersModel.load(tmp_path, dtype=torch.float32, packed=True)
    assert_same_logits(paged_logits(bridge, sequences, block_size=4), whole_logits(model, sequences))
    assert not any("visi" in name or "visual" in name for name, _ in bridge._model.named_parameters())


def test_windows_are_read_off_the_models_own_masks() -> None:
    windows = {name: [layer.sliding_window for layer in TransformersModel(build(name)).kv_layers] for name in WINDOWED}
    assert windows == WINDOWED


def test_a_window_as_long_as_the_context_is_full_attention() -> None:
    model = build("Mistral")
    model.config.sliding_window = model.config.max_position_embeddings
    assert {layer.sliding_window for layer in TransformersModel(model).kv_layers} == {None}


def test_latent_attention_stores_values_narrower_than_keys() -> None:
    layer = TransformersModel(build("DeepseekV3")).kv_layers[0]
    assert (layer.num_kv_heads, layer.key_dim, layer.value_dim) == (4, 12, 6)


def test_only_the_asked_for_rows_become_logits() -> None:
    model = build("Gemma2")
    [ids] = random_sequences(VOCAB, [12])
    [expected] = whole_logits(model, [ids])
    bridge = TransformersModel(model)
    paged = PagedSequences(bridge.kv_layers, 4, 1, 12)
    with torch.inference_mode():
        rows = bridge.forward(ids, paged.step({0: 12}), paged.kv, ReferenceAttention(), torch.tensor([11, 3]))
    torch.testing.assert_close(rows, expected[[11, 3]], atol=1e-4, rtol=0)


@pytest.mark.parametrize("packed", [False, True])
def test_bfloat16_stays_close_to_float32(packed: bool) -> None:
    model = build("Gemma2")
    sequences = random_sequences(VOCAB, [20, 9])
    expected = whole_logits(model, sequences)
    bridge = TransformersModel(model.to(torch.bfloat16), packed=packed)
    for ours, theirs in zip(paged_logits(bridge, sequences, dtype="bfloat16"), expected, strict=True):
        assert (ours - theirs).norm() < 0.1 * theirs.norm()


@pytest.mark.parametrize(
    ("name", "extra", "reason"),
    [
        ("Mamba", {}, "MambaForCausalLM: it carries a recurrent state"),
        ("Jamba", {}, "JambaForCausalLM: it carries a recurrent state"),
        ("Bloom", {}, "BloomForCausalLM: its layers do not attend through"),
        ("Lfm2", {"full_attn_idxs": [1]}, "Lfm2ForCausalLM: layers of type 'conv'"),
        ("Llama4Text", {"attention_chunk_size": 8, "num_local_experts": 2}, "layers of type 'chunked_attention'"),
        ("Bart", {"decoder_layers": 1, "d_model": 16}, "BartForCausalLM: it counts positions by itself"),
        ("DiffLlama", {}, "DiffLlamaForCausalLM, attention layer 1: one attention module is called twice"),
        ("Bert", {"is_decoder": False}, "BertLMHeadModel, attention layer 0: its attention is not causal"),
    ],
)
def test_what_does_not_fit_into_blocks_is_refused(name: str, extra: dict[str, Any], reason: str) -> None:
    config = getattr(transformers, f"{name}Config")(**{**TINY, **extra})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with pytest.raises(UnsupportedModelError, match=reason):
        TransformersModel(model)


def test_a_model_whose_own_code_fails_is_refused_with_its_error() -> None:
    model = build("Llama")
    del model.model.layers[1].mlp
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM: a pass over 3 tokens ends with AttributeError"):
        TransformersModel(model)


def test_an_encoder_decoder_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    transformers.T5Config(d_model=16, num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="T5Config: transformers has no causal language model"):
        TransformersModel.load(tmp_path, dtype=torch.float32)
    transformers.BartConfig().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="BartForCausalLM: an encoder's states do not live in blocks"):
        TransformersModel.load(tmp_path, dtype=torch.float32)


def test_a_decoder_that_attends_by_itself_is_refused_for_that(tmp_path: Path) -> None:
    """XGLM states its sizes by names of its own."""
    transformers.XGLMConfig(num_layers=1, attention_heads=2, d_model=16).save_pretrained(tmp_path)
    assert read_hf_config(tmp_path).num_heads == 2
    with pytest.raises(UnsupportedModelError, match="XGLMForCausalLM: its layers do not attend through"):
        TransformersModel.load(tmp_path, dtype=torch.float32)


def test_a_saved_model_loads_and_computes_the_same(tmp_path: Path) -> None:
    model = build("Gemma2")
    model.generation_config.eos_token_id = [2, 7]
    model.save_pretrained(tmp_path)
    sequences = random_sequences(VOCAB, [11, 6])
    bridge = TransformersModel.load(tmp_path, dtype=torch.float32)
    assert_same_logits(paged_logits(bridge, sequences), whole_logits(model, sequences))
    assert bridge.eos_token_ids == {2, 7}
    assert bridge.max_position_embeddings == 128
    assert bridge.weight_bytes >= sum(parameter.nbytes for parameter in model.parameters())


def test_a_checkpoint_without_all_its_tensors_is_refused(tmp_path: Path) -> None:
    model = build("Olmo2")
    tensors = model.state_dict()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    model.save_pretrained(tmp_path, state_dict=tensors)
    with pytest.raises(CorruptModelError, match=r"1 tensors are missing .*'model.layers.1.mlp.up_proj.weight'"):
        TransformersModel.load(tmp_path, dtype=torch.float32)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=str(tmp_path)):
        TransformersModel.load(tmp_path, dtype=torch.float32)


@pytest.mark.parametrize("model_type", ["own_kind", "olmo2"])
def test_code_that_a_folder_brings_is_not_run(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build("Olmo2").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": model_type, "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    if model_type == "own_kind":
        with pytest.raises(UnsupportedModelError, match="brings code of its own"):
            TransformersModel.load(tmp_path, dtype=torch.float32)
    else:
        TransformersModel.load(tmp_path, dtype=torch.float32)
    assert not (tmp_path / "ran").exists()
    assert "y/N" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "method", [{"quant_method": "bitsandbytes", "load_in_4bit": True}, {"quant_method": "hqq"}, {"quant_method": "new"}]
)
def test_a_quantisation_whose_package_is_missing_or_that_is_unknown_is_refused(
    method: dict[str, Any], tmp_path: Path
) -> None:
    build("Olmo2").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    with pytest.raises(UnsupportedModelError, match=str(tmp_path)):
        TransformersModel.load(tmp_path, dtype=torch.float32)


def test_a_configuration_that_transformers_refuses_is_refused_with_its_reason(tmp_path: Path) -> None:
    build("Olmo2").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": "small"}))
    with pytest.raises(UnsupportedModelError, match="'rms_norm_eps' expected float, got str"):
        TransformersModel.load(tmp_path, dtype=torch.float32)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    model = build("Olmo2")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelNotFoundError, match="safetensors"):
        TransformersModel.load(tmp_path, dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_asked_for_in_slices_are_those_of_one_pass_and_no_more_are_made_at_once(name: str) -> None:
    bridge = TransformersModel(build(name))
    ids = random_sequences(VOCAB, [24])[0]
    rows = torch.tensor([23, *range(20)])
    made: list[int] = []
    with torch.inference_mode():
        caches = [PagedSequences(bridge.kv_layers, 4, 1, 24) for _ in range(2)]
        whole, in_part = [(ids, paged.step({0: 24}), paged.kv, ReferenceAttention(), rows) for paged in caches]
        at_once = bridge.forward(*whole)
        bridge._model.get_output_embeddings().register_forward_hook(
            lambda module, inputs, output: made.append(output.shape[-2])
        )
        now, later = bridge.forward_in_part(*in_part, num_now=1)
        slices = [later.logits(first, min(first + 6, 21)) for first in range(1, 21, 6)]
    torch.testing.assert_close(torch.cat([now, *slices]), at_once, atol=1e-4, rtol=1e-4)
    assert made == [1, 6, 6, 6, 2]
    assert "forward" not in vars(bridge._model.get_decoder())


@pytest.mark.parametrize("name", ["GPT2", "Gemma2", "Cohere", "OPT"])
def test_hidden_states_are_those_of_transformers_decoder(name: str) -> None:
    model = build(name)
    (ids,) = random_sequences(VOCAB, [12])
    with torch.inference_mode():
        expected = model.get_decoder()(ids[None], use_cache=False).last_hidden_state[0]
        whole = model(ids[None], use_cache=False).logits[0]
        ours = TransformersModel(model, packed=True)  # Gemma 2's last layer returns only these rows
        paged = PagedSequences(ours.kv_layers, 4, 1, 12)
        rows = torch.tensor([11, 2, 3, 4])
        step = (ids, paged.step({0: 12}), paged.kv, ReferenceAttention(), rows)
        logits, later = ours.forward_in_part(*step, num_now=1)
    torch.testing.assert_close(later.hidden(1, 4), expected[rows[1:]], atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.cat([logits, later.logits(1, 4)]), whole[rows], atol=1e-4, rtol=0)
