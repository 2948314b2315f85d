"""Write the packaged Q4_1 GGUF as a bf16 Hugging Face folder."""

import json
import os

import torch
from common import HF_DIR, HOME
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

name = "smollm2-Q4_1.gguf"
tokenizer = AutoTokenizer.from_pretrained(HOME, gguf_file=name)
model = AutoModelForCausalLM.from_pretrained(HOME, gguf_file=name, dtype=torch.float32).to(torch.bfloat16)
os.makedirs(HF_DIR, exist_ok=True)
state = {k: v.contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
save_file(state, os.path.join(HF_DIR, "model.safetensors"), metadata={"format": "pt"})
config = model.config.to_dict()
config.pop("quantization_config", None)
config |= {"dtype": "bfloat16", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
with open(os.path.join(HF_DIR, "config.json"), "w") as f:
    json.dump(config, f, indent=1)
tokenizer.save_pretrained(HF_DIR)
