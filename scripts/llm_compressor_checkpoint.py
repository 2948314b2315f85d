"""Write the tiny checkpoints of tests/models/llm_compressor/ with llm-compressor itself.

    python scripts/llm_compressor_checkpoint.py FOLDER

Creates a throwaway environment with the versions below (1.5 GB, a minute and a half if torch's wheel is cached) and
there a random Llama of two layers, whose keys and values llm-compressor calibrates: FOLDER/tensor with one scale per
layer, FOLDER/attn_head with one per KV head. The weights are not quantised.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ("torch==2.13.0", "llmcompressor==0.14.0.1")

_WRITE = """
import sys
import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

plain, output = sys.argv[1:]
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=1,
    eos_token_id=2,
)).to(torch.bfloat16)
for parameter in model.parameters():
    if parameter.ndim == 2:
        parameter.data.mul_(4)
model.save_pretrained(plain)
words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0").save_pretrained(plain)
rows = [{"input_ids": torch.randint(3, 64, (32,)).tolist(), "attention_mask": [1] * 32} for _ in range(4)]
for strategy in ("tensor", "attn_head"):
    scheme = {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False, "symmetric": True}
    recipe = QuantizationModifier(targets=[], kv_cache_scheme=scheme)
    oneshot(
        model=plain, dataset=Dataset.from_list(rows), recipe=recipe, num_calibration_samples=4, max_seq_length=32,
        output_dir=f"{output}/{strategy}",
    )
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, metavar="FOLDER")
    output: Path = parser.parse_args().output.resolve()
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "env"
        python = environment / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=True)
        subprocess.run([python, "-c", _WRITE, str(Path(folder) / "plain"), str(output)], check=True, cwd=folder)
    for strategy in ("tensor", "attn_head"):
        for tokenizer in (output / strategy).glob("tokenizer*"):
            tokenizer.unlink()  # the tests send token ids
    print(f"wrote {output}/tensor and {output}/attn_head")
    return 0


if __name__ == "__main__":
    sys.exit(main())
