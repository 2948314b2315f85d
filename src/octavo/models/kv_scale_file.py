"""Files of KV cache scales, which `octavo calibrate` writes and an engine reads.

They are TOML files, which do not affect a model's fingerprint, so they may be in the model's folder:

    model = "SmolLM2"
    fingerprint = "4f0c…"               fingerprint of the weights (`model_fingerprint`)
    codec = "fp8_e4m3"                  the dtype of the cache, as in kvcache/formats.py
    method = "mse"
    text = "…"
    tokens = 4096
    [layers.0]
    k = [0.0123, 0.0118]                one number per KV head
    v = [0.0012, 0.0009]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from octavo.checkpoint.model_source import ModelSource, model_fingerprint
from octavo.errors import ConfigError, shown
from octavo.text_file import read_toml, write_text

Scales = dict[int, dict[str, torch.Tensor]]
"""By layer: "k" and "v", each one number or float32 [kv_heads]."""

_MOST_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of scales, for the log and for readers of the file."""

    method: str
    text: str
    tokens: int


def default_scales_path(source: ModelSource, dtype: str) -> Path:
    """Return the default path of a model's scales: in its folder, or next to its GGUF file."""
    known = dtype if dtype.replace("_", "").isalnum() else f"table-{blake2b(dtype.encode(), digest_size=4).hexdigest()}"
    return source.companion_file(f"kv_scales-{known}.toml")


def write_scales(path: Path, source: ModelSource, dtype: str, scales: Scales, origin: Origin) -> None:
    """Write scales to a file for `read_scales`.

    Raises:
        ConfigError: the file cannot be written.
    """
    lines = [
        "# Scales of a KV cache: octavo serve MODEL --kv-cache-dtype CODEC --kv-scales THIS_FILE",
        f"model = {_quoted(source.name)}",
        f"fingerprint = {_quoted(model_fingerprint(source.path))}",
        f"codec = {_quoted(dtype)}",
        f"method = {_quoted(origin.method)}",
        f"text = {_quoted(origin.text)}",
        f"tokens = {origin.tokens}",
    ]
    for index, sides in sorted(scales.items()):
        lines += ["", f"[layers.{index}]", *(f"{side} = {scale.tolist()}" for side, scale in sides.items())]
    write_text(path, "\n".join(lines) + "\n", "the KV scales")


def read_scales(
    path: str, source: ModelSource, dtype: str, heads: Mapping[int, Mapping[str, int]]
) -> tuple[Scales, str]:
    """Read scales from a file; also returns a description of the file and how they were chosen.

    Args:
        heads: number of KV heads by layer and side ("k", "v"), for all that need scales.

    Raises:
        ConfigError: the file cannot be read, or is for another model, codec or shape.
    """
    what = f"the KV scales in {path}"
    parsed = read_toml(path, "the KV scales", _MOST_BYTES).parsed
    for key in ("model", "fingerprint", "codec"):
        if not isinstance(parsed.get(key), str):
            raise ConfigError(f"{what} do not say which {key} they are for: was the file written by octavo calibrate?")
    if parsed["codec"] != dtype:
        raise ConfigError(f"{what} are for a KV cache in {shown(parsed['codec'])}, but this one is in {dtype}")
    if parsed["fingerprint"] != (own := model_fingerprint(source.path)):
        raise ConfigError(
            f"{what} are for another model: {shown(parsed['model'])} with fingerprint {shown(parsed['fingerprint'])}, "
            f"but {source.name} has {own}. Run octavo calibrate again"
        )
    layers = parsed.get("layers")
    layers = layers if isinstance(layers, dict) else {}
    if len(layers) != len(heads):
        raise ConfigError(f"{what} cover {len(layers)} layers, but this cache has {len(heads)}")
    scales: Scales = {}
    for index, sides in heads.items():
        of_layer = layers.get(str(index))
        for side, count in sides.items():
            numbers = of_layer.get(side) if isinstance(of_layer, dict) else None
            scales.setdefault(index, {})[side] = _numbers(f"{what}: {side} of layer {index}", numbers, count)
    return scales, f"{path} ({parsed.get('method')} over {parsed.get('tokens')} tokens of {parsed.get('text')})"


def _numbers(what: str, numbers: Any, count: int) -> torch.Tensor:
    if not isinstance(numbers, list) or len(numbers) != count:
        found = f"{len(numbers)} numbers" if isinstance(numbers, list) else "nothing"
        raise ConfigError(f"{what} is {found}, but there are {count} KV heads")
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
            raise ConfigError(f"{what} contains {number!r}, which is not a positive number")
    return torch.tensor(numbers, dtype=torch.float32)


def _quoted(text: str) -> str:
    """Return `text` as a TOML basic string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
