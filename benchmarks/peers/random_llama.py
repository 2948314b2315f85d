"""Write random weights in the shape of Llama 3 8B, or of Qwen3 30B-A3B, as GGUF files, quantised by llama.cpp's tool.

    benchmarks/peers/setup.sh llamacpp                                  # once: llama-quantize, and a tokenizer
    .venv/bin/python benchmarks/peers/random_llama.py [--layers 8] [--types Q4_0 Q8_0] [--keep-f16] [--experts]
    .venv/bin/python -m benchmarks.compare --model llama8b-8 --workload single uniform16 prefill1024 \
        --engine octavo:Q4_0 llamacpp:Q4_0 octavo:Q8_0 llamacpp:Q8_0

Files are named llama8b-LAYERS-TYPE.gguf, in PEERS_HOME. Every layer is as in the model: hidden size 4096, 32 heads of
128, 8 of keys and values, 14336 inner. The tokenizer is SmolLM2's, so that there are 49,152 logits instead of 128,256.
With --experts the shape is that of Qwen3 30B-A3B, and files are named qwen3moe-LAYERS-TYPE.gguf: hidden size 2048, 32
heads of 128, 4 of keys and values, and 128 experts of 768 inner, of which a token uses 8.

All 32 layers take 14 GB in f16 while they are quantised. Fewer layers do the same work layer by layer, and 8 are still
larger than any cache, 1 GB in Q4_0; with them the head is 9 % of the weights (in the real model 7 %). It and the
embedding are Q8_0 in every file, so that engines multiply the same bytes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

HEAD_DIM = 128
PEERS_HOME = Path(os.environ.get("PEERS_HOME", Path.home() / ".cache" / "peers"))
TOKENIZER = "smollm2-Q4_1.gguf"


@dataclass(frozen=True)
class Shape:
    """A model's sizes; `experts` and those that a token uses are 0 in a dense one."""

    architecture: str
    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    experts: int = 0
    active: int = 0


LLAMA = Shape("llama", "llama8b", 4096, 14336, 32, 8)
MIXTURE = Shape("qwen3moe", "qwen3moe", 2048, 768, 32, 4, 128, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--types", nargs="+", default=["Q4_0", "Q8_0"])
    parser.add_argument("--keep-f16", action="store_true")
    parser.add_argument("--experts", action="store_true", help="write a mixture of experts")
    args = parser.parse_args()
    shape = MIXTURE if args.experts else LLAMA
    name = PEERS_HOME / f"{shape.name}-{args.layers}"
    whole = name.with_name(f"{name.name}-F16.gguf")
    write(whole, shape, args.layers)
    for kind in args.types:
        quantised = name.with_name(f"{name.name}-{kind}.gguf")
        quantise = PEERS_HOME / "llamacpp" / "bin" / "llama-quantize"
        ends = ("--output-tensor-type", "q8_0", "--token-embedding-type", "q8_0")
        subprocess.run([quantise, *ends, whole, quantised, kind], check=True, stdout=subprocess.DEVNULL)
        print(f"{quantised} ({quantised.stat().st_size / 1e9:.2f} GB)")
    if not args.keep_f16:
        whole.unlink()


def write(path: Path, shape: Shape, layers: int) -> None:
    """Write the model in f16, one tensor at a time."""
    writer = gguf.GGUFWriter(path, shape.architecture)
    copy_tokenizer(writer)
    writer.add_block_count(layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.active)
        writer.add_expert_feed_forward_length(shape.inner)
    writer.add_rope_freq_base(500_000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    tensors = shapes(shape, layers, vocab_size())
    for name, size in tensors.items():
        dtype = dtype_of(name, size)
        writer.add_tensor_info(name, size, np.dtype(dtype), int(np.prod(size)) * np.dtype(dtype).itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    generator = torch.Generator().manual_seed(0)
    for name, size in tensors.items():
        writer.write_tensor_data(values(size, generator).astype(dtype_of(name, size), copy=False))
    writer.close()


def shapes(shape: Shape, layers: int, vocab: int) -> dict[str, tuple[int, ...]]:
    """Every tensor, in rows of outputs."""
    hidden, inner, query, kv = shape.hidden, shape.inner, shape.heads * HEAD_DIM, shape.kv_heads * HEAD_DIM
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, hidden)}
    for layer in range(layers):
        at = f"blk.{layer}"
        tensors |= {
            f"{at}.attn_norm.weight": (hidden,),
            f"{at}.attn_q.weight": (query, hidden),
            f"{at}.attn_k.weight": (kv, hidden),
            f"{at}.attn_v.weight": (kv, hidden),
            f"{at}.attn_output.weight": (hidden, query),
            f"{at}.ffn_norm.weight": (hidden,),
        }
        of, experts = ("_exps", (shape.experts,)) if shape.experts else ("", ())
        tensors |= {
            f"{at}.ffn_gate{of}.weight": (*experts, inner, hidden),
            f"{at}.ffn_up{of}.weight": (*experts, inner, hidden),
            f"{at}.ffn_down{of}.weight": (*experts, hidden, inner),
        }
        if shape.experts:
            norms = {f"{at}.attn_{part}_norm.weight": (HEAD_DIM,) for part in "qk"}
            tensors |= {f"{at}.ffn_gate_inp.weight": (shape.experts, hidden), **norms}
    return tensors | {"output_norm.weight": (hidden,), "output.weight": (vocab, hidden)}


def dtype_of(name: str, shape: tuple[int, ...]) -> type[np.floating[Any]]:
    """Vectors and routers are float32, as llama.cpp's converter writes them."""
    return np.float32 if len(shape) == 1 or "ffn_gate_inp" in name else np.float16


def values(shape: tuple[int, ...], generator: torch.Generator) -> np.ndarray:
    """Weights that keep activations at their size; norms are 1."""
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).half().numpy()


def copy_tokenizer(writer: gguf.GGUFWriter) -> None:
    for name, field in gguf.GGUFReader(PEERS_HOME / TOKENIZER).fields.items():
        if name.startswith("tokenizer."):
            item = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=item)


def vocab_size() -> int:
    field = gguf.GGUFReader(PEERS_HOME / TOKENIZER).fields["tokenizer.ggml.tokens"]
    return len(field.data)


if __name__ == "__main__":
    main()
