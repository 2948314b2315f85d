"""Resolve a model's name to local files, and read what they declare. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any

from octavo.checkpoint.hf_config import merged, read_hf_config, read_json
from octavo.checkpoint.hub import (
    MODEL_FILES,
    TOKENIZER_FILES,
    choose_gguf,
    download,
    download_gguf,
    files_of,
    first_shards,
)
from octavo.checkpoint.kv_cache_scheme import only_kv_cache_scheme
from octavo.checkpoint.model_config import ModelConfig
from octavo.checkpoint.packaged_model import PACKAGED_MODEL, PACKAGED_SAMPLING, packaged_gguf
from octavo.config import CHECKPOINT_FORMATS, EngineConfig
from octavo.errors import ConfigError, ModelNotFoundError, UnsupportedModelError

_FINGERPRINT_BYTES = 64 * 1024
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_OLLAMA = re.compile(r"[\w./-]+:[\w.-]+")


class ModelFormat(StrEnum):
    HUGGINGFACE = "huggingface"
    GGUF = "gguf"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The location of a model.

    Attributes:
        name: what the user wrote.
        path: a folder for HUGGINGFACE, a file for GGUF.
        sampling: sampling defaults that its authors recommend elsewhere than in a generation_config.json.
        overrides: fields that replace those of its config.json.
        through_transformers: whether transformers runs it even if the native decoder could.
        max_len: the longest sequence, by which some RoPE scalings choose frequencies; the model's limit if None.
    """

    name: str
    path: Path
    format: ModelFormat
    sampling: Mapping[str, Any] = field(default_factory=dict, compare=False)
    overrides: Mapping[str, Any] = field(default_factory=dict, compare=False)
    through_transformers: bool = False
    max_len: int | None = None

    def companion_file(self, name: str) -> Path:
        """Return the path of a file that belongs to the model: in its folder, or next to its GGUF file."""
        return self.path / name if self.format is ModelFormat.HUGGINGFACE else self.path.with_suffix(f".{name}")


def model_of(config: EngineConfig) -> ModelSource:
    """Find the model of a configuration, with all its options; raises as `resolve_model`, or a `ConfigError`."""
    source = resolve_model(
        config.model,
        revision=config.revision,
        hf_file=config.hf_file,
        token=config.hf_token,
        gguf=None if config.load_format == "auto" else config.load_format == "gguf",
    )
    overrides: dict[str, Any] = json.loads(str(config.hf_overrides or "{}"))
    if source.format is ModelFormat.GGUF:
        if config.load_format == "safetensors":
            raise ConfigError(f"load_format is 'safetensors', but {source.path} is a GGUF file")
        if overrides or config.model_impl == "transformers":
            option = "hf_overrides" if overrides else "model_impl"
            raise ConfigError(f"{option} is for Hugging Face folders, and {source.path} is a GGUF file")
    elif config.load_format == "gguf":
        raise ConfigError(f"load_format is 'gguf', but {source.path} is a Hugging Face folder")
    source = replace(
        source,
        overrides=overrides,
        through_transformers=config.model_impl == "transformers",
        max_len=config.max_model_len,
    )
    wanted, stored = config.quantization, stored_format(source)
    if wanted in CHECKPOINT_FORMATS and wanted != stored:
        held = "floats" if stored == "none" else f"weights in {stored}"
        raise ConfigError(f"quantization is {wanted!r}, but {source.path} contains {held}")
    if wanted in ("q8_0", "q4_0") and stored != "none":
        raise ConfigError(f"quantization {wanted!r} is for floats, and {source.path} contains weights in {stored}")
    return source


def tokenizer_of(config: EngineConfig) -> ModelSource:
    """Find what holds the tokenizer of a configuration: the model, unless it names another.

    Raises:
        ModelNotFoundError: there is none of this name.
    """
    if config.tokenizer is None:
        return model_of(config)
    path = Path(config.tokenizer).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        return ModelSource(config.tokenizer, path, ModelFormat.HUGGINGFACE)
    return resolve_model(config.tokenizer, token=config.hf_token, patterns=TOKENIZER_FILES)


def resolve_model(
    name: str,
    *,
    revision: str | None = None,
    hf_file: str | None = None,
    token: str | None = None,
    gguf: bool | None = None,
    patterns: tuple[str, ...] = MODEL_FILES,
) -> ModelSource:
    """Find a model: 'smollm2', a folder, a .gguf file, a hub id, or a hub id with a GGUF file's type.

    Files that are not on this machine are downloaded.

    Args:
        revision: branch, tag or commit on the hub; hf_file: name of a GGUF file in a repository or a folder.
        token: the hub's, instead of the one that `hf auth login` stored.
        gguf: whether to take a repository's GGUF file; None: only where it has nothing else.
        patterns: names of the files to download, if it is not one GGUF file.

    Raises:
        ModelNotFoundError: nothing there; the message says what was tried and what can be done.
    """
    path = Path(name).expanduser()
    if name == PACKAGED_MODEL and not path.exists():
        return ModelSource(name, packaged_gguf(), ModelFormat.GGUF, PACKAGED_SAMPLING)
    if path.is_file():
        return _file(name, path)
    if path.is_dir():
        return _folder(name, path, hf_file)
    hub_id, colon, wanted = name.removeprefix("hf.co/").removeprefix("huggingface.co/").partition(":")
    if name.endswith(".gguf") or not _HUB_ID.fullmatch(hub_id) or (colon and not (wanted and "/" in hub_id)):
        ollama = "; Ollama's names are not known here: give a hub id or a GGUF file" if _OLLAMA.fullmatch(name) else ""
        raise ModelNotFoundError(
            f"there is no file or folder {path}, and {name!r} cannot be a Hugging Face hub id{ollama}"
        )
    try:
        if not (wanted or hf_file or gguf):
            folder = download(hub_id, revision, token, patterns)
            if gguf is False or _has_weights(folder) or "*.safetensors" not in patterns:
                return _folder(name, folder)
        tag = wanted if wanted and wanted.lower() != "latest" else None
        file = download_gguf(hub_id, revision, token, hf_file or tag, file=hf_file is not None)
    except ModelNotFoundError:  # an OSError, too
        raise
    except (OSError, ValueError) as error:  # the hub's own errors, and those of the connection, are among these
        raise _not_fetched(hub_id, error) from error
    return _file(name, file)


def _has_weights(folder: Path) -> bool:
    """Whether a downloaded repository is a model in Hugging Face's format, or at least not one in GGUF alone."""
    return (folder / "adapter_config.json").is_file() or any(folder.glob("*.safetensors"))


def load_model_config(model: str | Path | ModelSource) -> ModelConfig:
    """The architecture of a model, read from its configuration alone: no weight is touched.

    Raises:
        ModelError: its subclass says whether nothing was found, or it is damaged, or cannot be run.
    """
    source = model if isinstance(model, ModelSource) else resolve_model(str(model))
    if source.format is ModelFormat.GGUF:
        from octavo.checkpoint.gguf_config import gguf_model_config
        from octavo.checkpoint.gguf_file import GGUFFile

        return gguf_model_config(GGUFFile(source.path), source.max_len)
    config = read_hf_config(source.path, source.overrides, source.max_len)
    if source.through_transformers and config.runs_natively:
        return replace(config, transformers_reason="--model-impl transformers")
    return config


def stored_format(source: ModelSource) -> str:
    """Return how a model's weights are quantised: "gguf", a `quant_method` such as "awq", or "none" for floats."""
    if source.format is ModelFormat.GGUF:
        return "gguf"
    quantization = merged(read_json(source.path / "config.json") or {}, source.overrides).get("quantization_config")
    if not quantization or only_kv_cache_scheme(quantization):
        return "none"
    return str(quantization.get("quant_method")) if isinstance(quantization, dict) else repr(quantization)


def _file(name: str, path: Path) -> ModelSource:
    with path.open("rb") as file:
        is_gguf = path.suffix == ".gguf" or file.read(4) == b"GGUF"
    if not is_gguf:
        raise ModelNotFoundError(f"{path} is not a GGUF file; a Hugging Face model is named by its folder")
    return ModelSource(name, path, ModelFormat.GGUF)


def _folder(name: str, folder: Path, hf_file: str | None = None) -> ModelSource:
    files = [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")] if hf_file else []
    if hf_file:
        return _file(name, folder / choose_gguf(files, hf_file, file=True, where=str(folder)))
    if (folder / "config.json").is_file():
        return ModelSource(name, folder, ModelFormat.HUGGINGFACE)
    if (folder / "adapter_config.json").is_file():
        base = (read_json(folder / "adapter_config.json") or {}).get("base_model_name_or_path", "its base model")
        raise UnsupportedModelError(
            f"{folder} is an adapter (LoRA) for {base}, which Octavo does not apply: merge it into the model with "
            "peft's merge_and_unload() and serve the folder that save_pretrained() writes"
        )
    files = first_shards([path.name for path in folder.glob("*.gguf")])
    if len(files) == 1:
        return ModelSource(name, folder / files[0], ModelFormat.GGUF)
    if files:
        listed = ", ".join(str(folder / file) for file in files)
        raise ModelNotFoundError(f"{folder} has {len(files)} GGUF files; name one: {listed}")
    raise ModelNotFoundError(f"{folder} has neither a config.json nor a GGUF file")


def _not_fetched(hub_id: str, error: Exception) -> ModelNotFoundError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    meant = f"did you mean {PACKAGED_MODEL}? " if get_close_matches(hub_id.lower(), [PACKAGED_MODEL]) else ""
    return ModelNotFoundError(
        f"{meant}there is no local folder {hub_id!r}, and it could not be fetched from the Hugging Face hub "
        f"({reason}). Without network, give a local folder or a .gguf file, point HF_HUB_CACHE at a cache that "
        f"holds it (`hf download {hub_id}` on a connected machine fills one), or use {PACKAGED_MODEL!r}"
    )


def weight_files(path: Path) -> list[Path]:
    """Return the files of a model's configuration and weights, in order: all parts of a GGUF file, or a folder's."""
    if path.is_file():
        return files_of(path)
    return sorted(each for each in path.iterdir() if each.suffix in (".json", ".safetensors"))


def model_fingerprint(path: Path) -> str:
    """A fingerprint of the weights: equal for equal files on any machine, without reading them whole.

    Names, sizes and both ends of the configuration and weight files: a safetensors or GGUF file begins with the
    description of all its tensors and ends with weights.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in weight_files(path):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_FINGERPRINT_BYTES))
            stream.seek(max(0, size - _FINGERPRINT_BYTES))
            digest.update(stream.read(_FINGERPRINT_BYTES))
    return digest.hexdigest()
