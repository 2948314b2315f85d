"""SmolLM2's beams are those of transformers' beam search, all of them, token for token, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from octavo.llm import LLM
from octavo.sampling_params import SamplingParams
from tests.conftest import assert_idle
from tests.engine.beams import assert_same_beams, expected_beams, scored
from tests.engine.test_transformers_generate import smollm2_of_transformers

pytestmark = pytest.mark.integration

PROMPTS = [
    "Once upon a time, in a village by the sea,",
    "The capital of France is",
    "Water boils at a temperature of",
    "The three primary colours are red,",
    "It was a dark and stormy night; the rain fell in torrents, except at occasional intervals, when",
    "My favourite recipe for bread needs flour, water, salt and yeast. First, you",
    "<|im_start|>user\nTell me a joke.<|im_end|>\n<|im_start|>assistant\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: How many legs does a spider have?\nA:",
    "Scientists announced on Monday that",
]
WIDTHS = (2, 8)
MAX_TOKENS = 16

# Ends of clauses besides the end of sequence, so that outputs of many lengths are found and compete.
ENDS = (".", ",", "\n", "!", "?")


class Rules(NamedTuple):
    """How a search ranks what it finds, and when it ends."""

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


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    threads = torch.get_num_threads()
    llm = LLM("smollm2", dtype="float32", device="cpu", num_threads=1, max_model_len=128, kv_cache_memory="256MiB")
    yield llm
    torch.set_num_threads(threads)
    assert_idle(llm.core)


@pytest.fixture(scope="module")
def model() -> Any:
    return smollm2_of_transformers()


def assert_searches_agree(llm: LLM, model: Any, prompts: list[str], width: int, rules: Rules) -> None:
    end_of_sequence = sorted(llm.core.inputs.eos_token_ids)
    ends = [token for end in ENDS for token in llm.tokenizer.encode(end)] if rules.ends else []
    how: dict[str, Any] = {"length_penalty": rules.length_penalty, "early_stopping": rules.early_stopping}
    params = SamplingParams(use_beam_search=True, n=width, max_tokens=MAX_TOKENS, stop_token_ids=ends, **how)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    token_ids = [output.prompt_token_ids for output in outputs]
    searches = expected_beams(model, token_ids, width, MAX_TOKENS, eos_token_id=end_of_sequence + ends, **how)
    for output, expected in zip(outputs, searches, strict=True):
        assert len(output.outputs) == width
        assert_same_beams(scored(output.outputs, rules.length_penalty), expected, rules.length_penalty)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "prompts", "rules"),
    [(2, PROMPTS[:2], RULES[0:2]), (6, PROMPTS[5:7], RULES[3:5])],
    ids=["2 beams", "6 beams"],
)
def test_prompts_have_the_beams_of_transformers(
    llm: LLM, model: Any, width: int, prompts: list[str], rules: list[Rules]
) -> None:
    half = len(prompts) // 2
    assert_searches_agree(llm, model, prompts[:half], width, rules[0])
    assert_searches_agree(llm, model, prompts[half:], width, rules[1])


@pytest.mark.soak
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_every_rule_at_every_width_has_the_beams_of_transformers(
    llm: LLM, model: Any, width: int, rules: Rules
) -> None:
    assert_searches_agree(llm, model, PROMPTS, width, rules)
