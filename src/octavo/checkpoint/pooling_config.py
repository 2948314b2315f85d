"""How a model pools hidden states into an embedding: its 1_Pooling/config.json, from sentence-transformers."""

from __future__ import annotations

import logging
from pathlib import Path

from octavo.checkpoint.hf_config import read_json
from octavo.checkpoint.model_source import ModelSource
from octavo.pooling import Pooling

logger = logging.getLogger(__name__)

_MODES = {"pooling_mode_lasttoken": Pooling.LAST, "pooling_mode_mean_tokens": Pooling.MEAN}


def model_pooling(choice: str, source: ModelSource) -> Pooling:
    """The pooling that `choice` names; "auto": the model's own, or the last token's where it has none.

    Raises:
        CorruptModelError: the file is no JSON object.
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
