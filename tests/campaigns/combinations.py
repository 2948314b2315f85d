"""Random options, models and requests together: answers must equal those of the same requests alone, without a cache.

    python -m tests.campaigns.combinations [--seconds 600] [--seed 0]

Each round draws a tiny random model of some family, options that may change what it answers (codec, weights, budget,
size of blocks), options that may not (schedulers, preemption, tiers, drafts, ranks, small caches and steps), and
requests of every kind. An engine without a cache answers the requests one by one. One with all options answers them
all at once, and then disturbed: they arrive between steps, some are aborted, some have a salt or pins, the cache is
reset and parts of steps raise. With a disk, it answers them once more after a restart. No other step may fail, and no
block may be left over.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from octavo import LLM, SamplingParams
from octavo.engine.outputs import RequestOutput
from octavo.errors import CapacityError, ConfigError
from octavo.request import FinishReason, PinRequest, Request
from tests.conftest import assert_idle
from tests.engine.faults import PLACES, injected, times
from tests.models.tiny import write_hf_model

NUM_REQUESTS = 14
MAX_MODEL_LEN = 256
_WINDOWS = {"head_dim": 32, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 24},
    "Qwen3": {"head_dim": 32},
    "Gemma2": {"head_dim": 32, "sliding_window": 32, "query_pre_attn_scalar": 32},
    "Gemma3": _WINDOWS,
    "Cohere2": _WINDOWS,
    "Granite": {},
    "Mixtral": _EXPERTS,
    "GptOss": {**_WINDOWS, **_EXPERTS},
    "DeepseekV2": {
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
    },
}
TABLE = "mixed.toml"
_TABLE = 'keys = "int8"\nvalues = "int4"\nsink_blocks = 1\nrecent_blocks = 2\n'
# None leaves an option out. What may change answers; both engines get these:
SHARED: dict[str, list[Any]] = {
    "block_size": [16, 16, 32],
    "kv_cache_dtype": [*[None] * 14, "fp8", "fp8_e5m2", "int8", "k8v4", "int4", TABLE],
    "quantization": [*[None] * 10, "q8_0", "q4_0"],
    "kv_budget": [*[None] * 14, {"mode": "sinks", "tokens": 64}, {"mode": "sinks", "tokens": 96}],
}
# What may not:
FREE: dict[str, list[Any]] = {
    "preemption_mode": ["auto", "recompute", "swap"],
    "prefix_cache": ["hashed", "radix"],
    "eviction_policy": ["adaptive", "lru", "fifo", "priority"],
    "scheduling_policy": ["fcfs", "priority", "vtc"],
    "max_num_batched_tokens": [16, 24, 64, 512],
    "max_num_seqs": [3, 8, 16],
    "kv_demotion": ["all", "on_evict", "on_second_use"],
    "kv_host_memory": [0, 0, "4MiB"],
    "async_scheduling": [None, None, True],
    "itl_slo_ms": [*[None] * 9, 1],
    "tensor_parallel_size": [1, 1, 1, 2],
}
PARAMS: dict[str, list[Any]] = {
    "max_tokens": [1, 5, 12, 30, 40],
    "temperature": [0.0, 0.0, 0.7, 1.3],
    "top_p": [*[1.0] * 4, 0.8],
    "top_k": [*[0] * 6, 5],
    "min_p": [*[0.0] * 9, 0.1],
    "repetition_penalty": [*[1.0] * 4, 1.3],
    "frequency_penalty": [*[0.0] * 4, 0.7],
    "logprobs": [*[None] * 4, 0, 3],
    "prompt_logprobs": [*[None] * 9, 2],
    "ignore_eos": [*[False] * 4, True],
    "stop": [*[()] * 6, (" the",), ("e",)],
    "logit_bias": [*[None] * 9, {100: 5.0}],
    "n": [*[1] * 6, 2, 3],
}
_BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 2, "best_of": 3, "temperature": 0.0, "max_tokens": 12}
_FORM = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
_GRAMMARS = ({"regex": "[a-z]{3,9}( [0-9]+)*"}, {"choice": ["queue", "table", "the rest"]}, {"json": _FORM})
_TEXT = "the queue takes what fits and leaves the rest: it waits for its turn in the table, 1234 we'll see, THE END"


def draw(rng: random.Random, table: dict[str, list[Any]]) -> dict[str, Any]:
    return {name: value for name, values in table.items() if (value := rng.choice(values)) is not None}


def draw_options(rng: random.Random, folder: Path, disk: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw the options of the engine without a cache, and of the other."""
    fixed: dict[str, Any] = {"dtype": "bfloat16", "deterministic": True, "device": "cpu", "num_threads": 1}
    fixed |= {"max_model_len": MAX_MODEL_LEN, "limits": {"max_grammar_ms": 60_000}}
    shared = fixed | draw(rng, SHARED)
    if shared.get("kv_cache_dtype") == TABLE:
        shared["kv_cache_dtype"] = str(folder / TABLE)
    options = shared | draw(rng, FREE)
    options["num_blocks"] = rng.choice([300, 400, 640, 1280]) // shared["block_size"] + 2
    options["swap_space"] = 0 if options["preemption_mode"] == "recompute" else "8MiB"
    if "async_scheduling" not in options and rng.random() < 0.6:
        method = rng.choice(["ngram", "suffix", "draft_model"])
        model = {"model": str(folder)} if method == "draft_model" else {}
        options["speculative_config"] = {"method": method, "num_speculative_tokens": rng.choice([2, 5, 8]), **model}
    if options["tensor_parallel_size"] == 1 and rng.random() < 0.3:
        options |= {"kv_disk": disk, "kv_disk_size": "8MiB"}
    return shared | {"enable_prefix_caching": False, "swap_space": 0, "kv_cache_memory": "64MiB"}, options


def draw_params(rng: random.Random) -> SamplingParams:
    how = rng.random()
    if how < 0.1:
        return SamplingParams(**_BEAMS)
    params = draw(rng, PARAMS) | {"seed": rng.randrange(1000)}
    if how < 0.25:
        params |= {"structured_outputs": rng.choice(_GRAMMARS)}
    return SamplingParams(**params)


def draw_prompts(rng: random.Random) -> list[dict[str, Any]]:
    def text(least: int, most: int) -> str:
        return " ".join(rng.choices(_TEXT.split(), k=rng.randint(least, most)))

    starts = [text(10, 40) for _ in range(3)]
    prompts = [f"{rng.choice(starts)} {text(1, 15)}" for _ in range(NUM_REQUESTS)]
    return [
        {"prompt": prompt, "priority": rng.choice([0, 0, 1, -1]), "cache_salt": rng.choice(["", "", "", "a"])}
        for prompt in prompts
    ]


def answer(output: RequestOutput) -> tuple[Any, ...]:
    """Return all of an output that may not differ."""
    completions = [(each.token_ids, each.text, each.finish_reason, each.logprobs) for each in output.outputs]
    return completions, output.prompt_logprobs, output.error


def answer_disturbed(llm: LLM, requests: list[Request], rng: random.Random) -> tuple[dict[int, RequestOutput], int]:
    """Return the outputs so far by the request's index, and the number of steps that raised."""
    core, outputs, num_faults = llm.core, dict[int, RequestOutput](), 0
    indices = {request.request_id: index for index, request in enumerate(requests)}
    arriving = rng.sample(requests, len(requests))
    for request in requests:
        if rng.random() < 0.15:
            request.pins = (PinRequest(rng.randint(1, len(request.prompt_token_ids)), rng.choice([0.05, 30.0])),)
    while len(outputs) < len(requests):
        while arriving and (not core.has_work or rng.random() < 0.3):
            core.add(arriving.pop())
        running = [request for request in requests if request.request_id in core.scheduler.live]
        if running and rng.random() < 0.02:
            aborted = rng.choice(running).request_id
            if (so_far := core.abort(aborted)) is not None:
                outputs[indices[aborted]] = so_far
        if rng.random() < 0.02:
            llm.reset_prefix_cache()
        with ExitStack() as fault:
            # A request alone in a step that raises twice is ended.
            if rng.random() < 0.02 and core._recovery.isolation.is_calm:
                fault.enter_context(injected(core, rng.choice(list(PLACES)), times(1)))
                num_faults += 1
            for output in core.step():
                outputs[indices[output.request_id]] = output
    for pin in llm.pins():
        llm.unpin(pin.pin_id)
    return outputs, num_faults


def differs(output: RequestOutput, expected: tuple[Any, ...], params: SamplingParams) -> bool:
    """Compare an output with that of the request alone; of an aborted one, the tokens so far."""
    if all(each.finish_reason is not FinishReason.ABORT for each in output.outputs):
        return answer(output) != expected
    whole = {index: completion[0] for index, completion in enumerate(expected[0])}
    return not params.use_beam_search and any(
        each.token_ids != whole[each.index][: len(each.token_ids)] for each in output.outputs
    )


def play_round(folder: Path, rng: random.Random, totals: Counter[str]) -> list[str]:
    """Play one round; returns what was wrong."""
    with tempfile.TemporaryDirectory() as temporary:
        plain, options = draw_options(rng, folder, f"{temporary}/disk")
        prompts, params = draw_prompts(rng), [draw_params(rng) for _ in range(NUM_REQUESTS)]
        with LLM(str(folder), **plain) as llm:
            alone = [
                answer(llm.generate([prompt], [how], use_tqdm=False)[0])
                for prompt, how in zip(prompts, params, strict=True)
            ]
        wrong: list[str] = []
        for _ in range(2 if "kv_disk" in options else 1):
            with LLM(str(folder), **options) as llm:
                outputs = dict(enumerate(llm.generate(prompts, params, use_tqdm=False)))
                assert_idle(llm.core)
                if llm.core.stats.num_failed_steps:
                    wrong.append(f"{llm.core.stats.num_failed_steps} steps failed")
                requests = [request for request, _ in llm._make_requests(prompts, params)]
                disturbed, num_faults = answer_disturbed(llm, requests, rng)
                assert_idle(llm.core)
                totals["steps that raised"] += num_faults
                for found in (outputs, disturbed):
                    for index, output in found.items():
                        totals["answers"] += 1
                        if differs(output, alone[index], params[index]):
                            how = f"{prompts[index]}, {params[index]}"
                            wrong.append(f"{how}: {answer(output)}, alone {alone[index]}")
    return [f"{each}; options {options}" for each in wrong]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first round; each later one adds 1")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("octavo").setLevel(logging.CRITICAL)  # each step that raises is logged with its traceback
    totals: Counter[str] = Counter()
    ends, seed = time.monotonic() + args.seconds, args.seed
    with tempfile.TemporaryDirectory() as root:
        for family, sizes in FAMILIES.items():
            write_hf_model(Path(root, family), family, tokenizer=True, hidden_size=128, **sizes)
            Path(root, family, TABLE).write_text(_TABLE)
        while time.monotonic() < ends:
            rng = random.Random(seed)
            family = rng.choice(list(FAMILIES))
            try:
                wrong = play_round(Path(root, family), rng, totals)
                totals["rounds"] += 1
            except (CapacityError, ConfigError) as refusal:  # some combinations are not allowed
                print(f"seed {seed}, {family}: refused: {refusal}")
                wrong, totals["refused"] = [], totals["refused"] + 1
            except BaseException as error:
                error.add_note(f"seed {seed}, {family}")
                raise
            for each in wrong:
                print(f"seed {seed}, {family}: WRONG: {each}", flush=True)
            totals["wrong"] += len(wrong)
            seed += 1
    print(", ".join(f"{count:,} {name}" for name, count in totals.items()))
    return int(totals["wrong"] > 0 or not totals["answers"])


if __name__ == "__main__":
    sys.exit(main())
