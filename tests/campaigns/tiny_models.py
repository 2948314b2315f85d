"""Tiny random models, their answers without a cache, and the blocks that they store, to check faulty stores against."""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from octavo import LLM, SamplingParams
from octavo.engine.outputs import RequestOutput
from octavo.kvcache.hashing import Label
from octavo.tiers.base import Medium, Reason

LAYERS, HIDDEN, HEADS, HEAD_DIM, INNER, VOCAB = 5, 64, 2, 32, 96, 256
BLOCK_SIZE = 16
BLOCK_BYTES = LAYERS * 2 * HEAD_DIM * BLOCK_SIZE * 2  # keys and values of one head, in bfloat16
WRONG_ANSWERS = "wrong answers given"
_BEGINNINGS, _QUESTIONS = 3, 8
_ASKED_AT_ONCE = 3
_PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


class TinyModel:
    """A Llama of five layers, and requests whose answers are known.

    Attributes:
        blocks: all full blocks of all prompts, as an engine stores them.
        fingerprint: identifies the model in stores.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        _write_model(folder, seed)
        rng = random.Random(seed)
        beginnings = [_text(rng, 30, 90) for _ in range(_BEGINNINGS)]
        self._prompts = [text + _text(rng, 5, 60) for text in beginnings * _QUESTIONS]
        with self.engine(enable_prefix_caching=False) as cold:
            # One at a time and computed in full: nothing else that an engine does may change these answers.
            self._answers = [_ask(cold, [prompt])[0].outputs[0].token_ids for prompt in self._prompts]
        stored = _InMemory()
        self.fingerprint = self._serve_all(stored, Counter())
        self.blocks = list(stored.blocks.values())
        self._must_notice_wrong_blocks()

    def engine(self, **options: Any) -> LLM:
        """An engine that stores every full block at once."""
        fixed = {"dtype": "bfloat16", "deterministic": True, "device": "cpu", "num_threads": 1}
        sizes = {"block_size": BLOCK_SIZE, "num_blocks": 64, "swap_space": 0}
        return LLM(str(self._folder), kv_demotion="all", **{**fixed, **sizes, **options})

    def serve(self, llm: LLM, rng: random.Random, totals: Counter[str]) -> None:
        """Send some requests at once, and count answers and cached tokens.

        Raises:
            CacheError: a block is lost.
        """
        self._serve(llm, rng.sample(range(len(self._prompts)), _ASKED_AT_ONCE), totals)

    def _serve(self, llm: LLM, chosen: Sequence[int], totals: Counter[str]) -> None:
        outputs = _ask(llm, [self._prompts[i] for i in chosen])
        for i, output in zip(chosen, outputs, strict=True):
            right = output.outputs[0].token_ids == self._answers[i]
            totals["right answers" if right else WRONG_ANSWERS] += 1
            totals["prompt tokens computed"] += len(self._prompts[i]) - output.num_cached_tokens
            for tier, count in output.cached_by_tier.items():
                totals[f"prompt tokens found on {tier}"] += count
        llm.core.scheduler.kv.audit()

    def _serve_all(self, medium: _InMemory, totals: Counter[str]) -> bytes:
        """Send all requests, with a medium in place of the disk; returns the disk's fingerprint."""
        with tempfile.TemporaryDirectory() as disk, self.engine(kv_disk=disk, kv_disk_size="4MiB") as llm:
            assert llm.core.tiers is not None
            (store,) = llm.core.tiers.stores
            store.medium, real = medium, store.medium
            real.close()
            self._serve(llm, range(len(self._prompts)), totals)
            fingerprint: bytes = real._fingerprint  # type: ignore[attr-defined]
        return fingerprint

    def _must_notice_wrong_blocks(self) -> None:
        """Check that answers are wrong if blocks are swapped and nothing verifies them."""
        swapped, totals = _InMemory(), Counter[str]()
        contents = [content for _, content in self.blocks]
        for (label, _), other in zip(self.blocks, contents[1:] + contents[:1], strict=True):
            swapped.blocks[label.key] = (label, other)
        self._serve_all(swapped, totals)
        if totals[WRONG_ANSWERS] < 0.9 * len(self._prompts):
            raise SystemExit(f"answers do not depend on what is stored: {dict(totals)}")


class _InMemory(Medium):
    """A medium that verifies nothing."""

    name = "memory"

    def __init__(self) -> None:
        self.blocks: dict[bytes, tuple[Label, bytes]] = {}

    def contains(self, key: bytes) -> bool:
        return key in self.blocks

    def read(self, labels: Sequence[Label], buffers: Sequence[memoryview]) -> list[Reason | None]:
        for label, buffer in zip(labels, buffers, strict=True):
            buffer[:] = self.blocks[label.key][1]
        return [None] * len(labels)

    def write(self, label: Label, payload: memoryview, tenant: str) -> Reason | None:
        self.blocks[label.key] = (label, bytes(payload))
        return None

    def close(self) -> None:
        return


def _ask(llm: LLM, prompts: Sequence[list[int]]) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], _PARAMS, use_tqdm=False)


def _text(rng: random.Random, least: int, most: int) -> list[int]:
    return rng.choices(range(VOCAB), k=rng.randrange(least, most))


def _write_model(folder: Path, seed: int) -> None:
    """Write weights that are large enough for answers to depend on every token of the prompt."""
    folder.mkdir(parents=True)
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.k_proj": (HEAD_DIM, HIDDEN),
            f"{at}.self_attn.v_proj": (HEAD_DIM, HIDDEN),
            f"{at}.self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            f"{at}.mlp.gate_proj": (INNER, HIDDEN),
            f"{at}.mlp.up_proj": (INNER, HIDDEN),
            f"{at}.mlp.down_proj": (HIDDEN, INNER),
        }
    norms = [f"model.layers.{i}.{name}_layernorm" for i in range(LAYERS) for name in ("input", "post_attention")]
    random_ = torch.Generator().manual_seed(seed)
    weights = {name: 0.4 * torch.randn(shape, generator=random_) for name, shape in shapes.items()}
    weights |= {name: torch.ones(HIDDEN) for name in [*norms, "model.norm"]}
    save_file({f"{name}.weight": tensor.bfloat16() for name, tensor in weights.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
