"""Weights from safetensors and GGUF files, under Hugging Face names.

A source is opened, checked completely against the configuration, and then read tensor by tensor, so that loading never
holds more than one tensor twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from octavo.checkpoint.hf_config import read_json
from octavo.checkpoint.model_config import ModelConfig
from octavo.checkpoint.model_source import ModelFormat, ModelSource
from octavo.errors import CorruptModelError, ModelNotFoundError, UnsupportedModelError
from octavo.models.weights import RawTensor, WeightSource


def open_weights(source: ModelSource, config: ModelConfig) -> WeightSource:
    """Open a model's weights and check that every tensor of `config` is there with the right shape.

    Raises:
        ModelNotFoundError: the folder contains no weights.
        CorruptModelError: a tensor is missing or has another shape, or a file is truncated.
        UnsupportedModelError: the weights are not in safetensors format, or have an unsupported GGUF type.
    """
    weights = _open(source, config)
    for name, shape in expected_shapes(config).items():
        if not weights.has(name):
            raise CorruptModelError(f"{source.path} holds no tensor {name}, which should be {list(shape)}")
        if weights.shape(name) != shape:
            raise CorruptModelError(
                f"{source.path}: tensor {name} is {list(weights.shape(name))}, its configuration says {list(shape)}"
            )
    return weights


def _open(source: ModelSource, config: ModelConfig) -> WeightSource:
    if source.format is ModelFormat.HUGGINGFACE:
        return SafetensorsWeights(source.path)
    # Imported here, because the gguf package takes a sixth of a second to import and folders do not need it.
    from octavo.checkpoint.gguf_file import GGUFFile
    from octavo.models.gguf_weights import GGUFWeights

    return GGUFWeights(GGUFFile(source.path), config)


def iter_weights(source: ModelSource, config: ModelConfig, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of `config` with its Hugging Face name, in the order of the layers."""
    weights = open_weights(source, config)
    for name in expected_shapes(config):
        yield name, weights.get(name, dtype)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors of a natively supported model, in the order of the layers."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    v_rows, o_columns = config.num_kv_heads * config.value_dim, config.num_heads * config.value_dim
    layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    for name, rows, columns, biased in (
        ("self_attn.q_proj", q_rows, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv_rows, hidden, config.qkv_bias),
        ("self_attn.v_proj", v_rows, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, o_columns, config.output_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    ):
        layer[f"{name}.weight"] = (rows, columns)
        if biased:
            layer[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        layer["self_attn.q_norm.weight"] = layer["self_attn.k_norm.weight"] = (config.head_dim,)
    layer["post_attention_layernorm.weight"] = (hidden,)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


class SafetensorsWeights:
    """The safetensors files of a Hugging Face folder: one, or shards listed in model.safetensors.index.json."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of: dict[str, Any] = {}
        index = read_json(folder / "model.safetensors.index.json")
        if index is None:
            file = self._open(self._only_file())
            self._file_of = dict.fromkeys(file.keys(), file)
            return
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict):
            raise CorruptModelError(f"{folder}/model.safetensors.index.json has no weight_map")
        for file_name in sorted(set(weight_map.values())):
            file = self._open(folder / Path(file_name).name)
            held = set(file.keys())
            for name in (name for name, holder in weight_map.items() if holder == file_name):
                if name not in held:
                    raise CorruptModelError(f"{folder / file_name} does not hold {name}, though the index says so")
                self._file_of[name] = file

    def names(self) -> list[str]:
        return list(self._file_of)

    def has(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file(name).get_slice(name).get_shape())

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        tensor: torch.Tensor = self._file(name).get_tensor(name)
        return tensor.to(dtype).contiguous()

    def raw(self, name: str) -> RawTensor | None:
        return None

    def _file(self, name: str) -> Any:
        try:
            return self._file_of[name]
        except KeyError:
            raise CorruptModelError(f"{self._folder} holds no tensor {name}") from None

    @staticmethod
    def _open(path: Path) -> Any:
        try:
            return safe_open(path, framework="pt", device="cpu")
        except FileNotFoundError as error:
            raise CorruptModelError(f"{path} is missing, though the folder's index lists it") from error
        except SafetensorError as error:
            raise CorruptModelError(
                f"{path} ({path.stat().st_size} bytes) is truncated or corrupt ({error}): download it again"
            ) from error

    def _only_file(self) -> Path:
        """Return model.safetensors, or the only safetensors file; raises with the name of a file in another format."""
        found = sorted(self._folder.glob("*.safetensors"))
        if self._folder / "model.safetensors" in found:
            return self._folder / "model.safetensors"
        if len(found) == 1:
            return found[0]
        if found:
            raise CorruptModelError(
                f"{self._folder} holds {len(found)} safetensors files and no model.safetensors.index.json"
            )
        others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in self._folder.glob(pattern))
        if others:
            raise UnsupportedModelError(
                f"{self._folder} holds weights as {others[0]}: a pickle can run code when it is read, so Octavo reads "
                "safetensors only. Convert with transformers: "
                f"AutoModelForCausalLM.from_pretrained({str(self._folder)!r}).save_pretrained(new_folder)"
            )
        raise ModelNotFoundError(f"{self._folder} holds no model.safetensors")
