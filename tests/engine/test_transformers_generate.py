"""Greedy output is that of transformers' `generate`, token for token, in float32; so are SmolLM2's beams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from octavo import LLM, kernels
from octavo.checkpoint.model_source import load_model_config, resolve_model
from octavo.models.decoder import Decoder
from octavo.models.native_decoder import NativeDecoder
from octavo.sampling_params import SamplingParams
from tests.conftest import MakeLLM, assert_idle
from tests.engine.beams import assert_same_beams, expected_beams, scored
from tests.engine.preempting import thrash
from tests.models.test_families import FAMILIES
from tests.models.test_transformers_bridge import build
from tests.models.tiny import load_weights, write_hf_model

pytestmark = pytest.mark.integration

SMOLLM2_PROMPTS = [
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):\n",
    "Q: What is 17 + 25?\nA:",
    "In the beginning",
    "Water boils at",
    "Dear Sir or Madam,\n\n",
    "The three primary colours are",
    "<|im_start|>user\nTell me a joke.<|im_end|>\n<|im_start|>assistant\n",
    "SELECT name FROM",
    "1, 2, 3, 4,",
    "日本の首都は",
    "Der schnelle braune Fuchs",
    "import numpy as np\n\ndef softmax(x):\n    ",
    "My favourite recipe for bread needs flour, water, salt and yeast. First, you",
    "The mitochondria is the",
    "It was a dark and stormy night; the rain fell in torrents, except at occasional intervals, when",
    "{\"name\": \"octavo\", \"pages\":",
    "To be, or not to be, that is the question:\n",
    "🙂",
]  # fmt: skip

# Beyond the native families: attention without RoPE, and experts.
THROUGH_TRANSFORMERS = ("GPT2", "Phimoe")


def generate(model: Any, prompts: list[list[int]], num_tokens: int, **options: Any) -> list[list[int]]:
    """transformers' own greedy continuation of each prompt, all in one left-padded batch."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=num_tokens, pad_token_id=0, **options
        )
    return out[:, width:].tolist()


@pytest.fixture(scope="module")
def smollm2_of_transformers() -> Any:
    """transformers' Llama with the weights as Octavo reads them, which tests/models/test_loader.py vouches for."""
    source = resolve_model("smollm2")
    c = load_model_config(source)
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        max_position_embeddings=c.max_position_embeddings,
        rms_norm_eps=c.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
        tie_word_embeddings=c.tie_word_embeddings,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    missing, unexpected = model.load_state_dict(load_weights(source, c), strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    return model.eval()


@pytest.fixture(scope="module")
def smollm2() -> Iterator[LLM]:
    threads = torch.get_num_threads()
    with LLM("smollm2", dtype="float32", device="cpu", num_threads=1, max_model_len=256, num_blocks=400) as llm:
        yield llm
        torch.set_num_threads(threads)
        assert_idle(llm.core)


@pytest.mark.slow
def test_smollm2_on_twenty_prompts(smollm2: LLM, smollm2_of_transformers: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = smollm2.generate(SMOLLM2_PROMPTS, params, use_tqdm=False)
    prompts = [output.prompt_token_ids for output in outputs]
    expected = generate(smollm2_of_transformers, prompts, 12, eos_token_id=None)
    assert [output.outputs[0].token_ids for output in outputs] == expected


class Rules(NamedTuple):
    """How a beam search ranks what it finds, and when it ends."""

    length_penalty: float = 1.0
    early_stopping: Any = False
    ends: bool = True


RULES = [
    Rules(),
    Rules(early_stopping=True),
    Rules(ends=False),
    Rules(length_penalty=0.0, early_stopping="never"),
    Rules(length_penalty=2.0),
    Rules(length_penalty=1.5, early_stopping="never"),
    Rules(length_penalty=-1.0),
]
# Ends of clauses besides the end of sequence, so that outputs of many lengths are found and compete.
ENDS = (".", ",", "\n", "!", "?")


def assert_searches_agree(llm: LLM, model: Any, prompts: list[str], width: int, rules: Rules) -> None:
    end_of_sequence = sorted(llm.core.inputs.eos_token_ids)
    ends = [token for end in ENDS for token in llm.tokenizer.encode(end)] if rules.ends else []
    how: dict[str, Any] = {"length_penalty": rules.length_penalty, "early_stopping": rules.early_stopping}
    params = SamplingParams(use_beam_search=True, n=width, max_tokens=16, stop_token_ids=ends, **how)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    token_ids = [output.prompt_token_ids for output in outputs]
    searches = expected_beams(model, token_ids, width, 16, eos_token_id=end_of_sequence + ends, **how)
    for output, expected in zip(outputs, searches, strict=True):
        assert len(output.outputs) == width
        assert_same_beams(scored(output.outputs, rules.length_penalty), expected, rules.length_penalty)


@pytest.mark.slow
@pytest.mark.parametrize(("prompt", "width", "rules"), [(0, 2, 0), (2, 2, 1), (5, 6, 3), (8, 6, 4)])
def test_smollm2_has_the_beams_of_transformers(
    smollm2: LLM, smollm2_of_transformers: Any, prompt: int, width: int, rules: int
) -> None:
    assert_searches_agree(smollm2, smollm2_of_transformers, SMOLLM2_PROMPTS[prompt : prompt + 1], width, RULES[rules])


@pytest.mark.soak
@pytest.mark.parametrize("width", [2, 8])
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_smollm2_has_the_beams_of_transformers_by_every_rule_at_every_width(
    smollm2: LLM, smollm2_of_transformers: Any, width: int, rules: Rules
) -> None:
    assert_searches_agree(smollm2, smollm2_of_transformers, SMOLLM2_PROMPTS[::2], width, rules)


class Expected:
    """Prompts of random tokens, and their greedy continuations by transformers."""

    def __init__(self, model: Any, vocab: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.prompts = [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in (1, 9, 33, 50)]
        self.tokens = [generate(model, [prompt], 30, eos_token_id=None)[0] for prompt in self.prompts]
        assert len(set(map(tuple, self.tokens))) == len(self.prompts), "the model is blind to its context"

    def assert_same(self, llm: Any) -> int:
        """Compare the tokens of an engine; returns how many prompt tokens were cached."""
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": p} for p in self.prompts], params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == self.tokens
        return sum(output.num_cached_tokens for output in outputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_native_families(make_llm: MakeLLM, tmp_path: Path, family: str) -> None:
    """In batches and chunks, after preemptions, and from the prefix cache."""
    fields, _ = FAMILIES[family]
    expected = Expected(write_hf_model(tmp_path, family, **fields), vocab=320)
    llm = make_llm(tmp_path, block_size=16, max_num_batched_tokens=32)
    assert isinstance(llm.core.runner.model, NativeDecoder if kernels.available() else Decoder)
    expected.assert_same(llm)
    assert expected.assert_same(llm) > 0, "nothing was cached"
    # A little more than the longest needs: groups of layers have tables of their own.
    num_blocks = {"Gemma3": 30, "GptOss": 17, **dict.fromkeys(("Cohere2", "Exaone4", "Olmo3"), 26)}.get(family, 11)
    tight = make_llm(tmp_path, block_size=16, max_num_batched_tokens=32, num_blocks=num_blocks)
    thrash(tight.core)
    expected.assert_same(tight)
    if family not in ("Mistral", "Starcoder2"):  # all their layers slide, so they need few blocks
        assert tight.core.scheduler.counters.num_preemptions


@pytest.mark.parametrize("name", THROUGH_TRANSFORMERS)
def test_families_that_run_through_transformers(make_llm: MakeLLM, tmp_path: Path, name: str) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)
    llm = make_llm(tmp_path, block_size=4, max_num_batched_tokens=32)
    assert type(llm.core.runner.model).__name__ == "TransformersModel"
    Expected(model, vocab=61).assert_same(llm)


def test_generation_ends_where_transformers_ends_it(make_llm: MakeLLM, tmp_path: Path) -> None:
    model = write_hf_model(tmp_path, "Llama", tokenizer=True)
    free = generate(model, [[5, 6, 7]], 30, eos_token_id=None)[0]
    end = next(token for token in free[5:] if token not in free[:5])
    model.generation_config.eos_token_id = [2, end]
    model.generation_config.save_pretrained(tmp_path)
    llm = make_llm(tmp_path)
    (output,) = llm.generate(
        {"prompt_token_ids": [5, 6, 7]}, SamplingParams(temperature=0, max_tokens=30), use_tqdm=False
    )
    assert output.outputs[0].token_ids == generate(model, [[5, 6, 7]], 30, eos_token_id=[2, end])[0]
    assert output.outputs[0].finish_reason == "stop"
