"""Tiny models with random weights, written as Hugging Face folders and as GGUF files, to load and compare."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from octavo.checkpoint.families import NATIVE_ARCHITECTURES
from octavo.checkpoint.model_config import ModelConfig
from octavo.checkpoint.model_source import ModelSource, load_model_config, resolve_model
from octavo.models.loader import expected_shapes, open_weights

# A GPU machine may lack what only GGUF files need.
with contextlib.suppress(ImportError):
    import gguf
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
# Of the families that llama.cpp calls otherwise.
GGUF_NAMES = {
    "Mistral": "llama",
    "Mixtral": "llama",
    "GptOss": "gpt-oss",
    "Olmo3": "olmo2",
    "SeedOss": "seed_oss",
    "Cohere": "command-r",
    "MiniMaxM2": "minimax-m2",
    "Ministral3": "mistral3",
    "Phi": "phi2",
    "GraniteMoeHybrid": "granite",  # where all layers are attention
    "Glm": "chatglm",
    "HunYuanDenseV1": "hunyuan-dense",
    "HunYuanMoEV1": "hunyuan-moe",
    "Ernie4_5_Moe": "ernie4_5-moe",
    "Mistral4": "mistral4",
    **dict.fromkeys(("DeepseekV2", "DeepseekV3", "Glm4MoeLite"), "deepseek2"),
}
CONFIG_CLASSES = {"Gemma3": "Gemma3TextConfig"}  # of the families whose name another configuration has
# Which architectures' rows of q and k llama.cpp's converter reorders for interleaved rotation.
REORDERED = (
    *("llama", "mistral3", "granitehybrid", "granite", "granitemoe", "smollm3", "arcee"),
    *("internlm2", "xverse", "olmo", "minicpm"),
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TEXT = """The scheduler takes what fits and leaves the rest; the rest is not lost, it waits for its turn in the queue.
for block in table: print(block, block.hash, "and the tokens in the block", 1234567890) # ünïcödé, 日本語, 😀
It's what they've said: we'll see, I'm sure, you'd know, isn't it? THE END.\n\n\t    indented   text
"""


def make_model(family: str, **overrides: Any) -> Any:
    """A random float32 model of transformers' own class, such as LlamaForCausalLM; every tensor is random, norms too.

    Args:
        overrides: fields of the family's configuration class.
    """
    config_class = getattr(transformers, CONFIG_CLASSES.get(family, f"{family}Config"))
    # Some configurations change the dictionaries that they are given.
    config = config_class(**deepcopy({"pad_token_id": None, **_SIZES, **overrides}))
    torch.manual_seed(0)
    return _randomised(getattr(transformers, f"{family}ForCausalLM")(config).eval())


def make_wrapper(name: str, text: Mapping[str, Any], vision: Mapping[str, Any]) -> Any:
    """A random float32 model that also reads images or sound, such as Gemma3ForConditionalGeneration.

    Args:
        text, vision: fields of the configurations of its text model and of its encoder.
    """
    config_class = getattr(transformers, f"{name}Config")
    encoder = "audio_config" if "audio_config" in config_class.sub_configs else "vision_config"
    config = config_class(**{"text_config": {"pad_token_id": 0, **_SIZES, **text}, encoder: dict(vision)})
    torch.manual_seed(0)
    return _randomised(getattr(transformers, f"{name}ForConditionalGeneration")(config).eval())


def _randomised(model: Any) -> Any:
    """Return the model with random norms and biases too."""
    with torch.no_grad():
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            if name.endswith("correction_bias"):
                tensor.normal_(std=0.1)
            elif "norm" in name:
                tensor.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                tensor.normal_()
    return model


def write_hf_model(
    folder: Path, family: str, *, tokenizer: bool = False, shards: bool = False, **overrides: Any
) -> Any:
    """Write `folder` as transformers saves a model, and return that model."""
    model = make_model(family, **overrides)
    model.save_pretrained(folder, **({"max_shard_size": "100KB"} if shards else {}))
    if tokenizer:
        write_tokenizer(folder)
    return model


def write_relative(folder: Path, model: Any, family: str) -> None:
    """Write a model of transformers as a folder of a family that computes the same, but names its tensors otherwise."""
    architecture = f"{family}ForCausalLM"
    native = NATIVE_ARCHITECTURES[architecture]
    model.save_pretrained(folder)
    source, path = resolve_model(str(folder)), folder / "config.json"
    stored = load_weights(source, load_model_config(source))
    corrected = native.experts is not None and native.experts.corrected
    tensors = iter([tensor for name, tensor in stored.items() if corrected or "correction" not in name])
    content = json.loads(path.read_text()) | {"architectures": [architecture], "model_type": native.model_type}
    path.write_text(json.dumps(content))
    config, renamed = load_model_config(source), {}
    # Programs ask for the same tensors in the same order.
    for name in expected_shapes(config):
        fused = config.names.part_of(name) == "qkv"
        parts = [next(tensors) for _ in range(3 if fused else 1)]
        heads = config.num_kv_heads if config.qkv_by_head and fused else 1
        renamed[name] = torch.cat([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 1)
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})


def write_tokenizer(folder: Path, **config: Any) -> Any:
    """Write a byte-level tokenizer of 320 ids with a ChatML template, and return transformers' own object."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level_backend(),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        **config,
    )
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    return tokenizer


@cache
def _trained(vocab_size: int) -> str:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([_TEXT], trainer)
    return backend.to_str()


def byte_level_backend(vocab_size: int = _SIZES["vocab_size"]) -> Backend:  # type: ignore[assignment]
    return Backend.from_str(_trained(vocab_size))


def write_gguf(
    path: Path,
    model: Any,
    *,
    quantization: str = "F32",
    architecture: str | None = None,
    pre: str = "gpt-2",
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray[Any, Any]] | None = None,
    leave_out: tuple[str, ...] = (),
) -> None:
    """Write `model` as llama.cpp's converter does: renamed, and with q and k rows reordered for "llama".

    Args:
        quantization: of every matrix; vectors stay float32. K-quants are filled with random blocks, because the gguf
            package cannot quantise to them.
        keys: further metadata, ints, floats, bools or strings by their full names.
        tensors: further float32 tensors by their GGUF names.
        leave_out: GGUF names of tensors that shall be missing.
    """
    family = type(model).__name__.removesuffix("ForCausalLM")
    config = model.config
    stated = architecture or GGUF_NAMES.get(family, family.lower())
    writer = gguf.GGUFWriter(path, stated)
    writer.add_name(f"tiny {family.lower()}")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        names = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
        writer.add_layer_norm_eps(next((getattr(config, name) for name in names if hasattr(config, name)), 1e-5))
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim * config.num_attention_heads != config.hidden_size or family == "Qwen3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    add_byte_level_vocabulary(writer, pre=pre)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in (keys or {}).items():
        add[type(value)](key, value)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == stated)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    learnt: dict[str, list[float]] = {}  # by activations
    state = _unfused(model.state_dict(), transposed=family == "GptOss")
    for name, tensor in (_with_fused_qkv(state) if stated in ("chatglm", "bailingmoe2") else state).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, kind = name.rsplit(".", 1)
        if ".act_fn." in name:
            learnt.setdefault(f"xielu.{kind}", []).append(tensor.item())
            continue
        if (gguf_name := names.get_name(stem)) is None:
            continue  # the architecture has no such tensor
        gguf_name = f"{gguf_name}.{kind}"
        values = tensor.numpy()
        if "kv_b_proj" in name and family not in (
            "DeepseekV2",
            "MiniCPM3",
        ):  # as llama.cpp writes it since it caches latents
            both = values.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
            of_keys, values = both[:, : config.qk_nope_head_dim], both[:, config.qk_nope_head_dim :]
            _add_tensor(writer, gguf_name.replace("kv_b", "k_b"), of_keys.swapaxes(1, 2), quantization)
            gguf_name = gguf_name.replace("kv_b", "v_b")
        if stated in REORDERED and "q_proj" in name:
            values = _interleave(values, config.num_attention_heads)
        elif stated in REORDERED and "k_proj" in name:
            values = _interleave(values, config.num_key_value_heads)
        elif "query_key_value" in name:
            group = config.num_attention_heads // config.num_key_value_heads
            heads = values.reshape(config.num_key_value_heads, group + 2, head_dim, -1)
            parts = np.split(heads, (group, group + 1), axis=1)
            values = np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])
        elif stated.startswith(("gemma", "nemotron")) and name.endswith("norm.weight"):
            values = values + 1
        if gguf_name not in leave_out:
            _add_tensor(writer, gguf_name, values, quantization if values.ndim > 1 else "F32")
    for key, of_layers in learnt.items():
        writer.add_array(key, of_layers)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _unfused(tensors: Mapping[str, torch.Tensor], *, transposed: bool) -> dict[str, torch.Tensor]:
    """The tensors of a model with those of experts, [experts, rows, columns], called as each expert's own would be."""
    unfused: dict[str, torch.Tensor] = {}
    for own_name, tensor in tensors.items():
        name = own_name.replace("block_sparse_moe.router", "mlp.gate").replace("block_sparse_moe", "mlp")
        stem, _, part = name.rpartition(".")
        if part == "sinks":
            name = f"{name}.weight"
        if part == "e_score_correction_bias":
            name, tensor = f"{stem.replace('gate.moe', 'moe')}.e_score_correction.bias", tensor.flatten()
        if stem.endswith("shared_mlp.input_linear"):
            gate, up = tensor.chunk(2)
            unfused |= {
                name.replace("shared_mlp.input_linear", f"mlp.{p}_proj"): t for p, t in (("gate", gate), ("up", up))
            }
            continue
        if not stem.endswith("experts"):
            unfused[name.replace("shared_mlp.output_linear", "mlp.down_proj")] = tensor
            continue
        ending = ".bias" if part.endswith("_bias") else ".weight"
        if transposed and ending == ".weight":
            tensor = tensor.transpose(1, 2)
        if part.startswith("gate_up_proj"):
            gate, up = (tensor[:, 0::2], tensor[:, 1::2]) if transposed else tensor.chunk(2, dim=1)
            unfused |= {f"{stem}.gate_proj{ending}": gate, f"{stem}.up_proj{ending}": up}
        else:
            unfused[f"{stem}.down_proj{ending}"] = tensor
    return unfused


def _with_fused_qkv(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a model with those of projections to queries, keys and values as one."""
    fused: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        to = re.sub(r"\.[qkv]_proj\.", ".qkv_proj.", name)
        fused[to] = torch.cat((fused[to], tensor)) if to in fused else tensor
    return fused


def load_weights(source: ModelSource, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Every tensor of a model in float32, as Octavo reads it, by its Hugging Face name."""
    weights = open_weights(source, config)
    return {name: weights.get(name, torch.float32) for name in expected_shapes(config)}


def load_gguf_with_transformers(path: Path) -> Any:
    """The float32 model transformers makes of a GGUF file: the oracle for weights and for generation.

    The steps of `from_pretrained(gguf_file=…)`, which itself insists on the accelerate package.
    """
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if set(missing) - tied or unexpected:
        raise ValueError(f"transformers left out {missing} and did not expect {unexpected}")
    return model


def add_byte_level_vocabulary(writer: Any, *, pre: str, backend: Backend | None = None) -> None:
    backend = backend or byte_level_backend()
    vocab = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    merges = [" ".join(pair) for pair in _merges(backend)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token, _ in vocab])
    writer.add_token_merges(merges)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)


def _merges(backend: Backend) -> list[list[str]]:
    return json.loads(backend.to_str())["model"]["merges"]


def _interleave(values: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp's LlamaModel.permute."""
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _add_tensor(writer: Any, name: str, values: np.ndarray[Any, Any], quantization: str) -> None:
    kind = gguf.GGMLQuantizationType[quantization]
    try:
        stored = gguf.quantize(np.ascontiguousarray(values), kind)
    except NotImplementedError:
        shape = gguf.quant_shape_to_byte_shape(values.shape, kind)
        # Small bytes keep the fp16 scales among them finite.
        stored = np.random.default_rng(0).integers(0, 0x40, shape, dtype=np.uint8)
    writer.add_tensor(name, stored, raw_dtype=kind)
