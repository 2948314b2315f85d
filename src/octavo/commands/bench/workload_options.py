"""The workload options of the benchmarks, and the requests made from them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.commands.common_options import INPUT_LEN, OUTPUT_LEN, add_length_options, add_seed_option, positive
from octavo.errors import ConfigError
from octavo.workloads import traces, workload
from octavo.workloads.workload import BenchRequest, Lengths

RANDOM = "random"


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a benchmark, their name in its report, and how many of them were truncated."""

    name: str
    requests: list[BenchRequest]
    num_clipped: int = 0

    @property
    def trace_arrivals(self) -> list[float] | None:
        """The trace's own arrival times; None if it has none."""
        times = [request.arrival_s for request in self.requests if request.arrival_s is not None]
        return times if len(times) == len(self.requests) else None


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload options")
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "--workload", default="uniform64", metavar="NAME", help=f"{workload.NAMED_WORKLOADS}, or {RANDOM}"
    )
    source.add_argument(
        "--trace",
        metavar="FILE",
        help="a trace (Mooncake JSONL, Azure CSV, VTC CSV) or a workload as JSON; its format is read from its content",
    )
    group.add_argument(
        "--num-prompts", type=positive, metavar="N", help=f"number of requests (default for {RANDOM}: 64)"
    )
    add_length_options(group, f" with --workload {RANDOM}", is_set=False)
    group.add_argument(
        "--trace-scale-lengths", type=float, default=1.0, metavar="X", help="factor on all lengths of a trace"
    )
    add_seed_option(group, "lengths, tokens and arrivals")
    group.add_argument(
        "--token-id-end",
        type=positive,
        default=workload.END_TOKEN_ID,
        metavar="N",
        help="prompt token ids are below this: lower it for a small vocabulary",
    )


def load_requests(args: argparse.Namespace) -> Workload:
    """Make the requests that the options ask for, not yet truncated to a model's limit.

    Raises:
        ConfigError: the workload is unknown, the trace cannot be read, or the lengths are invalid.
    """
    name = args.trace or args.workload
    requests = _requests(args)
    if args.num_prompts is not None and args.num_prompts > len(requests):
        raise ConfigError(f"--num-prompts {args.num_prompts}, but {name} has {len(requests)} requests")
    return Workload(name, list(requests[: args.num_prompts]))


def clip_to_model(work: Workload, max_model_len: int | None, vocab_size: int | None = None) -> Workload:
    """Return the workload, truncated to the model's maximum length and with ids of its vocabulary."""
    requests, num_clipped = workload.clip(work.requests, max_model_len=max_model_len, vocab_size=vocab_size)
    return Workload(work.name, requests, num_clipped)


def _requests(args: argparse.Namespace) -> Sequence[BenchRequest]:
    seed, end = args.workload_seed, args.token_id_end
    if args.trace or args.workload != RANDOM:
        for flag, given in (("--input-len", args.input_len), ("--output-len", args.output_len)):
            if given is not None:
                raise ConfigError(
                    f"{flag} needs --workload {RANDOM}: {args.trace or args.workload} has its own lengths"
                )
    if args.trace:
        trace = traces.read_trace(args.trace)
        scale = args.trace_scale_lengths
        return traces.as_requests(trace[: args.num_prompts], scale_lengths=scale, seed=seed, end=end)
    if args.workload == RANDOM:
        prompt_lens, output_lens = (
            Lengths.parse(args.input_len or INPUT_LEN),
            Lengths.parse(args.output_len or OUTPUT_LEN),
        )
        return workload.random_workload(args.num_prompts or 64, prompt_lens, output_lens, seed, end)
    return workload.named_workload(args.workload, seed, end)
