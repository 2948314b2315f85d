"""Resolve a model's name to local files, and read what they declare. Imports no torch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from octavo.checkpoint.hf_config import read_hf_config, read_json
from octavo.checkpoint.model_config import ModelConfig
from octavo.checkpoint.packaged_model import PACKAGED_MODEL, PACKAGED_SAMPLING, packaged_gguf
from octavo.errors import ModelNotFoundError, UnsupportedModelError

_FINGERPRINT_BYTES = 64 * 1024
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_OLLAMA = re.compile(r"[\w./-]+:[\w.-]+")
# Weights other than safetensors stay on the hub: they would be refused, and are as large.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]


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
    """

    name: str
    path: Path
    format: ModelFormat
    sampling: Mapping[str, Any] = field(default_factory=dict, compare=False)


def resolve_model(name: str) -> ModelSource:
    """Find a model: 'smollm2', a folder, a .gguf file, or a hub id; the first and the last are downloaded if need be.

    Raises:
        ModelNotFoundError: nothing there; the message says what was tried and what can be done.
    """
    path = Path(name).expanduser()
    if name == PACKAGED_MODEL and not path.exists():
        return ModelSource(name, packaged_gguf(), ModelFormat.GGUF, PACKAGED_SAMPLING)
    if path.is_file():
        return _file(name, path)
    if path.is_dir():
        return _folder(name, path)
    if name.endswith(".gguf") or not _HUB_ID.fullmatch(name):
        ollama = "; Ollama's names are not known here: give a hub id or a GGUF file" if _OLLAMA.fullmatch(name) else ""
        raise ModelNotFoundError(
            f"there is no file or folder {path}, and {name!r} cannot be a Hugging Face hub id{ollama}"
        )
    return _folder(name, _download(name))


def load_model_config(model: str | Path | ModelSource) -> ModelConfig:
    """The architecture of a model, read from its configuration alone: no weight is touched.

    Raises:
        ModelError: its subclass says whether nothing was found, or it is damaged, or cannot be run.
    """
    source = model if isinstance(model, ModelSource) else resolve_model(str(model))
    if source.format is ModelFormat.GGUF:
        from octavo.checkpoint.gguf_config import gguf_model_config
        from octavo.checkpoint.gguf_file import GGUFFile

        return gguf_model_config(GGUFFile(source.path))
    return read_hf_config(source.path)


def _file(name: str, path: Path) -> ModelSource:
    with path.open("rb") as file:
        is_gguf = path.suffix == ".gguf" or file.read(4) == b"GGUF"
    if not is_gguf:
        raise ModelNotFoundError(f"{path} is not a GGUF file; a Hugging Face model is named by its folder")
    return ModelSource(name, path, ModelFormat.GGUF)


def _folder(name: str, folder: Path) -> ModelSource:
    if (folder / "config.json").is_file():
        return ModelSource(name, folder, ModelFormat.HUGGINGFACE)
    if (folder / "adapter_config.json").is_file():
        base = (read_json(folder / "adapter_config.json") or {}).get("base_model_name_or_path", "its base model")
        raise UnsupportedModelError(
            f"{folder} holds an adapter (LoRA) for {base}, which Octavo does not apply: merge it into the model with "
            "peft's merge_and_unload() and serve the folder that save_pretrained() writes"
        )
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return ModelSource(name, files[0], ModelFormat.GGUF)
    if files:
        raise ModelNotFoundError(f"{folder} holds {len(files)} GGUF files; name one: {', '.join(map(str, files))}")
    raise ModelNotFoundError(f"{folder} holds neither a config.json nor a GGUF file")


# Asked once in a process, because each time the hub is asked for every file, and progress bars are shown.
@cache
def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except (OSError, ValueError) as error:  # the hub's own errors, and those of the connection, are among these
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        meant = f"did you mean {PACKAGED_MODEL}? " if get_close_matches(hub_id.lower(), [PACKAGED_MODEL]) else ""
        raise ModelNotFoundError(
            f"{meant}there is no local folder {hub_id!r}, and it could not be fetched from the Hugging Face hub "
            f"({reason}). Without network, give a local folder or a .gguf file, point HF_HUB_CACHE at a cache that "
            f"holds it (`hf download {hub_id}` on a connected machine fills one), or use {PACKAGED_MODEL!r}"
        ) from error


def model_fingerprint(path: Path) -> str:
    """A fingerprint of the weights: equal for equal files on any machine, without reading them whole.

    Names, sizes and both ends of the configuration and weight files: a safetensors or GGUF file begins with the
    description of all its tensors and ends with weights.
    """
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.suffix in (".json", ".safetensors"))
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_FINGERPRINT_BYTES))
            stream.seek(max(0, size - _FINGERPRINT_BYTES))
            digest.update(stream.read(_FINGERPRINT_BYTES))
    return digest.hexdigest()
