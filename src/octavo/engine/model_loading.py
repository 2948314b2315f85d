"""Choose the model that an engine loads, with its device, dtype, number of ranks and scales; and load it."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass, replace

import torch

from octavo import kernels
from octavo.checkpoint.gguf_file import GGUFFile
from octavo.checkpoint.model_config import ModelConfig
from octavo.checkpoint.model_source import ModelFormat, ModelSource, load_model_config, model_of, stored_format
from octavo.checkpoint.share import Share
from octavo.config import EngineConfig
from octavo.errors import ConfigError, UnsupportedModelError
from octavo.models.base import CausalLM
from octavo.models.kv_scales import choose_scales
from octavo.models.loader import open_weights
from octavo.models.native_decoder import NativeDecoder, Rank, make_decoder
from octavo.models.ops import LayerOps
from octavo.models.packed_modules import OnlineFormat
from octavo.planner.machine import chosen_cpus, numa_nodes, usable_cores
from octavo.storage.arena import KVArena

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """The model to load, and how to compute it."""

    config: EngineConfig
    source: ModelSource
    model: ModelConfig
    dtype: torch.dtype
    device: torch.device

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def runs_on_kernels(self) -> bool:
        """Whether whole steps run on the native decoder."""
        supported = self.model.runs_natively and NativeDecoder.supports(self.model, self.dtype, self.device)
        return supported and self.config.attention_backend not in ("reference", "triton")

    @property
    def online_format(self) -> OnlineFormat | None:
        """The format to which floats are quantised when they are loaded."""
        formats: dict[str, OnlineFormat] = {"q8_0": "Q8_0", "q4_0": "Q4_0"}
        return formats.get(self.config.quantization)

    def share(self, rank: int) -> Share:
        """Return a rank's share of the model; raises `ConfigError` if it cannot be split."""
        return Share(self.model, rank, self.config.num_ranks)


def choose_target(config: EngineConfig) -> LoadTarget:
    """Find the model, and choose device, dtype and number of ranks.

    Raises:
        ModelError, ConfigError: see `build_engine`.
    """
    device = _device(config)
    if config.deterministic and device.type != "cpu":
        raise ConfigError(
            f"deterministic cannot be guaranteed on device {device.type!r}: its matrix products sum in an order that "
            "depends on the number of rows; use device='cpu', or leave deterministic off"
        )
    source = model_of(config)
    model_config = _for_device(load_model_config(source), source, device)
    target = _with_dtype(LoadTarget(config, source, model_config, torch.bfloat16, device))
    return _with_number_of_ranks(target)


def load_with_threads(target: LoadTarget, num_threads: int, rank: Rank | None = None) -> CausalLM:
    """Load the model, and set the number of threads for loading and for running it."""
    if kernels.available():
        kernels.set_num_threads(num_threads)  # loading packs weights in these threads too
    # Loading consists of thousands of short operations. With several threads each waits for the slowest, which took
    # four times as long on a busy machine.
    torch.set_num_threads(1)
    try:
        model = _load(target, rank)
    finally:
        torch.set_num_threads(num_threads)
    if isinstance(model, NativeDecoder):
        # Torch's threads spin after each of its short operations, on cores that the kernels' threads need.
        torch.set_num_threads(1)
        if not target.config.deterministic:
            model.allow_rounding()
    return model


def _load(target: LoadTarget, rank: Rank | None) -> CausalLM:
    config = target.config
    if not target.model.runs_natively:
        from octavo.models.transformers_bridge import TransformersModel

        logger.info(
            "%s runs through transformers, slower than natively (docs/serve/models.md): %s",
            config.model,
            target.model.transformers_reason,
        )
        return TransformersModel.load(
            target.source.path,
            dtype=target.dtype,
            device=target.device,
            # The reference for the fast paths uses no kernels at all.
            packed=config.attention_backend != "reference",
            format=target.online_format,
            max_len=config.max_model_len,
            overrides=target.source.overrides,
        )
    ops: LayerOps | None = None  # the fastest
    if config.attention_backend == "reference":
        ops = LayerOps()
    elif config.attention_backend == "triton" and importlib.util.find_spec("triton") is not None:
        from octavo.models.triton_ops import TritonLayerOps

        ops = TritonLayerOps()
    return make_decoder(
        target.model,
        open_weights(target.source, target.model, target.online_format),
        dtype=target.dtype,
        device=target.device,
        quantised=config.quantization != "none",
        ops=ops,
        rank=rank,
    )


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch finds no CUDA device here; use device='cpu'")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def _for_device(model_config: ModelConfig, source: ModelSource, device: torch.device) -> ModelConfig:
    """Let transformers run a mixture of experts on a GPU: the torch decoder multiplies one expert after the other.

    Raises:
        UnsupportedModelError: it comes from a GGUF file.
    """
    if model_config.experts is None or device.type == "cpu" or not model_config.runs_natively:
        return model_config
    if source.format is ModelFormat.GGUF:
        raise UnsupportedModelError(
            f"{source.path}: mixtures of experts in GGUF files run on CPUs only; serve the Hugging Face folder of that "
            "model instead"
        )
    return replace(model_config, transformers_reason="mixtures of experts run natively on CPUs only")


def _with_dtype(target: LoadTarget) -> LoadTarget:
    """Choose the dtype to compute in; that of `target` is bfloat16."""
    config, source = target.config, target.source
    if config.dtype != "auto":
        return replace(target, dtype=getattr(torch, config.dtype))
    if not target.on_cpu or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return target
    # A CPU without bf16 instructions emulates them, several times slower than float32. Quantised weights are multiplied
    # in int8 there, and would take several times the memory in float32.
    quantised = False
    if target.runs_on_kernels and config.quantization != "none":
        if source.format is ModelFormat.GGUF:
            quantised = GGUFFile(source.path).is_quantised
        else:
            quantised = target.online_format is not None or stored_format(source) != "none"
    return target if quantised else replace(target, dtype=torch.float32)


def _with_number_of_ranks(target: LoadTarget) -> LoadTarget:
    """Resolve a `tensor_parallel_size` of "auto"; raises `ConfigError` if a number is impossible."""
    if target.config.tensor_parallel_size != "auto":
        _require_splittable(target)
        return target
    cpus = chosen_cpus(target.config.cpu_list)
    count = min(len(numa_nodes(allowed=cpus)), usable_cores(cpus).count) if target.on_cpu else 1

    def among(num_ranks: int) -> LoadTarget:
        return replace(target, config=replace(target.config, tensor_parallel_size=num_ranks))

    try:
        _require_splittable(several := among(count))
    except ConfigError as error:
        logger.info("one process for all NUMA nodes: %s", error)
        return among(1)
    return several


def _require_splittable(target: LoadTarget) -> None:
    config = target.config
    if config.num_ranks > 1 and not replace(target, device=torch.device("cpu")).runs_on_kernels:
        raise ConfigError(
            f"tensor_parallel_size is {config.num_ranks}, but only the native decoder can be split among ranks, "
            f"and {config.model} in {dtype_name(target.dtype)} does not run on it here"
        )
    target.share(0)


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def choose_kv_scales(config: EngineConfig, source: ModelSource, arena: KVArena, model: CausalLM) -> str:
    """Choose the scales of calibrated codecs; returns an identifier of them, empty if there are none.

    Raises:
        ConfigError: scales are given for a cache that has none.
    """
    dtype = arena.spec.dtype
    if calibrated := arena.calibrated_layers:
        share = model.share if isinstance(model, NativeDecoder) and model.share.count > 1 else None
        calculate = config.calculate_kv_scales
        return choose_scales(calibrated, source, dtype, file=config.kv_scales, calculate=calculate, share=share)
    if config.kv_scales is not None:
        raise ConfigError(
            f"kv_scales is for fp8 and nvfp4; a KV cache in {dtype} has no scales that are chosen beforehand"
        )
    return ""
