"""`octavo bench latency`: the latency of one batch, its prefill and each decode step."""

from __future__ import annotations

import argparse

from octavo.commands.common_options import add_json_option, add_length_options, add_seed_option, positive
from octavo.commands.options import add_options, given_options
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.workloads import report, workload

DESCRIPTION = "Measure one batch: its prefill, each decode step, and how fast weights are read."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("batch options")
    group.add_argument("--batch-size", type=positive, default=8, metavar="N", help="number of prompts in the batch")
    add_length_options(group, input_len="32")
    group.add_argument("--num-iters", type=positive, default=5, metavar="N", help="timed passes")
    group.add_argument("--num-iters-warmup", type=int, default=1, metavar="N", help="untimed warm-up passes")
    add_seed_option(group)
    group.add_argument(
        "--token-id-end", type=positive, default=workload.END_TOKEN_ID, metavar="N", help="token ids are below this"
    )
    add_json_option(parser)
    add_options(parser, EngineConfig, positional_model=True)


def run(args: argparse.Namespace) -> int:
    if args.num_iters_warmup < 0:
        raise ConfigError(f"--num-iters-warmup must be at least 0, got {args.num_iters_warmup}")
    lengths = workload.Lengths.parse(args.input_len), workload.Lengths.parse(args.output_len)
    requests = workload.random_workload(args.batch_size, *lengths, args.workload_seed, args.token_id_end)
    engine = given_options(args, EngineConfig)

    from octavo import LLM, __version__
    from octavo.workloads import latency

    with LLM(**engine) as llm:
        requests, num_clipped = workload.clip(
            requests, max_model_len=llm.info.max_model_len, vocab_size=llm.info.vocab_size
        )
        runs = latency.measure(llm, requests, args.num_iters, args.num_iters_warmup)
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
