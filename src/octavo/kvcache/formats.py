"""The number of bytes per token of each codec, used by the allocator, the calculator and the codecs; without torch.

A codec turns one token's vector of one head into codes, plus extra numbers (fields: a scale, a zero point):

    name          codes of keys      of values      fields of a vector            bytes a side at head size 64 / 128
    bfloat16 …    2 (float32: 4) bytes each         none                          128 / 256
    fp8_e4m3      1 byte             1 byte         none: one scale per head       64 / 128
    fp8_e5m2      1 byte             1 byte         none: one scale per head       64 / 128
    int8          1 byte             1 byte         scale (bfloat16)               66 / 130
    int4          4 bits             4 bits         scale (bfloat16), zero (byte)  35 /  67
    k8v4          as int8            as int4        as theirs                      66, 35 / 130, 67
    nvfp4         4 bits             4 bits         scale (e4m3) each 16 elements  36 /  72

`storage/codec/` contains the codecs themselves; a test checks them against these numbers.

A cache's dtype is the name of one format, or a list of runs of layers with equal formats:

    int8                                every layer
    int8*2,k8v4*27,int8/fp8_e4m3        30 layers; keys/values if the pair has no name of its own

Codec tables are TOML files that choose the codecs of keys and values for each layer.

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
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

from octavo.config import KV_CACHE_ALIASES, KV_CACHE_TABLE
from octavo.errors import ConfigError
from octavo.text_file import read_toml, write_text

_MOST_TABLE_BYTES = 1 << 20
_TABLE_ENTRIES = ("keys", "values", "sink_blocks", "recent_blocks", "model", "measured")

ALIGNMENT = 64
"""A coded layer's part of a block, and every block, is padded to a multiple of this many bytes: a cache line."""


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """The bytes of one token's vector of one head, on one side of the cache.

    Attributes:
        bits: bits of one code.
        multiple: dimensions are padded with zeros to a multiple of this.
        fields: bytes of each extra number per vector.
        group: number of elements that share an additional one-byte field; None if there is no such field.
        calibrated: whether codes are multiples of a scale that is chosen before anything is stored.
    """

    name: str
    bits: int
    multiple: int = 1
    fields: tuple[int, ...] = ()
    group: int | None = None
    calibrated: bool = False

    def padded(self, dim: int) -> int:
        return -(-dim // self.multiple) * self.multiple

    def code_bytes(self, dim: int) -> int:
        return self.padded(dim) * self.bits // 8

    def field_bytes(self, dim: int) -> tuple[int, ...]:
        return self.fields if self.group is None else (*self.fields, self.padded(dim) // self.group)

    def vector_bytes(self, dim: int) -> int:
        return self.code_bytes(dim) + sum(self.field_bytes(dim))


@dataclass(frozen=True, slots=True)
class KVFormat:
    """The format of keys and values in a cache; `plain` means floats in the layout of `storage/arena.py`."""

    name: str
    keys: CodeFormat
    values: CodeFormat
    plain: bool = False

    @property
    def calibrated(self) -> bool:
        return self.keys.calibrated or self.values.calibrated


FLOATS = {"bfloat16": CodeFormat("bfloat16", 16), "float16": CodeFormat("float16", 16)}
FLOATS["float32"] = CodeFormat("float32", 32)
E4M3 = CodeFormat("fp8_e4m3", 8, calibrated=True)
E5M2 = CodeFormat("fp8_e5m2", 8, calibrated=True)
INT8 = CodeFormat("int8", 8, multiple=4, fields=(2,))
INT4 = CodeFormat("int4", 4, multiple=8, fields=(2, 1))
NVFP4 = CodeFormat("nvfp4", 4, multiple=16, group=16, calibrated=True)

KV_FORMATS: dict[str, KVFormat] = {
    **{name: KVFormat(name, code, code, plain=True) for name, code in FLOATS.items()},
    "fp8_e4m3": KVFormat("fp8_e4m3", E4M3, E4M3),
    "fp8_e5m2": KVFormat("fp8_e5m2", E5M2, E5M2),
    "int8": KVFormat("int8", INT8, INT8),
    # Keys get more bits, because an error in a key changes every weight of a softmax, whereas errors in values are
    # averaged (KIVI, Liu et al. 2024; KVTuner, Li et al. 2025).
    "k8v4": KVFormat("k8v4", INT8, INT4),
    "int4": KVFormat("int4", INT4, INT4),
    "nvfp4": KVFormat("nvfp4", NVFP4, NVFP4),
}


CODES = {code.name: code for format in KV_FORMATS.values() for code in (format.keys, format.values)}
_NAMED = {(format.keys.name, format.values.name): format for format in KV_FORMATS.values()}


def kv_format(name: str) -> KVFormat:
    """Return the format called `name`, which may also be a pair of codecs for keys and values: `int8/fp8_e4m3`.

    Raises:
        ConfigError: there is no such format or codec.
    """
    if name in KV_FORMATS:
        return KV_FORMATS[name]
    keys, slash, values = name.partition("/")
    if not slash:
        raise ConfigError(f"KV cache dtype {name!r} is not one of {', '.join(KV_FORMATS)}")
    return pair_format(keys, values)


def pair_format(keys: str, values: str) -> KVFormat:
    """Return the format with these codecs of keys and values, under the pair's own name if it has one.

    Raises:
        ConfigError: one of the codecs is unknown.
    """
    for side, name in (("keys", keys), ("values", values)):
        if name not in CODES:
            raise ConfigError(f"KV cache dtype {name!r} of {side} is not one of {', '.join(CODES)}")
    return _NAMED.get((keys, values)) or KVFormat(f"{keys}/{values}", CODES[keys], CODES[values])


@dataclass(frozen=True, slots=True)
class Int8Copies:
    """The tokens that layers of fewer than 8 bits keep in int8 as well; `storage/recent_kv.py` shows what reads which.

    Attributes:
        sink_blocks: number of blocks at the start of a sequence.
        recent_blocks: number of blocks up to and including a query's own.
    """

    sink_blocks: int
    recent_blocks: int

    MOST = 1024

    def __post_init__(self) -> None:
        if not (0 <= self.sink_blocks <= self.MOST and 1 <= self.recent_blocks <= self.MOST):
            raise ConfigError(
                f"blocks in 8 bits are up to {self.MOST} at the start and 1 to {self.MOST} most recent ones, "
                f"got {self.sink_blocks} and {self.recent_blocks}"
            )

    def __str__(self) -> str:
        return f"sinks={self.sink_blocks},recent={self.recent_blocks}"


def spelled(formats: Sequence[KVFormat], copies: Int8Copies | None = None) -> str:
    """Return the dtype of a cache whose layers have these formats: `k8v4*2,int4`, or `int4;sinks=1,recent=4`.

    `copies` that no layer needs are left out.
    """
    runs = [(name, len(list(run))) for name, run in groupby(format.name for format in formats)]
    layers = ",".join(name if count == 1 else f"{name}*{count}" for name, count in runs) if runs[1:] else runs[0][0]
    return layers if copies is None or not any(map(needs_copies, formats)) else f"{layers};{copies}"


def needs_copies(format: KVFormat) -> bool:
    """Whether copies in int8 have more bits than a layer's own codes."""
    return min(format.keys.bits, format.values.bits) < 8


@lru_cache(maxsize=64)
def int8_copies(dtype: str) -> Int8Copies | None:
    """Return which tokens a cache keeps in int8 as well, by its dtype."""
    _, _, stated = dtype.partition(";")
    if not stated:
        return None
    found = re.fullmatch(r"sinks=(\d+),recent=(\d+)", stated)
    if found is None:
        raise ConfigError(f"KV cache dtype {dtype!r} does not end in sinks=N,recent=N")
    return Int8Copies(int(found[1]), int(found[2]))


@lru_cache(maxsize=64)
def layer_formats(dtype: str, num_layers: int) -> tuple[KVFormat, ...]:
    """Return the format of each layer.

    Raises:
        ConfigError: a format is unknown, or the dtype is for another number of layers.
    """
    dtype, _, _ = dtype.partition(";")
    if "," not in dtype and "*" not in dtype:
        return (kv_format(dtype),) * num_layers
    formats: list[KVFormat] = []
    for run in dtype.split(","):
        name, _, count = run.partition("*")
        formats += [kv_format(name)] * int(count or 1)
    if len(formats) != num_layers:
        raise ConfigError(f"KV cache dtype {dtype!r} is of {len(formats)} layers, the model has {num_layers}")
    return tuple(formats)


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
    parsed = read_toml(path, "the codec table", _MOST_TABLE_BYTES).parsed
    if unknown := sorted(set(parsed) - set(_TABLE_ENTRIES)):
        raise ConfigError(f"{what} has an unknown entry {unknown[0]!r}; known: {', '.join(_TABLE_ENTRIES)}")
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
    """Write a codec table, or raise `ConfigError`; `measured` are the lines of TOML under [measured]."""
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
    write_text(path, "\n".join(lines) + "\n", "the codec table")
