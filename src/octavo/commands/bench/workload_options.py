"""The workload options of the benchmarks, and the requests made from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from octavo.errors import ConfigError
from octavo.option import Options, option
from octavo.workloads import traces, workload
from octavo.workloads.workload import END_TOKEN_ID, LENGTH_FORMS, NAMED_WORKLOADS, BenchRequest, Lengths

RANDOM = "random"
_INPUT_LEN, _OUTPUT_LEN, _COUNT = "64", "128", 64

_workload = partial(option, group="workload options")
_lengths = partial(_workload, None, metavar="LENGTHS")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions(Options):
    """The requests of a benchmark."""

    workload: str | None = _workload(None, f"{NAMED_WORKLOADS}, or {RANDOM} (default: uniform64)", metavar="NAME")
    trace: str | None = _workload(
        None,
        "a trace (Mooncake JSONL, Azure CSV, VTC CSV) or a workload as JSON, instead; its format is read from its "
        "content",
        metavar="FILE",
    )
    num_prompts: int | None = _workload(None, f"number of requests (default for {RANDOM}: {_COUNT})", least=1)
    input_len: str | None = _lengths(f"prompt tokens of {RANDOM}: {LENGTH_FORMS} (default: {_INPUT_LEN})")
    output_len: str | None = _lengths(f"output tokens of {RANDOM}: {LENGTH_FORMS} (default: {_OUTPUT_LEN})")
    trace_scale_lengths: float = _workload(1.0, "factor on all lengths of a trace", above=0)
    workload_seed: int = _workload(0, "seed of lengths, tokens and arrivals")
    token_id_end: int = _workload(
        END_TOKEN_ID, "prompt token ids are below this: lower it for a small vocabulary", least=1
    )

    @property
    def name(self) -> str:
        return self.trace or self.workload or "uniform64"

    def _check_together(self) -> None:
        if self.trace is not None and self.workload is not None:
            raise ConfigError("give --workload or --trace, not both")
        for flag, given in (("--input-len", self.input_len), ("--output-len", self.output_len)):
            if given is not None and self.name != RANDOM:
                raise ConfigError(f"{flag} needs --workload {RANDOM}: {self.name} has its own lengths")


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


def load_requests(asked: WorkloadOptions) -> Workload:
    """Make the requests that the options ask for, not yet truncated to a model's limit.

    Raises:
        ConfigError: the workload is unknown, the trace cannot be read, or the lengths are invalid.
    """
    requests = _requests(asked)
    if asked.num_prompts is not None and asked.num_prompts > len(requests):
        raise ConfigError(f"--num-prompts {asked.num_prompts}, but {asked.name} has {len(requests)} requests")
    return Workload(asked.name, list(requests[: asked.num_prompts]))


def clip_to_model(work: Workload, max_model_len: int | None, vocab_size: int | None = None) -> Workload:
    """Return the workload, truncated to the model's maximum length and with ids of its vocabulary."""
    requests, num_clipped = workload.clip(work.requests, max_model_len=max_model_len, vocab_size=vocab_size)
    return Workload(work.name, requests, num_clipped)


def _requests(asked: WorkloadOptions) -> Sequence[BenchRequest]:
    seed, end = asked.workload_seed, asked.token_id_end
    if asked.trace is not None:
        trace = traces.read_trace(asked.trace)[: asked.num_prompts]
        return traces.as_requests(trace, scale_lengths=asked.trace_scale_lengths, seed=seed, end=end)
    if asked.name == RANDOM:
        lengths = Lengths.parse(asked.input_len or _INPUT_LEN), Lengths.parse(asked.output_len or _OUTPUT_LEN)
        return workload.random_workload(asked.num_prompts or _COUNT, *lengths, seed, end)
    return workload.named_workload(asked.name, seed, end)
