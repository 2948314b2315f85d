"""`octavo bench latency`: the latency of one batch, its prefill and each decode step."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial

from octavo.commands.common_options import add_json_option
from octavo.commands.options import add_options, given_options
from octavo.config import EngineConfig
from octavo.option import Options, option
from octavo.workloads import report, workload
from octavo.workloads.workload import END_TOKEN_ID, LENGTH_FORMS, Lengths

DESCRIPTION = "Measure one batch: its prefill, each decode step, and how fast weights are read."


_batch = partial(option, group="batch options")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyOptions(Options):
    """The options of `octavo bench latency`."""

    batch_size: int = _batch(8, "number of prompts in the batch", least=1)
    input_len: str = _batch("32", f"prompt tokens: {LENGTH_FORMS}", metavar="LENGTHS")
    output_len: str = _batch("128", f"output tokens: {LENGTH_FORMS}", metavar="LENGTHS")
    num_iters: int = _batch(5, "timed passes", least=1)
    num_iters_warmup: int = _batch(1, "untimed warm-up passes", least=0)
    workload_seed: int = _batch(0, "seed of lengths and tokens")
    token_id_end: int = _batch(END_TOKEN_ID, "token ids are below this", least=1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_option(parser)
    add_options(parser, LatencyOptions)
    add_options(parser, EngineConfig, positional_model=True)


def run(args: argparse.Namespace) -> int:
    asked = LatencyOptions(**given_options(args, LatencyOptions))
    lengths = Lengths.parse(asked.input_len), Lengths.parse(asked.output_len)
    requests = workload.random_workload(asked.batch_size, *lengths, asked.workload_seed, asked.token_id_end)
    engine = given_options(args, EngineConfig)

    from octavo import LLM, __version__
    from octavo.workloads import latency

    with LLM(**engine) as llm:
        requests, num_clipped = workload.clip(
            requests, max_model_len=llm.info.max_model_len, vocab_size=llm.info.vocab_size
        )
        runs = latency.measure(llm, requests, asked.num_iters, asked.num_iters_warmup)
        model = llm.config.model
        prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        rates = latency.rates(runs, prompt_tokens, len(requests), llm.info.weight_bytes)
    result = {
        "bench": "latency",
        "version": __version__,
        "model": model,
        "options": engine,
        "batch_size": len(requests),
        "prompt_tokens": prompt_tokens,
        "output_tokens": sum(request.max_tokens for request in requests),
        "clipped": num_clipped,
        "runs": len(runs),
        **latency.summary(runs),
        **rates,
        "machine": report.machine(),
    }
    print(report.as_json_line(result) if args.json else report.as_table(result))
    return 0
