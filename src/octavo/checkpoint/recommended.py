"""The settings a model's authors recommend: sampling defaults, and how hidden states are pooled into an embedding."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from octavo.checkpoint.hf_config import read_json
from octavo.checkpoint.model_source import ModelSource
from octavo.errors import ConfigError, RequestError
from octavo.pooling import Pooling
from octavo.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_MODES = {"pooling_mode_lasttoken": Pooling.LAST, "pooling_mode_mean_tokens": Pooling.MEAN}


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


def model_pooling(choice: str, source: ModelSource) -> Pooling:
    """The pooling that `choice` names; "auto": that of its 1_Pooling/config.json (sentence-transformers), or the last
    token's.

    Raises:
        CorruptModelError: the file is not a JSON object.
    """
    if choice != "auto":
        return Pooling(choice)
    folder = Path(source.path)
    found = read_json(folder / "1_Pooling" / "config.json") if folder.is_dir() else None
    if found is None:
        return Pooling.LAST
    modes = [name for name, value in found.items() if name.startswith("pooling_mode_") and value is True]
    if len(modes) == 1 and modes[0] in _MODES:
        return _MODES[modes[0]]
    logger.warning(
        "%s pools by %s, which Octavo does not: embeddings are the last token's (--pooling mean: all tokens')",
        folder / "1_Pooling" / "config.json",
        " and ".join(modes) or "nothing",
    )
    return Pooling.LAST
