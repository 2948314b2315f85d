"""The decoder gives transformers' logits for the whole Llama family, however its tokens come and wherever they lie."""

from __future__ import annotations

import dataclasses
import io
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from octavo.attention.reference import ReferenceAttention
from octavo.checkpoint.hf_config import hf_model_config
from octavo.checkpoint.model_config import ModelConfig, RopeConfig
from octavo.errors import CorruptModelError, UnsupportedModelError
from octavo.models import decoder as decoder_module
from octavo.models.decoder import Decoder, loading_bar
from octavo.models.linear import PackedLinear, PlainLinear, make_linear
from octavo.models.ops import LayerOps
from octavo.models.rotary import RotaryTable, Rotation, inverse_frequencies
from octavo.models.weights import row_order
from tests.attention.batches import PagedSequences
from tests.models import tiny
from tests.models.paged import assert_same_logits, paged_logits, random_sequences, whole_logits

VOCAB = 61
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GRANITE_SCALES = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 4.0,
}
GEMMA3_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
}
FAMILY: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped queries": ("Llama", {}),
    "multi-head": ("Llama", {"num_key_value_heads": 4}),
    "multi-query": ("Llama", {"num_key_value_heads": 1}),
    "tied head": ("Llama", {"tie_word_embeddings": True}),
    "biases everywhere": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "wide heads": ("Llama", {"head_dim": 16}),
    "gelu": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama3 rope": ("Llama", {"rope_parameters": LLAMA3_SCALING}),
    "linear rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "sliding window": ("Mistral", {"sliding_window": 9}),
    "qwen2": ("Qwen2", {}),
    "qwen2, half of it sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 7}),
    "gemma3": (
        "Gemma3",
        {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 7, "layer_types": GEMMA3_TYPES},
    ),
    "olmo2": ("Olmo2", {}),
    "olmo2, biases": ("Olmo2", {"attention_bias": True}),
    "phi3": ("Phi3", {}),
    "phi3, partly rotated in a window": ("Phi3", {"partial_rotary_factor": 0.5, "sliding_window": 9}),
    "granite": ("Granite", GRANITE_SCALES),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "glm4": ("Glm4", {"head_dim": 16, "attention_bias": True}),
    "cohere2": ("Cohere2", {"sliding_window": 7, "layer_types": GEMMA3_TYPES}),
    "starcoder2": ("Starcoder2", {"sliding_window": 9}),
    "gpt-neox": ("GPTNeoX", {"num_key_value_heads": 4}),
    "gpt-neox, one after the other": ("GPTNeoX", {"num_key_value_heads": 4, "use_parallel_residual": False}),
    "phi, whose head has a bias": ("Phi", {"num_key_value_heads": 4}),
    "gemma3, linear rope": ("Gemma3", {"head_dim": 16, "sliding_window": 7, "rope_parameters": GEMMA3_ROPE}),
}


class StateDict:
    """A model's tensors as a weight source."""

    def __init__(self, model: Any) -> None:
        config = model_config(model)
        self.tensors = {}
        for name, tensor in model.state_dict().items():
            order = row_order(name, config)
            in_file = name.replace("lm_head", config.names.hf("head"))
            self.tensors[in_file] = tensor if order is None else tensor[order]

    def has(self, name: str) -> bool:
        return name in self.tensors

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self.tensors[name].to(dtype)

    def raw(self, name: str) -> Any:
        return None


def build(case: str) -> Any:
    """A tiny random model of transformers', attending eagerly."""
    name, extra = FAMILY[case]
    config = getattr(transformers, tiny.CONFIG_CLASSES.get(name, f"{name}Config"))(**{**TINY, **extra})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # The usual 0.02 makes such small models nearly blind to their context.
            parameter.normal_(std=0.25) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def model_config(model: Any) -> ModelConfig:
    """What the loader makes of the model's `config.json`."""
    raw = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    return hf_model_config(raw, Path("config.json"))


def decoder(model: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    return Decoder(model_config(model), StateDict(model), dtype=dtype, **options)


@pytest.mark.parametrize("case", FAMILY)
def test_paged_logits_are_those_of_transformers(case: str) -> None:
    model = build(case)
    sequences = random_sequences(VOCAB, [37, 5, 21])
    assert_same_logits(paged_logits(decoder(model), sequences, block_size=4), whole_logits(model, sequences))


@pytest.mark.parametrize("case", ["grouped queries", "sliding window", "qwen2, half of it sliding"])
@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 128])
@pytest.mark.parametrize("longest_chunk", [pytest.param(1, marks=pytest.mark.slow), 5, 64])
def test_neither_blocks_nor_chunks_change_the_logits(case: str, block_size: int, longest_chunk: int) -> None:
    model = build(case)
    sequences = random_sequences(VOCAB, [70, 1, 16, 33], seed=block_size)
    paged = paged_logits(decoder(model), sequences, block_size=block_size, longest_chunk=longest_chunk)
    assert_same_logits(paged, whole_logits(model, sequences))


def test_greedy_tokens_are_those_of_transformers() -> None:
    model = build("grouped queries")
    [prompt] = random_sequences(VOCAB, [9])
    [expected] = model.generate(prompt[None], max_new_tokens=40, do_sample=False, eos_token_id=None)
    ours, ids = decoder(model), prompt
    paged = PagedSequences(ours.kv_layers, 16, 1, 64)
    with torch.inference_mode():
        new_tokens = prompt
        while len(ids) < len(expected):
            batch = paged.step({0: len(new_tokens)})
            logits = ours.forward(
                new_tokens, batch, paged.kv, ReferenceAttention(), torch.tensor([len(new_tokens) - 1])
            )
            new_tokens = logits[-1:].argmax(-1)
            ids = torch.cat([ids, new_tokens])
    assert ids.tolist() == expected.tolist()


def test_values_may_be_narrower_than_keys() -> None:
    """As a model whose values were padded with zeros up to the keys' width."""
    model = build("grouped queries")
    padded = StateDict(model)
    for name in [name for name in padded.tensors if name.endswith("v_proj.weight")]:
        weight = padded.tensors[name].clone()
        weight.view(2, 8, -1)[:, 5:] = 0.0
        padded.tensors[name] = weight
    narrow = StateDict(model)
    for name, weight in padded.tensors.items():
        if name.endswith("v_proj.weight"):
            narrow.tensors[name] = weight.view(2, 8, -1)[:, :5].reshape(10, -1)
        elif name.endswith("o_proj.weight"):
            narrow.tensors[name] = weight.view(-1, 4, 8)[:, :, :5].reshape(-1, 20)
    config = model_config(model)
    sequences = random_sequences(VOCAB, [19, 8])
    wide_logits = paged_logits(Decoder(config, padded, dtype=torch.float32), sequences)
    config = dataclasses.replace(config, value_dim=5)
    assert_same_logits(paged_logits(Decoder(config, narrow, dtype=torch.float32), sequences), wide_logits)


def test_only_the_asked_for_rows_become_logits() -> None:
    model = build("qwen3")
    [ids] = random_sequences(VOCAB, [12])
    [expected] = whole_logits(model, [ids])
    ours = decoder(model)
    paged = PagedSequences(ours.kv_layers, 4, 1, 12)
    with torch.inference_mode():
        batch = paged.step({0: 12})
        rows = ours.forward(ids, batch, paged.kv, ReferenceAttention(), torch.tensor([11, 3]))
        none = ours.forward(ids, batch, paged.kv, ReferenceAttention(), torch.tensor([], dtype=torch.int64))
    torch.testing.assert_close(rows, expected[[11, 3]], atol=1e-4, rtol=0)
    assert none.shape == (0, VOCAB)


@pytest.mark.parametrize("case", ["grouped queries", "sliding window", "qwen3"])
def test_bfloat16_stays_close_to_float32(case: str) -> None:
    model = build(case)
    sequences = random_sequences(VOCAB, [30, 9])
    ours = paged_logits(decoder(model, torch.bfloat16), sequences, dtype="bfloat16")
    for half, full in zip(ours, whole_logits(model, sequences), strict=True):
        assert half.dtype is torch.float32
        assert (half - full).norm() < 0.05 * full.norm()


@pytest.mark.parametrize("case", ["grouped queries", "sliding window", "qwen3"])
def test_a_residual_in_float32_is_nearer_to_float32_than_one_in_bfloat16(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(case)
    sequences = random_sequences(VOCAB, [30, 9])
    exact = torch.cat(whole_logits(model, sequences))
    ours = decoder(model, torch.bfloat16)
    errors = []
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(ours, "_embed", lambda ids, dtype=dtype: Decoder._embed(ours, ids).to(dtype))
        errors.append((torch.cat(paged_logits(ours, sequences, dtype="bfloat16")) - exact).norm())
    assert errors[0] < errors[1]


def test_frequency_factors_say_the_same_as_llama3_scaling() -> None:
    model = build("llama3 rope")
    plain = 1.0 / (10000.0 ** (torch.arange(0, 8, 2, dtype=torch.float32) / 8))
    config = model_config(model)
    scaled = inverse_frequencies(config.rope)
    factors = tuple((plain / scaled).tolist())
    explicit = RopeConfig(theta=config.rope.theta, rotary_dim=8, frequency_factors=factors)
    torch.testing.assert_close(RotaryTable(explicit, torch.device("cpu"), 1024).inv_freq, scaled)
    with pytest.raises(UnsupportedModelError, match="3 RoPE frequency factors for 4 frequencies"):
        inverse_frequencies(RopeConfig(rotary_dim=8, frequency_factors=(1.0, 1.0, 1.0)))


@pytest.mark.parametrize("case", ["llama3 rope", "linear rope", "grouped queries"])
def test_rotary_frequencies_are_bit_for_bit_those_of_transformers(case: str) -> None:
    model = build(case)
    assert torch.equal(inverse_frequencies(model_config(model).rope), model.model.rotary_emb.inv_freq)


def test_partial_rotation_leaves_the_other_dimensions_alone() -> None:
    table = RotaryTable(RopeConfig(rotary_dim=4), torch.device("cpu"), 4096)
    heads = torch.randn(5, 2, 10)
    rotation = Rotation(*table.tables(2005), torch.arange(5) + 2000)
    rotated = LayerOps().rotate(heads, rotation.token_cos, rotation.token_sin)
    assert torch.equal(rotated[..., 4:], heads[..., 4:])
    torch.testing.assert_close(rotated[..., :4].norm(dim=-1), heads[..., :4].norm(dim=-1))


def test_packed_and_plain_weights_multiply_alike() -> None:
    weight, bias, x = torch.randn(40, 24), torch.randn(40), torch.randn(7, 24)
    packed = make_linear(weight, bias)
    assert isinstance(packed, PackedLinear) == torch.backends.mkldnn.is_available()
    torch.testing.assert_close(packed(x), PlainLinear(weight, bias)(x), atol=1e-5, rtol=1e-5)
    assert packed(x[:0]).shape == (0, 40)
    assert isinstance(make_linear(weight.half()), PlainLinear)


def test_a_tied_head_counts_its_packed_copy_and_nothing_else() -> None:
    model = build("tied head")
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    head = VOCAB * 32 * 4
    assert decoder(model, linear=PlainLinear).weight_bytes == parameters
    assert decoder(model, linear=PackedLinear).weight_bytes == parameters + head


def test_a_missing_tensor_is_named_with_its_shape() -> None:
    model = build("grouped queries")
    weights = StateDict(model)
    del weights.tensors["model.layers.2.mlp.down_proj.weight"]
    with pytest.raises(
        CorruptModelError, match=r"'model.layers.2.mlp.down_proj.weight' of shape \[32, 48\] is missing"
    ):
        Decoder(model_config(model), weights, dtype=torch.float32)


def test_a_misshaped_tensor_is_named_with_both_shapes() -> None:
    model = build("grouped queries")
    weights = StateDict(model)
    weights.tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(32, 32)
    with pytest.raises(CorruptModelError, match=r"k_proj.weight' has shape \[32, 32\], .* declares \[16, 32\]"):
        Decoder(model_config(model), weights, dtype=torch.float32)


def test_an_unknown_activation_is_refused() -> None:
    config = dataclasses.replace(model_config(build("grouped queries")), hidden_act="snake")
    with pytest.raises(UnsupportedModelError, match="activation 'snake' is not one of silu"):
        Decoder(config, StateDict(build("grouped queries")), dtype=torch.float32)


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.slow
def test_loading_that_takes_long_shows_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for stderr, shown in ((FakeTerminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr("sys.stderr", stderr)
        monkeypatch.setattr(decoder_module, "LOADING_BAR_DELAY", 1e-9)
        for _ in loading_bar(3):
            time.sleep(0.06)  # a bar is drawn ten times a second at most
        assert ("Loading weights: " in stderr.getvalue()) == shown
    monkeypatch.setattr(decoder_module, "LOADING_BAR_DELAY", 60)
    monkeypatch.setattr("sys.stderr", terminal := FakeTerminal())
    list(loading_bar(3))
    assert "Loading" not in terminal.getvalue()
