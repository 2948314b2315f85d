"""The memory-related configuration of well-known models, from their `config.json` on the Hugging Face hub.

Sources: the configurations published with the weights. Their parameters, counted from these rows, equal those the
hub reports for the published weights (`tests/planner/test_known_models.py`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

KnownConfig = dict[str, Any]


def known_config(name: str) -> tuple[str, KnownConfig] | None:
    """Look up a model; returns its name in the table and its `config.json`, or None if it is not there.

    The name may be a hub id ("meta-llama/Llama-3.1-70B-Instruct") or Ollama's ("llama3.1:70b"): case, punctuation,
    the owner and words for a variant of the same shape are ignored.
    """
    for candidate in _spellings(name):
        if (known := _BY_SPELLING.get(candidate)) is not None:
            return known, KNOWN_MODELS[known]
    return None


def nearest_names(name: str, count: int = 3) -> list[str]:
    """Return the names in the table most similar to `name`, best first; empty if none is similar."""
    wanted = _squeeze(name.rsplit("/", 1)[-1])
    close = difflib.get_close_matches(wanted, _BY_SPELLING, n=count, cutoff=0.5)
    return list(dict.fromkeys(_BY_SPELLING[spelling] for spelling in close))


def _row(
    architecture: str, sizes: tuple[int, int, int, int, int], vocab_size: int, context: int, **more: Any
) -> KnownConfig:
    """`sizes`: layers, hidden size, intermediate size, query heads, KV heads."""
    layers, hidden, inner, heads, kv_heads = sizes
    row: KnownConfig = {
        "architectures": [f"{architecture}ForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": context,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    return row | more


def _qwen3(sizes: tuple[int, int, int, int, int], **more: Any) -> KnownConfig:
    return _row("Qwen3", sizes, 151936, 40960, head_dim=128, **more)


def _qwen3_moe(sizes: tuple[int, int, int, int, int], expert_width: int) -> KnownConfig:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert_width}
    return _row("Qwen3Moe", sizes, 151936, 40960, head_dim=128, **experts)


def _gemma2(sizes: tuple[int, int, int, int, int], head_dim: int) -> KnownConfig:
    return _row("Gemma2", sizes, 256000, 8192, head_dim=head_dim, sliding_window=4096, **_TIED)


def _gemma3(
    sizes: tuple[int, int, int, int, int], head_dim: int, window: int, vocab_size: int, context: int
) -> KnownConfig:
    return _row("Gemma3", sizes, vocab_size, context, head_dim=head_dim, sliding_window=window, **_TIED)


def _deepseek(
    generation: str,
    sizes: tuple[int, int, int, int, int],
    vocab_size: int,
    *,
    query_rank: int | None,
    experts: int,
    shared: int,
    visited: int,
    expert_width: int,
    dense_layers: int,
    **more: Any,
) -> KnownConfig:
    return _row(
        f"Deepseek{generation}",
        sizes,
        vocab_size,
        163840,
        q_lora_rank=query_rank,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=experts,
        n_shared_experts=shared,
        num_experts_per_tok=visited,
        moe_intermediate_size=expert_width,
        first_k_dense_replace=dense_layers,
        **more,
    )


_TIED = {"tie_word_embeddings": True}
_MIXTRAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
_NO_WINDOW = {"sliding_window": None}
_LLAMA_70B = (80, 8192, 28672, 64, 8)
_DEEPSEEK_V3 = _deepseek(
    "V3",
    (61, 7168, 18432, 128, 128),
    129280,
    query_rank=1536,
    experts=256,
    shared=1,
    visited=8,
    expert_width=2048,
    dense_layers=3,
    quantization_config={"quant_method": "fp8"},
)

# layers, hidden size, intermediate size, query heads, KV heads | vocabulary | context
KNOWN_MODELS: Mapping[str, KnownConfig] = {
    "llama-2-7b": _row("Llama", (32, 4096, 11008, 32, 32), 32000, 4096),
    "llama-2-13b": _row("Llama", (40, 5120, 13824, 40, 40), 32000, 4096),
    "llama-2-70b": _row("Llama", _LLAMA_70B, 32000, 4096),
    "llama-3-8b": _row("Llama", (32, 4096, 14336, 32, 8), 128256, 8192),
    "llama-3-70b": _row("Llama", _LLAMA_70B, 128256, 8192),
    "llama-3.1-8b": _row("Llama", (32, 4096, 14336, 32, 8), 128256, 131072),
    "llama-3.1-70b": _row("Llama", _LLAMA_70B, 128256, 131072),
    "llama-3.1-405b": _row("Llama", (126, 16384, 53248, 128, 8), 128256, 131072),
    "llama-3.2-1b": _row("Llama", (16, 2048, 8192, 32, 8), 128256, 131072, **_TIED),
    "llama-3.2-3b": _row("Llama", (28, 3072, 8192, 24, 8), 128256, 131072, **_TIED),
    "llama-3.3-70b": _row("Llama", _LLAMA_70B, 128256, 131072),
    "tinyllama-1.1b": _row("Llama", (22, 2048, 5632, 32, 4), 32000, 2048),
    "smollm2-135m": _row("Llama", (30, 576, 1536, 9, 3), 49152, 8192, **_TIED),
    "smollm2-360m": _row("Llama", (32, 960, 2560, 15, 5), 49152, 8192, **_TIED),
    "smollm2-1.7b": _row("Llama", (24, 2048, 8192, 32, 32), 49152, 8192, **_TIED),
    "mistral-7b-v0.1": _row("Mistral", (32, 4096, 14336, 32, 8), 32000, 32768, sliding_window=4096),
    "mistral-7b-v0.2": _row("Mistral", (32, 4096, 14336, 32, 8), 32000, 32768, **_NO_WINDOW),
    "mistral-7b": _row("Mistral", (32, 4096, 14336, 32, 8), 32768, 32768, **_NO_WINDOW),  # v0.3
    "mistral-nemo-12b": _row("Mistral", (40, 5120, 14336, 32, 8), 131072, 131072, head_dim=128, **_NO_WINDOW),
    "mistral-small-24b": _row("Mistral", (40, 5120, 32768, 32, 8), 131072, 32768, head_dim=128, **_NO_WINDOW),
    "mistral-large-123b": _row("Mistral", (88, 12288, 28672, 96, 8), 32768, 131072, **_NO_WINDOW),
    "mixtral-8x7b": _row("Mixtral", (32, 4096, 14336, 32, 8), 32000, 32768, **_MIXTRAL_EXPERTS),
    "mixtral-8x22b": _row("Mixtral", (56, 6144, 16384, 48, 8), 32768, 65536, **_MIXTRAL_EXPERTS),
    "qwen2-0.5b": _row("Qwen2", (24, 896, 4864, 14, 2), 151936, 32768, **_TIED),
    "qwen2-1.5b": _row("Qwen2", (28, 1536, 8960, 12, 2), 151936, 32768, **_TIED),
    "qwen2-7b": _row("Qwen2", (28, 3584, 18944, 28, 4), 152064, 32768),
    "qwen2-72b": _row("Qwen2", (80, 8192, 29568, 64, 8), 152064, 32768),
    "qwen2.5-0.5b": _row("Qwen2", (24, 896, 4864, 14, 2), 151936, 32768, **_TIED),
    "qwen2.5-1.5b": _row("Qwen2", (28, 1536, 8960, 12, 2), 151936, 32768, **_TIED),
    "qwen2.5-3b": _row("Qwen2", (36, 2048, 11008, 16, 2), 151936, 32768, **_TIED),
    "qwen2.5-7b": _row("Qwen2", (28, 3584, 18944, 28, 4), 152064, 32768),
    "qwen2.5-14b": _row("Qwen2", (48, 5120, 13824, 40, 8), 152064, 32768),
    "qwen2.5-32b": _row("Qwen2", (64, 5120, 27648, 40, 8), 152064, 32768),
    "qwen2.5-72b": _row("Qwen2", (80, 8192, 29568, 64, 8), 152064, 32768),
    "qwen3-0.6b": _qwen3((28, 1024, 3072, 16, 8), **_TIED),
    "qwen3-1.7b": _qwen3((28, 2048, 6144, 16, 8), **_TIED),
    "qwen3-4b": _qwen3((36, 2560, 9728, 32, 8), **_TIED),
    "qwen3-8b": _qwen3((36, 4096, 12288, 32, 8)),
    "qwen3-14b": _qwen3((40, 5120, 17408, 40, 8)),
    "qwen3-32b": _qwen3((64, 5120, 25600, 64, 8)),
    "qwen3-30b-a3b": _qwen3_moe((48, 2048, 6144, 32, 4), expert_width=768),
    "qwen3-235b-a22b": _qwen3_moe((94, 4096, 12288, 64, 4), expert_width=1536),
    "gemma-2-2b": _gemma2((26, 2304, 9216, 8, 4), head_dim=256),
    "gemma-2-9b": _gemma2((42, 3584, 14336, 16, 8), head_dim=256),
    "gemma-2-27b": _gemma2((46, 4608, 36864, 32, 16), head_dim=128),
    # From 4B on the text model alone, without the vision tower.
    "gemma-3-270m": _gemma3((18, 640, 2048, 4, 1), head_dim=256, window=512, vocab_size=262144, context=32768),
    "gemma-3-1b": _gemma3((26, 1152, 6912, 4, 1), head_dim=256, window=512, vocab_size=262144, context=32768),
    "gemma-3-4b": _gemma3((34, 2560, 10240, 8, 4), head_dim=256, window=1024, vocab_size=262208, context=131072),
    "gemma-3-12b": _gemma3((48, 3840, 15360, 16, 8), head_dim=256, window=1024, vocab_size=262208, context=131072),
    "gemma-3-27b": _gemma3((62, 5376, 21504, 32, 16), head_dim=128, window=1024, vocab_size=262208, context=131072),
    "deepseek-v2-lite": _deepseek(
        "V2",
        (27, 2048, 10944, 16, 16),
        102400,
        query_rank=None,
        experts=64,
        shared=2,
        visited=6,
        expert_width=1408,
        dense_layers=1,
    ),
    "deepseek-v2": _deepseek(
        "V2",
        (60, 5120, 12288, 128, 128),
        102400,
        query_rank=1536,
        experts=160,
        shared=2,
        visited=6,
        expert_width=1536,
        dense_layers=1,
    ),
    # Without the module that predicts a second token, which plain decoding does not use.
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-r1": _DEEPSEEK_V3,
}

# Words for variants whose shape is that of the base model.
_VARIANT = re.compile(r"^meta-|-?\b(instruct|chat|it|pt|hf|base|latest)\b")
_RELEASE = re.compile(r"-(v\d+(\.\d+)?|\d{4})$")


def _squeeze(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def _spellings(name: str) -> tuple[str, ...]:
    bare = _VARIANT.sub("", name.lower().rsplit("/", 1)[-1].replace(":", "-").replace("_", "-"))
    return _squeeze(bare), _squeeze(_RELEASE.sub("", bare))


_BY_SPELLING = {_squeeze(name): name for name in KNOWN_MODELS} | {
    "smollm2": "smollm2-135m",
    "mistral7bv0.3": "mistral-7b",
    "mistralnemo": "mistral-nemo-12b",
    "mistrallarge": "mistral-large-123b",
}
