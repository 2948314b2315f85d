"""Scales of calibrated KV codecs, from a file, a checkpoint, or the first tokens that are stored.

llm-compressor writes `model.layers.N.self_attn.k_scale` and `v_scale` (`kv_cache_scheme` in the configuration's
`quantization_config`): one number per layer, or one per head.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from collections.abc import Callable, Iterable, Mapping

import torch

from octavo.checkpoint.model_source import ModelFormat, ModelSource
from octavo.checkpoint.share import Share
from octavo.errors import CorruptModelError, ModelError, shown
from octavo.models.kv_scale_file import Scales, default_scales_path, read_scales
from octavo.storage.coded_kv import CodedKV, CodedSide

logger = logging.getLogger(__name__)

# Keys and values of models lie between about 1e-3 and 1e3 (a head without use may have smaller ones).
_LEAST_REACH, _MOST_REACH = 1e-8, 1e8
_NAME = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:self_attn|attention|attn)\.([kv])_scale$")


def checkpoint_scales(names: Iterable[str], read: Callable[[str], torch.Tensor]) -> Scales:
    """Return the scales in a checkpoint; empty if it has none."""
    found: Scales = {}
    for name in names:
        if match := _NAME.search(name):
            found.setdefault(int(match[1]), {})[match[2]] = read(name).float().flatten()
    return found


def calibrated_sides(layer: CodedKV) -> dict[str, CodedSide]:
    """Return the sides of a layer, "k" and "v", that have scales."""
    return {name: side for name, side in (("k", layer.keys), ("v", layer.values)) if side.codec.format.calibrated}


def apply_scales(layers: Mapping[int, CodedKV], scales: Scales, source: str, share: Share | None = None) -> str:
    """Set the scales of each layer; returns a digest that distinguishes blocks with these scales from others.

    Args:
        share: of a model that is split: `scales` are of all its KV heads, and `layers` have those of one rank.

    Raises:
        CorruptModelError: a layer's scale is missing, not positive, absurd, or for another number of heads.
    """
    digest = hashlib.blake2b(digest_size=16)
    for index, layer in layers.items():
        for kind, side in calibrated_sides(layer).items():
            scale, heads = scales.get(index, {}).get(kind), _num_heads(side, share)
            if scale is None:
                raise CorruptModelError(f"{source} has KV scales, but no {kind}_scale of layer {index}")
            if scale.numel() not in (1, heads):
                raise CorruptModelError(
                    f"{source}: {kind}_scale of layer {index} has {scale.numel()} numbers for {heads} heads"
                )
            if not bool(((scale > 0) & scale.isfinite()).all()):
                raise CorruptModelError(f"{source}: {kind}_scale of layer {index} is not positive: {scale.tolist()}")
            reach = scale * side.codec.largest
            if not bool(((reach >= _LEAST_REACH) & (reach <= _MOST_REACH)).all()):
                raise CorruptModelError(
                    f"{source}: with {kind}_scale {shown(scale.tolist())} of layer {index}, the cache holds numbers up "
                    f"to {shown(reach.tolist())}; that must be between {_LEAST_REACH:g} and {_MOST_REACH:g}: calibrate "
                    "again"
                )
            scale = scale.expand(heads).contiguous()
            # In place: the kernels hold the tensor.
            side.scale.copy_(scale if share is None else scale[share.kv_heads])
            digest.update(scale.cpu().numpy().tobytes())
    logger.info("KV cache scales: from %s", source)
    return digest.hexdigest()


def choose_scales(
    layers: Mapping[int, CodedKV],
    source: ModelSource,
    dtype: str,
    *,
    file: str | None = None,
    calculate: bool = False,
    share: Share | None = None,
) -> str:
    """Choose the scales of calibrated layers; returns a string that becomes part of every block's key.

    Args:
        layers: layers with calibrated sides, by index in the model.
        file: file from `octavo calibrate`; by default the one next to the model, if there is one.
        calculate: whether to choose the scales from the first tokens that are computed.
        share: the heads of `layers`, if the model is split among ranks; the result is the same for all of them.

    Raises:
        ConfigError: the file is not for this model, codec or shape.
        CorruptModelError: see `apply_scales`.
    """
    if calculate:
        logger.info("KV cache scales: from the first tokens computed")
        return f"calculated {secrets.token_hex(8)}"  # unique, so that no other engine's blocks are found
    default = default_scales_path(source, dtype)
    if file is None and default.is_file():
        file = str(default)
    if file is not None:
        heads = {
            index: {name: _num_heads(side, share) for name, side in calibrated_sides(layer).items()}
            for index, layer in layers.items()
        }
        return apply_scales(layers, *read_scales(file, source, dtype, heads), share)
    scales = _from(source)
    if scales:
        return apply_scales(layers, scales, str(source.path), share)
    logger.warning(
        "THE KV CACHE IS NOT CALIBRATED: %s has no k_scale and v_scale for kv_cache_dtype %s, so they are 1.0. Values "
        "outside the codec's range are clipped and small ones are coarse: run octavo calibrate, give "
        "--calculate-kv-scales, or use int8, which needs no scales",
        source.path,
        dtype,
    )
    return "1.0"


def _num_heads(side: CodedSide, share: Share | None) -> int:
    return len(side.scale) if share is None else share.config.num_kv_heads


def _from(source: ModelSource) -> Scales:
    if source.format is not ModelFormat.HUGGINGFACE:
        return {}
    from octavo.models.loader import SafetensorsWeights

    try:
        weights = SafetensorsWeights(source.path)
    except ModelError:
        return {}  # the loader of the weights has reported the error
    return checkpoint_scales(weights.names(), lambda name: weights.get(name, torch.float32))
