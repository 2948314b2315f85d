"""Random options, models and requests together: answers must equal those of the same requests alone, without a cache.

    python -m tests.campaigns.combinations [--seconds 600] [--seed 0] [--rounds 1]

Each round draws a tiny random model of some family, options that may change what it answers (codec, weights, budget,
size of blocks), options that may not (schedulers, preemption, tiers, drafts, ranks, threads, small caches and steps),
and requests of every kind. An engine without a cache answers the requests one by one. One with all options answers them
all at once; then disturbed: they arrive between steps, some are aborted, some have pins, the cache is reset, tenants'
limits change and parts of steps raise; and at last as streams of an `AsyncEngine`, whose pieces are joined and some of
which are left. A second such engine finds the disk, Redis or the neighbour as the first one leaves it. No other step
may fail, every request is counted once, and no block may be left over.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo import LLM, SamplingParams
from octavo.checkpoint.model_source import resolve_model
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.errors import CapacityError, ConfigError, RequestError
from octavo.models.kv_scale_file import Origin, default_scales_path, write_scales
from octavo.observe.stats import EngineStats
from octavo.pooling import Pooling
from octavo.request import FinishReason, PinRequest, Request, RequestContext
from tests.conftest import assert_idle
from tests.engine.faults import PLACES, injected, times
from tests.models.test_families import FAMILIES
from tests.models.tiny import write_hf_model
from tests.ports import free_port
from tests.redis_server import PROGRAM, redis_server

NUM_REQUESTS = 14
MAX_MODEL_LEN = 256
TABLE = "mixed.toml"
_TABLE = 'keys = "int8"\nvalues = "int4"\nsink_blocks = 1\nrecent_blocks = 2\n'


def mostly(usual: Any, *others: Any) -> list[Any]:
    """Values of which three of four are the usual one; None leaves an option out."""
    return [usual] * 3 * len(others) + list(others)


# What may change answers; both engines get these:
SHARED: dict[str, list[Any]] = {
    "dtype": mostly("bfloat16", "float32"),
    "block_size": [16, 16, 32],
    "kv_cache_dtype": mostly(None, "fp8", "fp8_e5m2", "int8", "k8v4", "int4", TABLE),
    "quantization": mostly(None, "q8_0", "q4_0"),
    "kv_budget": [
        *[None] * 16,
        *({"mode": mode, "tokens": tokens} for mode in ("sinks", "bounded", "sparse_read") for tokens in (64, 96)),
        {"mode": "bounded", "tokens": 96, "layers": [0.3, 0.9]},
        {"mode": "sparse_read", "tokens": 96, "layers": [0.3, 0.9, 0.5]},
    ],
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
    "kv_host_memory": [0, 0, "512KiB", "4MiB"],
    "swap_space": [0, "256KiB", "8MiB"],
    "pin_budget": [0.25, 0.9],
    "async_scheduling": [None, None, True],
    "itl_slo_ms": mostly(None, 1),
    "tensor_parallel_size": mostly(1, 2),
    "num_threads": mostly(1, 2),
}
DRAFTS: dict[str, list[Any]] = {
    "method": ["ngram", "suffix", "draft_model"],
    "num_speculative_tokens": [1, 2, 5, 8],
    "prompt_lookup_max": [2, 8],
}
_FORM = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
_ANY_FORM = {"type": "object", "properties": {"name": {"type": "string"}, "of": {"enum": ["queue", None]}}}
PARAMS: dict[str, list[Any]] = {
    "max_tokens": [1, 5, 12, 30, 40, 90, None],
    "temperature": [0.0, 0.0, 0.7, 1.3],
    "top_p": mostly(1.0, 0.8),
    "top_k": mostly(0, 5),
    "min_p": mostly(0.0, 0.1),
    "repetition_penalty": mostly(1.0, 1.3),
    "presence_penalty": mostly(0.0, 0.5),
    "frequency_penalty": mostly(0.0, 0.7),
    "logprobs": mostly(None, 0, 3),
    "prompt_logprobs": [*[None] * 9, 0, 2],
    "ignore_eos": mostly(False, True),
    "min_tokens": mostly(0, 5),
    "stop": mostly((), (" the",), ("e",), ("e the", "1234 ")),
    "stop_token_ids": mostly((), (100, 101, 102)),
    "include_stop_str_in_output": mostly(False, True),
    "skip_special_tokens": mostly(True, False),
    "logit_bias": mostly(None, {100: 5.0}),
    "allowed_token_ids": [*[None] * 15, tuple(range(60, 130))],
    "bad_words": mostly((), ("the", "e q")),
    "n": mostly(1, 2, 3, 5),
    "best_of": mostly(None, 5),
    "use_beam_search": [*[False] * 9, True],
    "early_stopping": [*[False] * 30, True, "never"],
    "structured_outputs": mostly(
        None,
        {"regex": "[a-z]{3,9}( [0-9]+)*"},
        {"choice": ["queue", "table", "the rest"]},
        {"json": _FORM},
        {"json": _ANY_FORM, "disable_any_whitespace": True},
        {"json_object": True},
        {"grammar": 'start: "it" (" waits" | " fits")+ "."'},
    ),
    "kv_budget": [
        *[None] * 16,
        {"mode": "sinks", "tokens": 64},
        {"mode": "bounded", "tokens": 64},
        {"mode": "bounded", "tokens": 64, "dense_prompt": False},
        {"mode": "sparse_read", "tokens": 64},
    ],
}
CONTEXT: dict[str, list[Any]] = {
    "priority": [0, 0, 1, -1],
    "cache_salt": mostly("", "a"),
    "tenant": ["", "", "", "ada", "ben"],
    "cache_group": mostly(None, "both"),
    "pooling": [*[None] * 9, Pooling.LAST, Pooling.MEAN],
}
# Floors and caps of the tenants.
LIMITS: list[Any] = [{}, {"ada": (0.2, None)}, {"ada": (32, 0.9), "ben": (0.1, 0.6)}]
_TEXT = "the queue takes what fits and leaves the rest: it waits for its turn in the table, 1234 we'll see, THE END"


def draw(rng: random.Random, table: dict[str, list[Any]]) -> dict[str, Any]:
    return {name: value for name, values in table.items() if (value := rng.choice(values)) is not None}


def draw_options(rng: random.Random, folder: Path, redis: str | None, disk: str) -> list[dict[str, Any]]:
    """Draw the options of the engine without a cache, and of one or two others, which share a store."""
    fixed: dict[str, Any] = {"deterministic": True, "device": "cpu", "max_model_len": MAX_MODEL_LEN}
    fixed |= {"limits": {"max_grammar_ms": 60_000}}
    shared = fixed | draw(rng, SHARED)
    if shared.get("kv_cache_dtype") == TABLE:
        shared["kv_cache_dtype"] = str(folder / TABLE)
    options = shared | draw(rng, FREE)
    options["num_blocks"] = rng.choice([300, 400, 640, 1280]) // shared["block_size"] + 2
    if options["preemption_mode"] == "swap":
        options["swap_space"] = options["swap_space"] or "8MiB"
    if "async_scheduling" not in options and rng.random() < 0.6:
        drafts = options["speculative_config"] = draw(rng, DRAFTS)
        if drafts["method"] == "draft_model":
            drafts["model"] = str(folder)
    secret = {"kv_remote_secret": "a secret of the campaign"}
    lending = {"kv_demotion": "all", "kv_host_memory": "4MiB", **secret}
    stores: list[list[dict[str, Any]]] = [[{}], [{"kv_disk": disk, "kv_disk_size": rng.choice(["256KiB", "8MiB"])}] * 2]
    stores += [[{"kv_neighbours": f"127.0.0.1:{free_port()}", **lending} for _ in range(2)]]
    stores += [[{"kv_remote": redis, **secret}] * 2] if redis else []
    if options["tensor_parallel_size"] > 1 or rng.random() < 0.5:
        stores = [[{}]]
    elif rng.random() < 0.2:
        stores = [[{"enable_prefix_caching": False, "kv_host_memory": 0}]]
    alone = {"enable_prefix_caching": False, "swap_space": 0, "kv_cache_memory": "64MiB", "num_threads": 1}
    return [shared | alone, *(options | store for store in rng.choice(stores))]


@dataclass
class Asked:
    """A request, and its answer alone."""

    prompt: Sequence[int]
    params: SamplingParams
    context: dict[str, Any]
    alone: tuple[Any, ...] = ()

    def request(self, llm: LLM, **more: Any) -> Request:
        return llm.core.inputs.make(self.prompt, self.params, RequestContext(**self.context, **more))


def draw_params(rng: random.Random) -> SamplingParams:
    while True:
        try:
            return SamplingParams(**draw(rng, PARAMS), seed=rng.randrange(1000))
        except RequestError:  # some of them exclude each other
            continue


def draw_prompt(rng: random.Random, llm: LLM, starts: list[str], known: list[Asked]) -> list[int]:
    """Return a prompt that shares its beginning with others, or goes on after another's answer."""
    own = llm.tokenizer.encode(" ".join(["", *rng.choices(_TEXT.split(), k=rng.randint(1, 15))]))
    if known and rng.random() < 0.2:
        before = rng.choice(known)
        ids = [*before.prompt, *(before.alone[0][0][0] if before.alone[0] else ()), *own]
    else:
        ids = llm.tokenizer.encode(rng.choice(starts)) + own
    if rng.random() < 0.3:  # at the end of a block, and near it
        ids = ids[: max(1, rng.randint(0, len(ids) // 16) * 16 + rng.choice([-1, 0, 0, 1]))]
    elif rng.random() < 0.06:
        ids = (ids * MAX_MODEL_LEN)[: MAX_MODEL_LEN - rng.choice([1, 2, 17])]
    return ids[: MAX_MODEL_LEN - 1]


def answer(output: RequestOutput) -> tuple[Any, ...]:
    """Return all of an output that may not differ."""
    completions = [
        (each.token_ids, each.text, each.finish_reason, each.stop_reason, each.logprobs, each.cumulative_logprob)
        for each in output.outputs
    ]
    return completions, output.prompt_logprobs, output.error, output.embedding


def ask_alone(rng: random.Random, llm: LLM, totals: Counter[str]) -> list[Asked]:
    """Draw requests, and answer each by itself."""
    starts = [" ".join(rng.choices(_TEXT.split(), k=rng.randint(10, 40))) for _ in range(3)]
    known: list[Asked] = []
    for _ in range(NUM_REQUESTS):
        asked = Asked(draw_prompt(rng, llm, starts, known), draw_params(rng), draw(rng, CONTEXT))
        if asked.params.max_tokens is None:  # to the end of the context; an engine would also consider its cache
            asked.params = asked.params.with_max_tokens(MAX_MODEL_LEN - len(asked.prompt))
        try:
            request = asked.request(llm)
        except RequestError as refusal:
            totals[f"refused for {refusal.param}"] += 1
            continue
        asked.alone = answer(llm._run([(request, None)], use_tqdm=False)[0])
        known.append(asked)
    return known


def answer_disturbed(llm: LLM, requests: list[Request], rng: random.Random) -> tuple[list[RequestOutput], int]:
    """Return the outputs so far, and the number of steps that raised."""
    core, outputs, num_faults = llm.core, dict[str, RequestOutput](), 0
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
                outputs[aborted], so_far.finished = so_far, False
        if rng.random() < 0.02:
            llm.reset_prefix_cache()
        if not arriving and rng.random() < 0.02:  # afterwards, one that arrives might be refused
            core.set_kv_limits(core.scheduler.resolve_limits(rng.choice(LIMITS)))
        with ExitStack() as fault:
            # A request alone in a step that raises twice is ended.
            if rng.random() < 0.02 and core.has_work and core._recovery.isolation.is_calm:
                fault.enter_context(injected(core, rng.choice(list(PLACES)), times(1)))
                num_faults += 1
            for output in core.step():
                outputs[output.request_id] = output
    for pin in llm.pins():
        llm.unpin(pin.pin_id)
    return [outputs[request.request_id] for request in requests], num_faults


async def answer_streamed(llm: LLM, asked: list[Asked], contexts: list[RequestContext], rng: random.Random) -> Any:
    """Return each stream's joined outputs; ends the engine."""
    engine = AsyncEngine(llm.core, "tiny", idle_audit_seconds=0.01)
    await engine.start()

    async def stream(each: Asked, context: RequestContext, delay: float, leaves_at: int | None) -> RequestOutput:
        await asyncio.sleep(delay)
        pieces: list[RequestOutput] = []
        outputs = engine.generate(each.prompt, each.params, context)
        async for piece in outputs:
            pieces.append(piece)
            if len(pieces) == leaves_at:
                break
        await outputs.aclose()  # type: ignore[attr-defined]
        return joined(pieces)

    manners = [(rng.random() * 0.1, rng.choice([None, None, None, rng.randint(1, 9)])) for _ in asked]
    streams = (stream(each, context, *how) for each, context, how in zip(asked, contexts, manners, strict=True))
    found = await asyncio.gather(*streams)
    await engine.shutdown(60.0)
    await asyncio.sleep(0)
    return found


def joined(pieces: list[RequestOutput]) -> RequestOutput:
    whole, completions = pieces[0], dict[int, CompletionOutput]()
    for piece in pieces:
        for new in piece.outputs:
            if (known := completions.setdefault(new.index, new)) is not new:
                known.text, known.token_ids = known.text + new.text, known.token_ids + new.token_ids
                known.logprobs = None if new.logprobs is None else [*(known.logprobs or ()), *new.logprobs]
                known.cumulative_logprob = new.cumulative_logprob
                known.finish_reason, known.stop_reason = new.finish_reason, new.stop_reason
        whole.finished, whole.error, whole.embedding = piece.finished, piece.error, piece.embedding
    whole.outputs = [completions[index] for index in sorted(completions)]
    return whole


def is_wrong(output: RequestOutput, asked: Asked) -> bool:
    """Compare an output with that of the request alone; of an unfinished one, what has come so far."""
    cached = output.num_cached_tokens
    if not 0 <= cached < len(asked.prompt) or sum(output.cached_by_tier.values()) != cached:
        return True
    if output.finished:
        return answer(output) != asked.alone
    whole = dict(enumerate(asked.alone[0]))
    return not asked.params.chooses and any(
        each.token_ids != whole[each.index][0][: len(each.token_ids)]
        or (each.finish_reason is not FinishReason.ABORT and not whole[each.index][1].startswith(each.text))
        for each in output.outputs
    )


def play_round(folder: Path, rng: random.Random, totals: Counter[str], redis: str | None = None) -> list[str]:
    """Play one round; returns what was wrong."""
    with tempfile.TemporaryDirectory() as disk, ExitStack() as engines:
        plain, *several = draw_options(rng, folder, redis, disk)
        with LLM(str(folder), **plain) as llm:
            known = ask_alone(rng, llm, totals)
        wrong = [f"{each}: failed alone" for each in known if each.alone[2] is not None]
        hint: dict[str, Any] = {}
        for options in several:
            llm = engines.enter_context(LLM(str(folder), **options))
            wrong += [f"{each}; options {options}" for each in play_engine(llm, known, hint, rng, totals)]
            if "kv_neighbours" in options:  # the next one asks it
                hint = {"kv_hint": options["kv_neighbours"]}
            else:
                llm.close()
    return wrong


def play_engine(
    llm: LLM, known: list[Asked], hint: dict[str, Any], rng: random.Random, totals: Counter[str]
) -> list[str]:
    core, wrong = llm.core, list[str]()
    limits = core.scheduler.resolve_limits(rng.choice(LIMITS))
    core.set_kv_limits(limits)
    asked: list[Asked] = []
    for each in known:
        try:
            each.request(llm)
            asked.append(each)
        except RequestError as refusal:
            if not isinstance(refusal, CapacityError) and "kv_budget" not in str(refusal.param):
                wrong.append(f"{each}: refused: {refusal}")
            totals[f"refused for {refusal.param}"] += 1

    def more(each: Asked) -> dict[str, Any]:
        """Neither a prediction, right or wrong, nor a neighbour may change anything."""
        expected = list(each.alone[0][0][0]) if each.alone[0] else []
        if not expected or rng.random() < 0.7:
            return hint
        expected[rng.randrange(len(expected))] = rng.choice(expected)
        return {**hint, "predicted_ids": tuple(expected)}

    outputs = {"at once": llm._run([(each.request(llm, **more(each)), None) for each in asked], use_tqdm=False)}
    assert_idle(core)
    if core.stats.num_failed_steps:
        wrong.append(f"{core.stats.num_failed_steps} steps failed")
    wrong += wrong_counts(core.stats, outputs["at once"], asked)
    outputs["disturbed"], num_faults = answer_disturbed(llm, [each.request(llm, **more(each)) for each in asked], rng)
    assert_idle(core)
    core.set_kv_limits(limits)
    totals["steps that raised"] += num_faults
    if core.config.kv_neighbours is None or hint:  # the next engine asks this one for blocks
        contexts = [RequestContext(**each.context, **more(each)) for each in asked]
        outputs["streamed"] = asyncio.run(answer_streamed(llm, asked, contexts, rng))
        assert_idle(core)
    count, ended = len(outputs) * len(asked), sum(core.stats.finished.values())
    if ended != count or core.stats.waiting.total.requests:
        wrong.append(f"{count} requests, but {ended} have ended and {core.stats.waiting.total} wait")
    for how, found in outputs.items():
        for each, output in zip(asked, found, strict=True):
            totals["answers"] += 1
            if is_wrong(output, each):
                wrong.append(f"{how}, {each}: {answer(output)}, {output.cached_by_tier}")
    return wrong


def wrong_counts(stats: EngineStats, outputs: list[RequestOutput], asked: list[Asked]) -> list[str]:
    """Return what an engine's counters say otherwise than all its outputs."""
    num_prompt_tokens = sum(len(each.prompt) for each in asked)
    expected = {
        "prompt_tokens": num_prompt_tokens,
        "prefix_cache_queries": num_prompt_tokens,
        "prefix_cache_hits": sum(output.num_cached_tokens for output in outputs),
    }
    if not any(each.params.chooses or "pooling" in each.context for each in asked):
        expected["generation_tokens"] = sum(len(each.token_ids) for output in outputs for each in output.outputs)
    counted = {name: getattr(stats, name) for name in expected}
    return [] if counted == expected else [f"counted {counted} instead of {expected}"]


def write_model(folder: Path, family: str) -> None:
    """Write a model with scales for an fp8 cache, and a table of codecs."""
    sizes = FAMILIES[family][0] | {"hidden_size": 128}
    if family == "Helium":  # its output projection is square in transformers
        sizes["head_dim"] = 32
    model = write_hf_model(folder, family, tokenizer=True, **sizes)
    (folder / TABLE).write_text(_TABLE)
    source, config = resolve_model(str(folder)), model.config
    if "kv_lora_rank" not in FAMILIES[family][0]:  # latents have no heads
        heads = {side: torch.linspace(0.02, 0.05, config.num_key_value_heads) for side in "kv"}
        scales = dict.fromkeys(range(config.num_hidden_layers), heads)
        write_scales(default_scales_path(source, "fp8_e4m3"), source, "fp8_e4m3", scales, Origin("mse", "none", 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first round; each later one adds 1")
    parser.add_argument("--rounds", type=int, default=sys.maxsize, help="the most; 1 plays one seed again")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("octavo").setLevel(logging.CRITICAL)  # each step that raises is logged with its traceback
    totals: Counter[str] = Counter()
    ends, seed = time.monotonic() + args.seconds, args.seed
    with tempfile.TemporaryDirectory() as root, ExitStack() as servers:
        redis = servers.enter_context(redis_server()).url if PROGRAM else None
        while time.monotonic() < ends and seed < args.seed + args.rounds:
            rng = random.Random(seed)
            family = rng.choice(list(FAMILIES))
            if not Path(root, family).exists():
                write_model(Path(root, family), family)
            try:
                wrong = play_round(Path(root, family), rng, totals, redis)
                totals["rounds"] += 1
            except ConfigError as refusal:  # some combinations are not allowed
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
