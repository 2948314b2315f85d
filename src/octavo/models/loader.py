"""Weights from safetensors and GGUF files, under Hugging Face names.

A source is opened, checked completely against the configuration, and then read tensor by tensor, so that loading never
holds more than one tensor twice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from octavo.checkpoint.hf_config import read_json
from octavo.checkpoint.model_config import ModelConfig
from octavo.checkpoint.model_source import ModelFormat, ModelSource
from octavo.errors import CorruptModelError, ModelNotFoundError, UnsupportedModelError
from octavo.models.linear import Linear, PlainLinear
from octavo.models.program import make_program
from octavo.models.quantised_checkpoint import QuantisedCheckpoint, quantise
from octavo.models.weight_reader import Split, WeightReader
from octavo.models.weights import RawTensor, TensorPart, WeightSource, row_order

_MOST_ELEMENTS = 1 << 48


class _FileOf(dict[str, tuple[Any, str]]):
    """The open file that holds a tensor, and the tensor's name there, by its name in the model."""

    outputs_first = False  # whether a parameter that holds the matrices of all experts has them [out, in]


def open_weights(source: ModelSource, config: ModelConfig, online: str | None = None) -> WeightSource:
    """Open a model's weights and check that every tensor of `config` is there with the right shape.

    Args:
        online: type to which floats of a folder are quantised, see `SafetensorsWeights`.

    Raises:
        ModelNotFoundError: the folder contains no weights.
        CorruptModelError: a tensor is missing or has another shape, or a file is truncated.
        UnsupportedModelError: the weights are not in safetensors format, or have an unsupported GGUF type.
    """
    weights = _open(source, config, online)
    head = f"{config.names.hf('head')}.weight"
    for name, shape in expected_shapes(config).items():
        if name == head and not weights.has(name):
            raise CorruptModelError(
                f"{source.path} has no {head}, and config.json does not tie it to the embedding: the model was saved "
                "without its head, and cannot generate. To serve its embeddings alone, which need no head, pass "
                """--hf-overrides '{"tie_word_embeddings": true}'"""
            )
        if not weights.has(name):
            raise CorruptModelError(f"{source.path} has no tensor {name}, which should be {list(shape)}")
        if weights.shape(name) != shape:
            raise CorruptModelError(
                f"{source.path}: tensor {name} is {list(weights.shape(name))}, but the configuration says {list(shape)}"
            )
    if config.tie_word_embeddings:
        _check_tied(source, config, weights)
    return weights


def _check_tied(source: ModelSource, config: ModelConfig, weights: WeightSource) -> None:
    """Refuse a head of its own where the configuration says that the embedding is the head: one of both is wrong."""
    embedding, head = (f"{config.names.hf(part)}.weight" for part in ("embedding", "head"))
    if not weights.has(head):
        return
    dtype = getattr(torch, config.dtype)
    if not torch.equal(weights.get(embedding, dtype), weights.get(head, dtype)):
        raise CorruptModelError(
            f"{source.path} contains a {head} that differs from {embedding}, but config.json ties them: pass "
            """--hf-overrides '{"tie_word_embeddings": false}' to use both"""
        )


def _open(source: ModelSource, config: ModelConfig, online: str | None) -> WeightSource:
    if source.format is ModelFormat.HUGGINGFACE:
        return SafetensorsWeights(source.path, config, online)
    # Imported here, because the gguf package takes a sixth of a second to import and folders do not need it.
    from octavo.checkpoint.gguf_file import GGUFFile
    from octavo.models.gguf_weights import GGUFWeights

    return GGUFWeights(GGUFFile(source.path), config)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors of a natively supported model, in the order of the layers."""
    reader = _ShapeReader(config)
    reader.embedding_and_head()
    list(make_program(config, reader, range(config.num_layers)))
    return reader.shapes


class _ShapeReader(WeightReader):
    """Notes which tensors a program asks for.

    It returns one zero in place of each tensor, expanded to its shape. Tensors on the meta device would do, but any
    arithmetic on them, such as adding a norm's offset, imports torch._dynamo, which takes two seconds.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, {}, torch.float32, torch.device("cpu"), PlainLinear)  # type: ignore[arg-type]
        self.shapes: dict[str, tuple[int, ...]] = {}

    def get(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        if prod(shape) > _MOST_ELEMENTS:
            raise CorruptModelError(f"{name} is {list(shape)} by the configuration, more than any memory holds")
        self.shapes[name] = shape
        return torch.zeros((), dtype=dtype).expand(shape)

    def linear(
        self, names: list[str], out_features: list[int], in_features: int, *, bias: bool, split: Split = "outputs"
    ) -> Linear:
        # Nothing is concatenated, which would allocate the result.
        for name, rows in zip(names, out_features, strict=True):
            self.get(f"{name}.weight", rows, in_features)
        for name, rows in zip(names, out_features, strict=True) if bias else ():
            self.get(f"{name}.bias", rows)
        return PlainLinear(torch.zeros(()).expand(sum(out_features), in_features), None)


class SafetensorsWeights:
    """The safetensors files of a Hugging Face folder: one, or shards listed in model.safetensors.index.json."""

    def __init__(self, folder: Path, config: ModelConfig | None = None, online: str | None = None) -> None:
        """
        Args:
            online: type to which `raw` quantises floats, "Q8_0" or "Q4_0" (embedding and head stay at 8 bits).
        """
        self._folder = folder
        self._config = config
        self._online = online
        quantization = (read_json(folder / "config.json") or {}).get("quantization_config")
        self._is_quantised = bool(quantization)
        self._file_of = _FileOf()
        # A cycle through `self` would keep the files mapped until the next garbage collection.
        self._stored = partial(_read_tensor, self._folder, self._file_of)
        self._quantised = QuantisedCheckpoint(
            quantization if isinstance(quantization, dict) else {}, partial(_holds, self._file_of), self._stored
        )
        index = read_json(folder / "model.safetensors.index.json")
        if index is None:
            file = self._open(self._only_file())
            self._hold(dict.fromkeys(file.keys(), file))
            return
        weight_map = index.get("weight_map")
        if not (isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values())):
            raise CorruptModelError(f"{folder}/model.safetensors.index.json has no weight_map of names of files")
        files: dict[str, Any] = {}
        for file_name in sorted(set(weight_map.values())):
            file = self._open(folder / Path(file_name).name)
            held = set(file.keys())
            for name in (name for name, holder in weight_map.items() if holder == file_name):
                if name not in held:
                    raise CorruptModelError(f"{folder / file_name} does not contain {name}, though the index says so")
                files[name] = file
        self._hold(files)

    def _hold(self, files: Mapping[str, Any]) -> None:
        """Note which file holds each tensor, by the tensor's name in the whole model.

        The text model in one that also reads images has the names "language_model.model.layers.0.…",
        "model.language_model.layers.0.…" or "model.text_model.layers.0.…". A model saved from its base class, as
        embedding models often are, has names without their first part, "layers.0.…" for "model.layers.0.…".
        """
        named = {re.sub(r"(language|text)_model\.", "", name, count=1): (file, name) for name, file in files.items()}
        if self._config is not None:
            base, head = self._config.names.hf("embedding").partition(".")[0] + ".", self._config.names.hf("head") + "."
            if not any(name.startswith(base) for name in named):
                named = {name if name.startswith(head) else base + name: at for name, at in named.items()}
        self._file_of.update(named)
        if self._config is not None and self._config.experts:
            # Of Qwen3-VL-MoE, published folders have [in, out], and those that transformers saves [out, in].
            gates = TensorPart.parse(self._config.names.hf("expert_gate", self._config.num_layers - 1, 0)).tensor
            if gates in named:
                file, stored = named[gates]
                self._file_of.outputs_first = file.get_slice(stored).get_shape()[-1] == self._config.hidden_size

    def names(self) -> list[str]:
        return list(self._file_of)

    def has(self, name: str) -> bool:
        return _holds(self._file_of, name) or self._quantised.holds(name)

    def shape(self, name: str) -> tuple[int, ...]:
        if self._quantised.holds(name):
            return self._quantised.shape(name)
        part = _locate(name, self._file_of)
        file, stored = _file_with(part.tensor, self._folder, self._file_of)
        return part.shape(tuple(file.get_slice(stored).get_shape()))

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        tensor = self._quantised.read(name) if self._quantised.holds(name) else self._stored(name)
        if self._is_quantised and tensor.itemsize == 1:
            raise CorruptModelError(f"{self._folder}: {name} is stored in 8 bits ({tensor.dtype}), but has no scale")
        order = row_order(name, self._config) if self._config else None
        return (tensor if order is None else tensor[order]).to(dtype).contiguous()

    def raw(self, name: str) -> RawTensor | None:
        if self._quantised.holds(name):
            raw = self._quantised.raw(name)
        elif self._online is not None and _holds(self._file_of, name) and len(self.shape(name)) == 2:
            embeds = self._config is not None and name.startswith(
                tuple(self._config.names.hf(part) for part in ("embedding", "head"))
            )
            kind = "Q8_0" if embeds else self._online
            raw = None if self.shape(name)[1] % 32 else quantise(self._stored(name), kind, "floats")
        else:
            return None
        order = row_order(name, self._config) if self._config else None
        return raw if raw is None or order is None else replace(raw, rows=raw.rows[order])

    @staticmethod
    def _open(path: Path) -> Any:
        try:
            return safe_open(path, framework="pt", device="cpu")
        except FileNotFoundError as error:
            problem = "cannot be read" if path.exists() else "is missing, though the folder's index lists it"
            raise CorruptModelError(f"{path} {problem}") from error
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
                f"{self._folder} has {len(found)} safetensors files and no model.safetensors.index.json"
            )
        others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in self._folder.glob(pattern))
        if others:
            raise UnsupportedModelError(
                f"{self._folder} has weights as {others[0]}: a pickle can run code when it is read, so Octavo reads "
                "safetensors only. Convert with transformers: "
                f"AutoModelForCausalLM.from_pretrained({str(self._folder)!r}).save_pretrained(new_folder)"
            )
        raise ModelNotFoundError(f"{self._folder} has no model.safetensors")


def _locate(name: str, file_of: _FileOf) -> TensorPart:
    """Return where the files hold a tensor. Those of experts may be parameters of one module, called X and X_bias."""
    part = TensorPart.parse(name)
    if part.tensor in file_of:
        return part
    stem, _, ending = part.tensor.rpartition(".")
    own = replace(part, tensor=stem if ending == "weight" else f"{stem}_{ending}")
    return replace(own, transposed=bool(part.selectors) and ending == "weight" and not file_of.outputs_first)


def _holds(file_of: _FileOf, name: str) -> bool:
    return _locate(name, file_of).tensor in file_of


def _read_tensor(folder: Path, file_of: _FileOf, name: str) -> torch.Tensor:
    part = _locate(name, file_of)
    file, stored = _file_with(part.tensor, folder, file_of)
    # Of the matrices of all experts, a slice reads one.
    tensor: torch.Tensor = part.of(file.get_slice(stored) if part.selectors else file.get_tensor(stored))
    return tensor


def _file_with(name: str, folder: Path, file_of: _FileOf) -> tuple[Any, str]:
    try:
        return file_of[name]
    except KeyError:
        raise CorruptModelError(f"{folder} has no tensor {name}") from None
