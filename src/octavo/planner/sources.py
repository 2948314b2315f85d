"""Find a model's shape by its name: in local files, the table of well-known models, or the hub's cache."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path

from octavo.checkpoint.families import NATIVE_ARCHITECTURES
from octavo.checkpoint.hf_config import hf_model_config, read_json
from octavo.checkpoint.model_config import ModelConfig
from octavo.checkpoint.model_source import ModelFormat, ModelSource, load_model_config, resolve_model
from octavo.checkpoint.packaged_model import PACKAGED_MODEL, packaged_gguf
from octavo.errors import CorruptModelError, ModelNotFoundError, UnsupportedModelError
from octavo.planner.known_models import KNOWN_MODELS, known_config, nearest_names
from octavo.planner.model_shape import ModelShape, model_shape, shape_of_checkpoint

_LONGEST_HEADER = 100_000_000  # the safetensors format's own limit


def find_shape(name: str) -> ModelShape:
    """Find the shape of the model that a user names, without downloading anything.

    Args:
        name: a folder (for known architectures its `config.json` suffices), a GGUF file, 'smollm2', the name or hub id
            of a well-known model, or a hub id in the hub's cache.

    Raises:
        ModelError: there is no such model (the message suggests similar names), or it is damaged or cannot be counted.
    """
    path = Path(name).expanduser()
    if path.exists():
        return _shape_of_files(resolve_model(name))
    if name == PACKAGED_MODEL:
        try:
            return _shape_of_files(ModelSource(name, packaged_gguf(fetch=False), ModelFormat.GGUF))
        except ModelNotFoundError:
            pass  # the table knows it
    if (known := known_config(name)) is not None:
        row_name, row = known
        return model_shape(row_name, hf_model_config(row, Path(row_name) / "config.json"), row)
    if (folder := _cached_folder(name)) is not None:
        return _shape_of_files(ModelSource(name, folder, ModelFormat.HUGGINGFACE))
    nearest = nearest_names(name)
    meant = f"did you mean {' or '.join(nearest)}? Otherwise, " if nearest else ""
    raise ModelNotFoundError(
        f"{name!r} is neither a file or folder here nor a well-known model; {meant}"
        f"give a folder with a config.json, a .gguf file, or one of {len(KNOWN_MODELS)} names (`octavo plan --list`)"
    )


def shape_of_source(source: ModelSource, config: ModelConfig) -> ModelShape:
    """Return the shape of a model on this machine whose configuration has been read.

    Raises:
        UnsupportedModelError: the architecture is unknown, and the folder has no weights to count.
    """
    if source.format is ModelFormat.GGUF:
        return model_shape(source.name, config)
    raw = read_json(source.path / "config.json") or {}
    try:
        return model_shape(source.name, config, raw)
    except UnsupportedModelError:
        files = sorted(source.path.glob("*.safetensors"))
        if not files:
            raise UnsupportedModelError(
                f"{source.path} is a {config.architecture}, whose parameters can be counted only from its safetensors "
                f"files, which are not there; from the config.json alone: {', '.join(NATIVE_ARCHITECTURES)}"
            ) from None
        return shape_of_checkpoint(source.name, config, sum(map(_count_parameters, files)))


def _shape_of_files(source: ModelSource) -> ModelShape:
    shape = shape_of_source(source, load_model_config(source))
    if source.format is not ModelFormat.GGUF:
        return shape
    # Imported here, because llama.cpp's package takes 0.2 s and 4 MiB, which well-known models do without.
    from octavo.checkpoint.gguf_file import GGUFFile
    from octavo.checkpoint.gguf_requantize import loaded_bytes

    return replace(shape, packed_bytes=loaded_bytes(GGUFFile(source.path)))


def _count_parameters(path: Path) -> int:
    """Count the elements of all tensors in a safetensors file, from its header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _LONGEST_HEADER:
            raise CorruptModelError(f"{path} has a header of {length} bytes: it is not a safetensors file")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise CorruptModelError(f"{path} has a header that is not JSON: {error}") from error
    return sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def _cached_folder(hub_id: str) -> Path | None:
    """Return the folder of the hub's cache with the model's configuration, or None."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(hub_id, "config.json")
    except ValueError:  # no hub id
        return None
    return Path(found).parent if isinstance(found, str) else None
