"""Read the sampling defaults that a model's authors recommend, from its generation_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.checkpoint.hf_config import read_json
from octavo.checkpoint.model_source import ModelSource
from octavo.errors import ConfigError, RequestError
from octavo.sampling_params import SamplingParams

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(choice: str, source: ModelSource) -> dict[str, Any]:
    """Return the defaults for `SamplingParams`, as keywords.

    Args:
        choice: "auto" for the model's own, "vllm" for no defaults, or a folder that has the file.

    Raises:
        ConfigError: the folder has no such file.
        CorruptModelError: the file is not a JSON object.
    """
    if choice == "vllm":
        return {}
    if choice == "auto" and source.sampling:
        return dict(source.sampling)
    folder = Path(source.path) if choice == "auto" else Path(choice)
    found = read_json(folder / "generation_config.json") if folder.is_dir() else None
    if found is None:
        if choice != "auto":
            raise ConfigError(f"generation_config is {choice!r}, but there is no generation_config.json in it")
        return {}
    defaults = {name: value for name in _NAMES if (value := found.get(name)) is not None}
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        raise ConfigError(
            f"{folder / 'generation_config.json'}: {error}; --generation-config vllm ignores it"
        ) from None
    return defaults
