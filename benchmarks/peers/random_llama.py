"""Write random weights in the shape of Llama 3 8B as GGUF files, quantised by llama.cpp's own tool.

    benchmarks/peers/setup.sh llamacpp                                  # once: llama-quantize, and a tokenizer
    .venv/bin/python benchmarks/peers/random_llama.py [--layers 8] [--types Q4_0 Q8_0] [--keep-f16]
    .venv/bin/python -m benchmarks.compare --model llama8b-8 --workload single uniform16 prefill1024 \
        --engine octavo:Q4_0 llamacpp:Q4_0 octavo:Q8_0 llamacpp:Q8_0

Files are named llama8b-LAYERS-TYPE.gguf, in PEERS_HOME. Every layer is as in the model: hidden size 4096, 32 heads of
128, 8 of keys and values, 14336 inner. The tokenizer is SmolLM2's, so that there are 49,152 logits instead of 128,256.
All 32 layers take 14 GB in f16 while they are quantised. Fewer layers do the same work layer by layer, and 8 are still
larger than any cache, 1 GB in Q4_0; with them the head is 9 % of the weights (in the real model 7 %). It and the
embedding are Q8_0 in every file, so that engines multiply the same bytes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path

import gguf
import numpy as np
import torch

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 4096, 14336, 32, 8, 128
PEERS_HOME = Path(os.environ.get("PEERS_HOME", Path.home() / ".cache" / "peers"))
TOKENIZER = "smollm2-Q4_1.gguf"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--types", nargs="+", default=["Q4_0", "Q8_0"])
    parser.add_argument("--keep-f16", action="store_true")
    args = parser.parse_args()
    name = PEERS_HOME / f"llama8b-{args.layers}"
    whole = name.with_name(f"{name.name}-F16.gguf")
    write(whole, args.layers)
    for kind in args.types:
        quantised = name.with_name(f"{name.name}-{kind}.gguf")
        quantise = PEERS_HOME / "llamacpp" / "bin" / "llama-quantize"
        ends = ("--output-tensor-type", "q8_0", "--token-embedding-type", "q8_0")
        subprocess.run([quantise, *ends, whole, quantised, kind], check=True, stdout=subprocess.DEVNULL)
        print(f"{quantised} ({quantised.stat().st_size / 1e9:.2f} GB)")
    if not args.keep_f16:
        whole.unlink()


def write(path: Path, layers: int) -> None:
    """Write the model in f16, one tensor at a time."""
    writer = gguf.GGUFWriter(path, "llama")
    copy_tokenizer(writer)
    writer.add_block_count(layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(500_000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    tensors = shapes(layers, vocab_size())
    for name, shape in tensors.items():
        dtype = np.float32 if len(shape) == 1 else np.float16
        writer.add_tensor_info(name, shape, np.dtype(dtype), int(np.prod(shape)) * np.dtype(dtype).itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    generator = torch.Generator().manual_seed(0)
    for shape in tensors.values():
        writer.write_tensor_data(values(shape, generator))
    writer.close()


def shapes(layers: int, vocab: int) -> dict[str, tuple[int, ...]]:
    """Every tensor, in rows of outputs."""
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, HIDDEN)}
    for layer in range(layers):
        at = f"blk.{layer}"
        tensors |= {
            f"{at}.attn_norm.weight": (HIDDEN,),
            f"{at}.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{at}.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{at}.ffn_norm.weight": (HIDDEN,),
            f"{at}.ffn_gate.weight": (INNER, HIDDEN),
            f"{at}.ffn_up.weight": (INNER, HIDDEN),
            f"{at}.ffn_down.weight": (HIDDEN, INNER),
        }
    return tensors | {"output_norm.weight": (HIDDEN,), "output.weight": (vocab, HIDDEN)}


def values(shape: tuple[int, ...], generator: torch.Generator) -> np.ndarray:
    """Weights that keep activations at their size; norms are 1."""
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return (torch.randn(shape, generator=generator) / shape[1] ** 0.5).half().numpy()


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
