"""Running streams beside one long prompt, with and without `--itl-slo-ms`.

    python -m benchmarks.itl_slo [--slo off 50 100] [--out benchmarks/results]

Eight streams decode; then a prompt of 8,000 tokens arrives. From then until its first token, the time between two
tokens of each stream is measured as the thread that steps the engine sees it: scheduling, the model, sampling and
detokenising. The cost for the long prompt is its time to the first token, compared with the time that it takes alone.
The model that sizes chunks starts empty in each engine: its first steps count like all others.

With `--out`, the results replace the same rows of an earlier run, so that each SLO can be measured by a separate
command.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from dataclasses import asdict, dataclass

from benchmarks import this_machine
from octavo import LLM, SamplingParams
from octavo.engine.outputs import OutputKind
from octavo.request import Request

WARM_UP_STEPS = 20


@dataclass(frozen=True)
class Result:
    """Milliseconds between two tokens of a stream while the prompt was computed, and seconds to its first token."""

    slo_ms: float | None
    tokens: int
    median_ms: float
    p99_ms: float
    longest_ms: float
    within_slo: float | None
    first_token_s: float
    alone_s: float


def add(llm: LLM, tokens: int, max_tokens: int, rng: random.Random) -> Request:
    prompt = [rng.randrange(100, 40_000) for _ in range(tokens)]
    request = llm.core.make_request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0))
    llm.core.add(request, kind=OutputKind.DELTA)
    return request


def first_token(llm: LLM, request: Request) -> tuple[float, list[float]]:
    """Step until a request has its first token; returns the seconds until then, and those of each step."""
    began = last = time.perf_counter()
    steps = []
    while not request.sequences[0].num_output_tokens:
        llm.core.step()
        now = time.perf_counter()
        steps.append(now - last)
        last = now
    return last - began, steps


def measure(arguments: argparse.Namespace, slo_ms: float | None) -> Result:
    options = {} if slo_ms is None else {"itl_slo_ms": slo_ms}
    llm = LLM(arguments.model, enable_prefix_caching=False, max_num_seqs=16, kv_cache_memory="2GiB", **options)
    rng = random.Random(0)
    gaps, first_tokens = [], []
    for _ in range(arguments.runs):
        streams = [add(llm, 50, 4000, rng) for _ in range(arguments.streams)]
        for _ in range(WARM_UP_STEPS):
            llm.core.step()
        seconds, steps = first_token(llm, add(llm, arguments.prompt_tokens, 1, rng))
        first_tokens.append(seconds)
        # Every stream gets a token in every step.
        gaps += [step for step in steps for _ in streams]
        for request in streams:
            llm.core.abort(request.request_id)
    alone = [first_token(llm, add(llm, arguments.prompt_tokens, 1, rng))[0] for _ in range(arguments.runs)]
    gaps.sort()
    result = Result(
        slo_ms,
        len(gaps),
        1e3 * gaps[len(gaps) // 2],
        1e3 * gaps[int(0.99 * len(gaps))],
        1e3 * gaps[-1],
        None if slo_ms is None else sum(gap <= slo_ms / 1e3 for gap in gaps) / len(gaps),
        min(first_tokens),
        min(alone),
    )
    print(json.dumps(asdict(result)), flush=True)
    del llm
    gc.collect()
    return result


def table(results: list[Result], arguments: argparse.Namespace) -> str:
    lines = [
        "# Streams beside a long prompt",
        "",
        f"`python -m benchmarks.itl_slo`, {arguments.model}, {this_machine.name()}. "
        f"{arguments.streams} streams decode when a prompt of {arguments.prompt_tokens:,} tokens arrives, "
        f"{_times(arguments.runs)}. Milliseconds between two tokens of a stream until that prompt has its first token; "
        "of the prompt itself the best run.",
        "",
        "| `--itl-slo-ms` | tokens | median | 99th percentile | longest | in the SLO | prompt's first token | alone |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in results:
        slo = "off" if r.slo_ms is None else f"{r.slo_ms:g}"
        within = "" if r.within_slo is None else f"{r.within_slo:.2%}"
        lines.append(
            f"| {slo} | {r.tokens:,} | {r.median_ms:.0f} ms | {r.p99_ms:.0f} ms | {r.longest_ms:.0f} ms | {within} "
            f"| {r.first_token_s:.1f} s | {r.alone_s:.1f} s |"
        )
    return "\n".join(lines) + "\n"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def milliseconds(text: str) -> float | None:
    return None if text == "off" else float(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--slo", type=milliseconds, nargs="+", default=[None, 50.0, 100.0], help="or 'off'")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--out", type=this_machine.output_folder, help="folder for itl_slo.md")
    arguments = parser.parse_args()
    results = {slo: measure(arguments, slo) for slo in arguments.slo}
    if arguments.out and (file := arguments.out / "itl_slo.json").exists():
        results = {row["slo_ms"]: Result(**row) for row in json.loads(file.read_text())} | results
    rows = sorted(results.values(), key=lambda result: result.slo_ms or 0)
    text = table(rows, arguments)
    print(text)
    if arguments.out:
        (arguments.out / "itl_slo.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        (arguments.out / "itl_slo.md").write_text(text)
    print(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
