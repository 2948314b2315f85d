"""Compare Octavo with its peers on the same work: alternating engines, several rounds, medians, a table and a plot.

    benchmarks/peers/setup.sh openvino; benchmarks/peers/setup.sh llamacpp     # once; also: vllm, transformers
    .venv/bin/python -m benchmarks.compare --workload single uniform64 mixed64 --engine octavo openvino llamacpp

Each engine runs in its own process and environment: two requests to warm up, then the whole workload. Greedy, end-of-
sequence ignored, prefix caching off, two threads, 2 GiB of KV cache, at most 64 sequences. An engine's name may be
followed by the weights to use, as in `octavo:gguf`, for Octavo by a number of ranks that share the cores, as in
`octavo:Q4_0+2`, and by a maximum of rounds, as in `vllm@1`, if its start takes minutes. OpenVINO, vLLM and transformers
run SmolLM2 only; Octavo and llama.cpp also what random_llama.py wrote, with `--model`.
Rates are output tokens per second, or prompt tokens per second if the workload is a prefill. Nothing else should be
running.

The work of `benchmarks.speculation` has names such as `speculation-edit`. A `~` and a name turn on an engine's own
speculation: `octavo:Q4_1~suffix`, `llamacpp:Q4_1~ngram-simple` (a --spec-type), `openvino~prompt-lookup`. With nothing
after the `~`, the engine is warmed up in the same way, without speculation.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import this_machine
from benchmarks.speculation import WORK
from octavo.config import EngineConfig
from octavo.text.tokenizer_loading import load_tokenizer
from octavo.workloads.workload import named_workload

HERE = Path(__file__).parent
PEERS_HOME = Path(os.environ.get("PEERS_HOME", Path.home() / ".cache" / "peers"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", default=["single", "uniform64", "mixed64", "prefill2048"])
    parser.add_argument("--engine", nargs="+", default=["octavo", "openvino", "llamacpp"])
    parser.add_argument("--model", default="smollm2", help="MODEL of the files MODEL-WEIGHTS.gguf in PEERS_HOME")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=int, default=600, help="seconds for one run")
    parser.add_argument("--output", type=this_machine.output_file, help="write OUTPUT.json, OUTPUT.md and OUTPUT.png")
    args = parser.parse_args()
    if args.output and importlib.util.find_spec("matplotlib") is None:
        parser.error("--output draws a plot, which needs matplotlib: pip install 'octavo[plot]'")
    os.environ["MODEL"] = args.model  # peers/common.py reads it
    results: dict[str, dict[str, list[float]]] = {}
    for workload in args.workload:
        results[workload] = measure(workload, args.engine, args.rounds, args.timeout)
        print(table({workload: results[workload]}), flush=True)
    if args.output:
        write(results, args.output)


def measure(workload: str, engines: list[str], rounds: int, timeout: int) -> dict[str, list[float]]:
    """Tokens per second of each round, by engine."""
    rates: dict[str, list[float]] = {}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(requests_of(workload), file)
        file.flush()
        counted = "prompt_tokens" if workload.startswith("prefill") else "output_tokens"
        for index in range(rounds):
            for engine in engines:
                name, _, most = engine.partition("@")
                if index >= int(most or rounds):
                    continue
                if (result := run(name, file.name, timeout)) is not None:
                    label = f"{result['engine']} {result['weights']}"
                    rates.setdefault(label, []).append(result[counted] / result["seconds"])
    return rates


def requests_of(workload: str) -> list[dict[str, Any]]:
    """Return the requests of a workload; those of `speculation-WORK` are of `benchmarks.speculation`, one each."""
    kind, _, work = workload.partition("-")
    if kind == "speculation":
        tokenizer = load_tokenizer(EngineConfig())
        assert tokenizer is not None
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": WORK[work][0]}])
        return [{"prompt_token_ids": tokenizer.encode(prompt, add_special_tokens=False), "max_tokens": 128}]
    return [{"prompt_token_ids": r.prompt_token_ids, "max_tokens": r.max_tokens} for r in named_workload(workload)]


def run(engine: str, workload_file: str, timeout: int) -> dict[str, Any] | None:
    """One run's JSON line; None, with a message on standard error, if the engine is missing or fails."""
    engine, is_speculating, speculation = engine.partition("~")
    name, _, weights = engine.partition(":")
    python = Path(sys.executable) if name == "octavo" else PEERS_HOME / name / "bin" / "python"
    if not python.exists():
        print(f"{name} is not installed: run benchmarks/peers/setup.sh {name}", file=sys.stderr)
        return None
    environment = {**os.environ, "PEERS_HOME": str(PEERS_HOME), **({"WEIGHTS": weights} if weights else {})}
    if is_speculating:
        environment["SPECULATION"] = speculation
    command = [str(python), str(HERE / "peers" / f"run_{name}.py"), workload_file]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as peer:
        try:
            out, err = peer.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(peer.pid, signal.SIGKILL)  # a server that it started would answer the next run
            out, err = "", f"no result within {timeout} s"
    if peer.returncode:
        print(f"{engine}: {err[-2000:]}", file=sys.stderr)
        return None
    result: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return result


def table(results: dict[str, dict[str, list[float]]]) -> str:
    """A Markdown table: median tokens per second (min to max), rounds, and octavo's best divided by each."""
    lines = ["| workload | engine | tok/s | min to max | rounds | octavo's best / this |", "|---|---|---|---|---|---|"]
    for workload, rates in results.items():
        ours = max((statistics.median(v) for k, v in rates.items() if k.startswith("octavo")), default=None)
        for engine, values in rates.items():
            median = statistics.median(values)
            ratio = f"{ours / median:.2f}" if ours else "–"
            spread = f"{min(values):.0f} to {max(values):.0f}"
            lines.append(f"| {workload} | {engine} | {median:.0f} | {spread} | {len(values)} | {ratio} |")
    return "\n".join(lines)


def write(results: dict[str, dict[str, list[float]]], output: Path) -> None:
    machine = f"{this_machine.name()}, {this_machine.memory_gib():.0f} GiB, Python {platform.python_version()}"
    output.with_suffix(".json").write_text(json.dumps({"machine": machine, "tokens_per_s": results}, indent=1) + "\n")
    output.with_suffix(".md").write_text(f"{machine}\n\n{table(results)}\n")
    plot(results, machine, output.with_suffix(".png"))


def plot(results: dict[str, dict[str, list[float]]], machine: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(results), figsize=(4.2 * len(results), 3.6), squeeze=False)
    for axis, (workload, rates) in zip(axes[0], results.items(), strict=True):
        names = sorted(rates, key=lambda name: statistics.median(rates[name]))
        medians = [statistics.median(rates[name]) for name in names]
        colours = ["#c2410c" if name.startswith("octavo") else "#94a3b8" for name in names]
        bars = axis.barh(names, medians, color=colours)
        axis.bar_label(bars, fmt="%.0f", padding=3, fontsize=8)
        axis.set_title(workload, fontsize=10)
        axis.set_xlabel(f"{'prompt' if workload.startswith('prefill') else 'output'} tokens per second", fontsize=8)
        axis.margins(x=0.15)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(machine, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
