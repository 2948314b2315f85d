"""The options of `octavo bench memory`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from octavo.option import Options, option
from octavo.workloads.workload import NAMED_WORKLOADS

_bench = partial(option, group="comparison options")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions(Options):
    """What is compared, and with which requests."""

    simulate: bool = _bench(
        False,
        "compute nothing: real scheduler and cache, exact memory, times by --gb-s and --gflop-s; MODEL may be any that "
        "`octavo plan` knows",
    )
    block_sizes: Sequence[int | Literal["max"]] = _bench(
        (),
        "block sizes to compare; the kernels need multiples of 16 (default: 16,max; with --simulate: 1,2,4,…,256,max)",
        least=1,
        metavar="N|max,…",
    )
    codecs: str | None = _bench(
        None,
        "compare codecs of the KV cache, with the model's own type, instead of block sizes; all: all of them; nvfp4 is "
        "slow on a CPU, which has no kernel for it",
        metavar="NAME,…",
    )
    contiguous_seqs: int = _bench(
        8, "without --kv-cache-memory, the budget is what N sequences of max_model_len reserve", least=1
    )
    workload: str | None = _bench(
        None,
        f"{NAMED_WORKLOADS} (default: mixed64,sharegpt64; with --simulate 512 each; none with --trace)",
        metavar="NAME,…",
    )
    trace: Sequence[str] = _bench(
        (),
        "also use the lengths of a trace, scaled so that 99 of 100 requests fit max_model_len; may be repeated",
        metavar="FILE",
    )
    num_prompts: int | None = _bench(
        None, "number of requests from each trace (default: 64; with --simulate: 512)", least=1
    )
    runs: int = _bench(1, "report the median of N runs, with block sizes in turns", least=1)
    gb_s: float = _bench(20.0, "simulated memory bandwidth in GB/s", above=0)
    gflop_s: float = _bench(400.0, "simulated arithmetic in GFLOP/s", above=0)
    workload_seed: int = _bench(0, "seed of lengths and tokens")
    output: str | None = _bench(None, "write PATH.json, PATH.md and PATH.png (needs matplotlib)", metavar="PATH")
