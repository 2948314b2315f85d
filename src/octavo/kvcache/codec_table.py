"""Codec tables: TOML files that choose the codecs of keys and values for each layer.

Each side is one codec's name or a list with one name per layer; "auto" is the model's own type:

    keys = ["int8", "int8", "int4"]
    values = "int4"
    sink_blocks = 1
    recent_blocks = 4

The last two are optional: layers of fewer than 8 bits keep the first blocks of a sequence and the most recent ones in
int8 too.

`octavo calibrate --search` writes such files, with its measurements under [measured], which is not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.config import KV_CACHE_ALIASES, KV_CACHE_TABLE
from octavo.errors import ConfigError
from octavo.kvcache.formats import CODES, Int8Copies, pair_format, spelled
from octavo.toml_file import read_toml

_MOST_BYTES = 1 << 20
_ENTRIES = ("keys", "values", "sink_blocks", "recent_blocks", "model", "measured")


def kv_dtype(option: str, own: str, num_layers: int) -> str:
    """Return the dtype of a cache, for `KVCacheSpec.build`.

    Args:
        option: the option `kv_cache_dtype`: a codec's name, "auto", or the path of a table.
        own: the model's own type, for "auto".

    Raises:
        ConfigError: the table cannot be read, is invalid, or is for a model with another number of layers.
    """
    if option == "auto":
        return own
    return _table_dtype(option, own, num_layers) if option.endswith(KV_CACHE_TABLE) else option


def _table_dtype(path: str, own: str, num_layers: int) -> str:
    what = f"the codec table {path}"
    parsed = read_toml(path, "the codec table", _MOST_BYTES).parsed
    if unknown := sorted(set(parsed) - set(_ENTRIES)):
        raise ConfigError(f"{what} has an unknown entry {unknown[0]!r}; known: {', '.join(_ENTRIES)}")
    sides = [_names(what, side, parsed.get(side), own, num_layers) for side in ("keys", "values")]
    formats = [pair_format(keys, values) for keys, values in zip(*sides, strict=True)]
    return spelled(formats, _copies(what, parsed))


def _copies(what: str, parsed: Mapping[str, Any]) -> Int8Copies | None:
    sinks, recent = (parsed.get(name, 0) for name in ("sink_blocks", "recent_blocks"))
    for name, count in (("sink_blocks", sinks), ("recent_blocks", recent)):
        if type(count) is not int:
            raise ConfigError(f"{what}: {name} must be a number of blocks, got {count!r}")
    if not sinks and not recent:
        return None
    try:
        return Int8Copies(sinks, recent)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from error


def _names(what: str, side: str, given: Any, own: str, num_layers: int) -> list[str]:
    names = [given] * num_layers if isinstance(given, str) else given
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{what}: {side} must be a codec's name or a list of one name for each layer")
    if len(names) != num_layers:
        raise ConfigError(f"{what} has codecs for the {side} of {len(names)} layers, the model has {num_layers} layers")
    own = own if own in CODES else "bfloat16"
    aliases = {**KV_CACHE_ALIASES, "auto": own}
    found = [aliases.get(name, str(name)) for name in names]
    if unknown := [name for name in found if name not in CODES]:
        raise ConfigError(f"{what}: {side} in {unknown[0]!r}; a codec of one side is one of auto, {', '.join(CODES)}")
    return found


def write_table(path: Path, keys: list[str], values: list[str], model: str, measured: list[str]) -> None:
    """Write a codec table; `measured` are the lines of TOML under [measured]."""
    quoted = model.replace("\\", "\\\\").replace('"', '\\"')
    lines = [
        "# Codecs of the KV cache by layer: octavo serve MODEL --kv-cache-dtype THIS_FILE",
        f'model = "{quoted}"',
        f"keys = {json.dumps(keys)}",
        f"values = {json.dumps(values)}",
        "",
        "[measured]",
        *measured,
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
