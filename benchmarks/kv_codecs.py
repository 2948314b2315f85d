"""Speed of every KV-cache codec against bfloat16: `python -m benchmarks.kv_codecs [--only decode|prefill|engine]`.

Three parts, under five minutes together on two cores. Codecs alternate, so that a busy minute affects all alike:

    decode     attention alone, 64 sequences of 4,000 tokens from DRAM, one new token each
    prefill    attention alone, the last 2,048 tokens of a prompt
    engine     whole requests of SmolLM2-135M by length of the prompt, their prompts and their decodes

Ratios are speeds relative to bfloat16: the median over the rounds of the ratio within a round. Prints tables, and one
JSON object on the last line.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from octavo import LLM, kernels
from octavo.attention.native import NativeAttention
from octavo.planner.machine import default_num_threads
from octavo.workloads.attention import LARGE, SMALL, AttentionCase, HeadCounts
from octavo.workloads.machine_limits import DRAM_BYTES, read_bandwidth
from octavo.workloads.memory_block_sizes import RealEngine
from octavo.workloads.report import columns
from octavo.workloads.timing import Timing, interleaved, paired_ratio, threads
from octavo.workloads.workload import BenchRequest

BASELINE = "bfloat16"
CODECS = ("fp8_e4m3", "fp8_e5m2", "int8", "k8v4", "int4")
TARGETS = {"fp8_e4m3": 1.6, "fp8_e5m2": 1.6, "int8": 1.6, "int4": 2.4}
PARTS = ("decode", "prefill", "engine")
# Requests of the engine part: how many, prompt tokens, output tokens.
WORKLOADS = {"128": (24, 128, 64), "1k": (16, 1000, 48), "4k": (6, 4000, 48), "8k": (3, 8000, 48)}
RECENT = "int4+recent"  # with the first block and four recent ones in int8, in the engine part

Row = dict[str, object]


def attention(
    kind: str, codecs: Sequence[str], heads: HeadCounts, seqs: int, context: int, seconds: float, exact: bool
) -> list[Row]:
    new_tokens = 1 if kind == "decode" else min(2048, context)
    cases = {
        codec: AttentionCase(
            "decode" if kind == "decode" else "prefill", "native", heads, codec, seqs, context, new_tokens
        )
        for codec in codecs
    }
    backend = NativeAttention(exact=exact)
    calls = {codec: case.calls(16, case.num_layers(DRAM_BYTES), backend) for codec, case in cases.items()}
    timings = interleaved(calls, seconds=seconds)
    return [attention_row(cases[codec], timings[codec], timings[BASELINE]) for codec in codecs]


def attention_row(case: AttentionCase, timing: Timing, bfloat16: Timing) -> Row:
    return {
        "what": f"{case.kind} {case.seqs} x {case.context}, {case.heads.query}/{case.heads.kv} x {case.heads.dim}",
        "cache": case.dtype,
        "ms": round(timing.median * 1e3, 2),
        "best ms": round(timing.best * 1e3, 2),
        "GB/s": round(case.kv_bytes / timing.median / 1e9, 1) if case.new_tokens == 1 else "-",
        "of bfloat16": round(1 / paired_ratio(timing, bfloat16), 2),
        "target": TARGETS.get(case.dtype, "-") if case.new_tokens == 1 and case.heads == SMALL else "-",
    }


def engine(
    model: str, codecs: Sequence[str], workload_names: Sequence[str], rounds: int, deterministic: bool
) -> list[Row]:
    chance = random.Random(0)
    workloads = {
        name: [BenchRequest([chance.randrange(1000, 40000) for _ in range(prompt)], output) for _ in range(count)]
        for name, (count, prompt, output) in WORKLOADS.items()
        if name in workload_names
    }
    with tempfile.TemporaryDirectory() as folder:
        engines = {codec: _engine(model, codec, deterministic, folder) for codec in codecs}
    rows: list[Row] = []
    for name, requests in workloads.items():
        taken: dict[str, list[tuple[float, float]]] = {codec: [] for codec in codecs}
        for codec in codecs:
            run(engines[codec], [BenchRequest(requests[0].prompt_token_ids[:64], 4)])
        for number in range(rounds):
            for codec in codecs if number % 2 == 0 else reversed(codecs):
                taken[codec].append(run(engines[codec], requests))
        rows += [engine_row(name, codec, taken[codec], taken[BASELINE]) for codec in codecs]
    return rows


def _engine(model: str, codec: str, deterministic: bool, folder: str) -> RealEngine:
    dtype = "auto" if codec == BASELINE else codec
    if codec == RECENT:
        dtype = str(Path(folder) / "recent.toml")
        Path(dtype).write_text('keys = "int4"\nvalues = "int4"\nsink_blocks = 1\nrecent_blocks = 4\n')
    return RealEngine(
        LLM(
            model,
            kv_cache_dtype=dtype,
            kv_cache_memory="512MiB",
            max_num_seqs=64,
            enable_prefix_caching=False,
            deterministic=deterministic,
        )
    )


def run(engine: RealEngine, requests: Sequence[BenchRequest]) -> tuple[float, float]:
    """Compute requests that come at once; returns the seconds until all have their first token, and those after."""
    queued = [engine.add(request, 1) for request in requests]
    prompts = decodes = 0.0
    while engine.scheduler.has_work:
        started = all(seq.num_output_tokens for request in queued for seq in request.sequences)
        took = engine.step()
        if started:
            decodes += took
        else:
            prompts += took
    return prompts, decodes


def engine_row(
    name: str, codec: str, taken: Sequence[tuple[float, float]], plain: Sequence[tuple[float, float]]
) -> Row:
    count, prompt, output = WORKLOADS[name]

    def ratio(seconds: Callable[[tuple[float, float]], float]) -> float:
        pairs = zip(plain, taken, strict=True)
        return round(statistics.median(seconds(theirs) / seconds(ours) for theirs, ours in pairs), 3)

    return {
        "what": f"engine: {count} x {prompt} + {output}",
        "cache": codec,
        "s": round(statistics.median(map(sum, taken)), 2),
        "of bfloat16": ratio(sum),
        "prompts": ratio(lambda pair: pair[0]),
        "decodes": ratio(lambda pair: pair[1]),
        "decode ms": round(statistics.median(decodes for _, decodes in taken) * 1e3 / output, 2),
    }


def show(rows: Sequence[Row]) -> None:
    for what in dict.fromkeys(row["what"] for row in rows):
        of_case = [row for row in rows if row["what"] == what]
        names = [name for name in of_case[0] if name != "what"]
        print(f"\n{what}")
        print("\n".join(columns(names, [tuple(row[name] for name in names) for row in of_case])), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, action="append", help="may be given twice (default: all parts)")
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=CODECS, help="beside bfloat16 (all)")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="of the engine part")
    parser.add_argument(
        "--recent", action="store_const", const=(RECENT,), default=(), help=f"also {RECENT} in the engine part"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="for each codec and case of attention (2)")
    parser.add_argument("--rounds", type=int, default=2, help="of the engine part (2)")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--deterministic", action="store_true", help="everything as under the engine's --deterministic")
    parser.add_argument("--wide", action="store_true", help="also attention with Llama 3.1 8B's heads")
    arguments = parser.parse_args()
    parts = arguments.only or PARTS
    codecs = (BASELINE, *arguments.codecs)
    count = default_num_threads()
    rows: list[Row] = []

    def add(new: list[Row]) -> None:
        show(new)
        rows.extend(new)

    with threads(count):
        read = read_bandwidth("read", DRAM_BYTES, count, seconds=1.0).value
        print(f"{kernels.isa()}, {count} threads, {read:.1f} GB/s read")
        for heads in (SMALL, LARGE) if arguments.wide else (SMALL,):
            if "decode" in parts:
                add(
                    attention(
                        "decode",
                        codecs,
                        heads,
                        64 if heads == SMALL else 8,
                        4000,
                        arguments.seconds,
                        arguments.deterministic,
                    )
                )
            if "prefill" in parts:
                for context in (512, 2048, 8192):
                    add(attention("prefill", codecs, heads, 1, context, arguments.seconds / 2, arguments.deterministic))
    if "engine" in parts:
        add(
            engine(
                arguments.model,
                (*codecs, *arguments.recent),
                arguments.workloads,
                arguments.rounds,
                arguments.deterministic,
            )
        )
    print(json.dumps({"bench": "kv_codecs", "isa": kernels.isa(), "threads": count, "read_gb_s": read, "rows": rows}))


if __name__ == "__main__":
    main()
