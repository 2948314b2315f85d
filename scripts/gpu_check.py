"""Check Octavo on a machine with an NVIDIA GPU: run the GPU tests, then measure the kernels and a decode.

    PYTHONPATH=src python scripts/gpu_check.py --json gpu.json

Needs torch, triton, transformers and pytest, but no compiled library and no network. Ends within eight minutes: what
there is no time for is listed as left out. Everything runs in separate processes, since after an error on the GPU
nothing works in the process that caused it, and a kernel may never end:

    test files        side by side; after a test that fails or hangs, the others continue in a new process
    parts             one after the other: limits, kernels, decodes; a part that fails is named

FILE is written after each test file and each row, and is complete JSON whenever this script is killed. With --interpret
everything runs on a CPU, in Triton's interpreter and with tiny shapes, which proves that the script works and says
nothing about speed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = [
    "tests/attention/test_triton.py",
    "tests/engine/test_device_path.py",
    "tests/models/test_triton_ops.py",
    "tests/sampling/test_triton_choice.py",
    "tests/storage/test_block_copy.py",
    "tests/runner/test_graphs.py",
]
BUDGET_S = 455.0
TESTS_S = 190.0
SILENT_S = 75.0  # for one test, or one row of a table, including the compilation of its kernels
AT_ONCE = 3  # test files
MODELS = ("Llama-3.1-8B", "Qwen3-0.6B", "SmolLM2-135M")  # the largest first, in case the time runs out
PARTS = {
    "limits": 45.0,
    "attention": 60.0,
    f"decode {MODELS[0]}": 90.0,
    "kernels": 90.0,
    **{f"decode {model}": 60.0 for model in MODELS[1:]},
    f"transformers {MODELS[0]}": 75.0,
    f"transformers-batching {MODELS[0]}": 90.0,
}
"""Parts of the benchmark, and the maximum seconds that each may take."""
ROW = "@row "  # begins a line in which the process of a part reports what it has found

Found = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--interpret", action="store_true", help="on a CPU, in Triton's interpreter, tiny shapes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything found to FILE, as it is found")
    parser.add_argument("--tests", nargs="*", default=TESTS, metavar="PATH", help="the tests to run; none: no tests")
    parser.add_argument("--no-benchmark", action="store_true", help="run the tests only")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # in a separate process: measure this part, given the limits
    parser.add_argument("--limits", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    started = time.perf_counter()
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    if args.part:
        for found in measure(args.part, args.limits, args.interpret):
            print(ROW + json.dumps(found), flush=True)
        return 0
    import torch

    if not args.interpret and not torch.cuda.is_available():
        print("torch finds no CUDA device here; --interpret runs the same on a CPU, slowly", file=sys.stderr)
        return 2
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no process outlives this one
    report = Report(args.json, started, {"machine": machine(), "interpreted": args.interpret, "left_out": []})
    print("  ".join(f"{key}: {value}" for key, value in report.found["machine"].items()), flush=True)
    if args.tests:
        tests = run_tests(args.tests, report, at_once=1 if args.interpret else AT_ONCE)
        print(f"tests: {json.dumps(tests, indent=1)}", flush=True)
    if not args.no_benchmark:
        benchmark(report, Clock(started + BUDGET_S), args.interpret)
    report.add({"is_complete": True})
    print(f"{report.found['seconds']} s; left out: {', '.join(report.found['left_out']) or 'nothing'}")
    if args.interpret:
        print("interpreted on a CPU: the numbers say nothing of a GPU")
    tests = report.found.get("tests", {})
    return 1 if tests.get("failed") or (args.tests and not tests.get("passed")) else 0


class Report:
    """What has been found so far, and the file that always holds it."""

    def __init__(self, file: Path | None, started: float, found: Found) -> None:
        self.found = found
        self._file = file
        self._started = started
        self._lock = threading.Lock()
        self.add({})

    def add(self, found: Found) -> None:
        """Add to what has been found: lists are extended, anything else is replaced."""
        with self._lock:
            for key, value in found.items():
                if isinstance(value, list):
                    self.found.setdefault(key, []).extend(value)
                else:
                    self.found[key] = value
            self.found["seconds"] = round(time.perf_counter() - self._started, 1)
            if self._file is not None:
                written = self._file.with_name(self._file.name + ".new")
                written.write_text(json.dumps(self.found, indent=1) + "\n")
                written.replace(self._file)


def machine() -> dict[str, str]:
    import torch
    import triton

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"device": device, "torch": torch.__version__, "cuda": str(torch.version.cuda), "triton": triton.__version__}


def run_tests(paths: list[str], report: Report, at_once: int = 1) -> Found:
    """Run test files side by side, each in processes of its own."""
    total: Found = {"passed": 0, "failed": 0, "skipped": 0, "failures": [], "seconds": {}}
    clock = Clock(time.perf_counter() + TESTS_S)
    lock = threading.Lock()

    def run(path: str) -> None:
        started = time.perf_counter()
        found = run_file(path, clock)
        with lock:
            for key, value in found.items():
                total[key] += value
            total["seconds"][path] = round(time.perf_counter() - started, 1)
            print(f"{path}: {found}", flush=True)
            report.add({"tests": total})

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(run, paths))
    return total


_OUTCOME = re.compile(r"(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
_REASON = re.compile(r"(?:FAILED|ERROR) (\S+?::.*?) - (.*)")
_STOPS = 3
"""After this many processes that stopped at a failure, the next one runs the rest to the end."""


def run_file(path: str, clock: Clock) -> Found:
    """Run a file's tests; after one that fails, ends its process or hangs, run the rest in a new process.

    Plugins are disabled, and so are this project's pytest options, which need some of them.
    """
    outcomes: dict[str, str] = {}
    failures: list[str] = []
    wanted = [path]
    for attempt in range(2 * _STOPS):
        if clock.left < 1.0:
            failures.append(f"{path}: no time")
            break
        known = len(outcomes)
        reasons: dict[str, str] = {}
        lines: list[str] = []
        options = ["-v", "-rfE", "--tb=short", *(["-x"] if attempt < _STOPS else [])]
        problem = ""
        try:
            for line in lines_of(pytest_command(*options, *wanted), clock.left, SILENT_S):
                lines.append(line)
                if outcome := _OUTCOME.match(line):
                    outcomes[outcome[1]] = outcome[2]
                elif reason := _REASON.match(line):
                    reasons[reason[1]] = reason[2]
        except RuntimeError as error:
            problem = str(error)
        new = list(outcomes)[known:]
        failures += [f"{name}: {reasons.get(name, '')[:500]}" for name in new if outcomes[name] in ("FAILED", "ERROR")]
        if not problem:
            break
        rest = [name for name in collected(path) if name not in outcomes]
        if any(outcomes[name] in ("FAILED", "ERROR") for name in new):
            print("\n".join(lines)[-6000:], flush=True)
        else:
            # The test that was running has begun a line but has no outcome.
            begun = (name for line in reversed(lines) for name in rest if f"{line} ".startswith(f"{name} "))
            running = next(begun, "")
            failures.append(f"{running or path}: {problem}" + ("" if running else "\n" + "\n".join(lines)[-3000:]))
            if not running:
                break
            outcomes[running] = "FAILED"
            rest.remove(running)
        if clock.left < 10.0 or not rest:
            break
        wanted = rest
    kinds = list(outcomes.values())
    return {
        "passed": kinds.count("PASSED"),
        "failed": max(kinds.count("FAILED") + kinds.count("ERROR"), len(failures)),
        "skipped": kinds.count("SKIPPED"),
        "failures": failures,
    }


def pytest_command(*arguments: str) -> list[str]:
    options = ["-p", "no:cacheprovider", "-o", "addopts=", "-o", "filterwarnings=default", "--color=no"]
    return [sys.executable, "-m", "pytest", *options, *arguments]


def collected(path: str) -> list[str]:
    with suppress(RuntimeError):
        return [line for line in lines_of(pytest_command("--collect-only", "-q", path), 60.0, 60.0) if "::" in line]
    return []


def lines_of(command: list[str], seconds: float, silent_s: float) -> Iterator[str]:
    """Yield what a command prints, line by line as it arrives, including an unfinished last line.

    Raises:
        RuntimeError: the command failed, was not done in time, or printed nothing for too long; it is killed then.
    """
    places = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {
        **os.environ, "PYTHONPATH": places, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONUNBUFFERED": "1",
        "COLUMNS": "400",
    }  # fmt: skip
    end = time.perf_counter() + seconds
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    assert process.stdout is not None
    begun, last = b"", ""
    problem = ""
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while True:
                wait = min(end - time.perf_counter(), silent_s)
                if wait <= 0 or not selector.select(wait):
                    late = end - time.perf_counter() <= 0.05
                    problem = f"not done after {seconds:.0f} s" if late else f"silent for {silent_s:.0f} s"
                    break
                if not (piece := os.read(process.stdout.fileno(), 1 << 16)):
                    break
                *lines, begun = (begun + piece).split(b"\n")
                for line in lines:
                    last = line.decode(errors="replace").strip() or last
                    yield line.decode(errors="replace")
        if begun:
            last = begun.decode(errors="replace")
            yield last
        if not problem and process.wait(10.0):
            problem = f"ended with {process.returncode}: {last[:300]}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    if problem:
        raise RuntimeError(problem)


class Clock:
    """The time that is left."""

    def __init__(self, end: float) -> None:
        self._end = end

    @property
    def left(self) -> float:
        return self._end - time.perf_counter()


def benchmark(report: Report, clock: Clock, interpreted: bool) -> None:
    parts = {"limits": 0.0, "attention": 0.0, "kernels": 0.0, "decode tiny": 0.0, "transformers tiny": 0.0}
    parts["transformers-batching tiny"] = 0.0
    for name, seconds in (parts if interpreted else PARTS).items():
        limits = report.found.get("limits")
        command = [sys.executable, __file__, "--part", name, "--limits", json.dumps(limits)]
        in_a_process = partial(rows_of, command, min(seconds, clock.left))
        rows = partial(measure, name, limits, interpreted) if interpreted else in_a_process
        guarded(report, name, clock, seconds, rows)


def rows_of(command: list[str], seconds: float) -> Iterator[Found]:
    """Yield what the process of a part reports to have found; print its other lines.

    Raises:
        RuntimeError: as for `lines_of`.
    """
    for line in lines_of(command, seconds, SILENT_S):
        if line.startswith(ROW):
            yield json.loads(line.removeprefix(ROW))
        else:
            print(line, flush=True)


def guarded(report: Report, name: str, clock: Clock, seconds: float, rows: Callable[[], Iterator[Found]]) -> None:
    """Add what is measured to the report, row by row; record a part without time or with an error as left out."""
    if clock.left < seconds / 2:
        report.add({"left_out": [f"{name} (no time)"]})
        return
    try:
        for found in rows():
            report.add(found)
    except Exception as error:
        report.add({"left_out": [f"{name} ({type(error).__name__}: {str(error)[:600]})"]})


def measure(part: str, limits: dict[str, float] | None, interpreted: bool) -> Iterator[Found]:
    """Measure one part, and print its table."""
    import torch

    from benchmarks.gpu import kernels as gpu_kernels

    device = torch.device("cpu" if interpreted else "cuda")
    sizes, repeats = (gpu_kernels.SMALL, 1) if interpreted else (gpu_kernels.FULL, 20)
    kind, _, model = part.partition(" ")
    if kind == "limits":
        best = gpu_kernels.measure_limits(device, sizes, repeats=repeats)
        print(f"copy {best.copy_bandwidth / 1e12:.2f} TB/s, products {best.matrix_rate / 1e12:.0f} TFLOP/s")
        yield {"limits": asdict(best)}
        return
    if kind.startswith("transformers"):
        yield from generate(kind, model, device, interpreted)
        return
    if limits is None:
        raise RuntimeError("the machine's limits are not known")
    if kind == "decode":
        yield from decode(model, device, limits["copy_bandwidth"], interpreted)
        return
    known = gpu_kernels.Limits(**limits)
    if kind == "attention":
        rows = gpu_kernels.measure_attention(device, sizes, known, repeats=repeats)
    else:
        codecs = ("int4",) if interpreted else None
        rows = gpu_kernels.measure_kernels(device, sizes, known, repeats=repeats, codecs=codecs)
    print(f"{kind:<34} {'ms':>9} {'of limit':>9} {'torch ms':>9} {'FlashInfer ms':>13}", flush=True)
    for row in rows:
        peers = ["" if s is None else f"{s * 1e3:.3f}" for s in (row.torch_seconds, row.flashinfer_seconds)]
        line = f"{row.name:<34} {row.seconds * 1e3:9.3f} {row.share:9.1%} {peers[0]:>9} {peers[1]:>13}"
        print(line.rstrip(), flush=True)
        yield {kind: [asdict(row)]}


def decode(name: str, device: Any, bandwidth: float, interpreted: bool) -> Iterator[Found]:
    import torch

    from benchmarks.gpu.decode import DecodeBench
    from octavo.runner.graphs import CudaCapture

    counts, context, steps = ([1, 2], 20, 2) if interpreted else ([1, 32, 128, 256], 500, 32)
    dtype = torch.float32 if interpreted else torch.bfloat16
    capture = None if interpreted else CudaCapture(device)
    bench = DecodeBench(name, device, dtype, most_seqs=counts[-1], context=context, steps=steps, capture=capture)
    print(f"{'decode':<14} {'sequences':>9} {'ms a step':>10} {'tokens/s':>9} {'of floor':>9}", flush=True)
    for count in counts:
        row = bench.measure(count, bandwidth)
        print(
            f"{name:<14} {count:9d} {row.seconds * 1e3:10.3f} {row.tokens_per_second:9.0f} {row.share:9.1%}", flush=True
        )
        yield {
            "decode": [
                {
                    "model": name, "num_seqs": count, "context": context, "seconds": row.seconds, "floor": row.floor,
                    "share": row.share,
                }
            ]
        }  # fmt: skip


def generate(kind: str, name: str, device: Any, interpreted: bool) -> Iterator[Found]:
    """Measure transformers' `generate`, or, for `transformers-batching`, its continuous batching."""
    import torch

    from benchmarks.gpu.peers import measure_generate, measure_generate_batch, transformers_model

    model = transformers_model(name, device, torch.float32 if interpreted else torch.bfloat16)
    context, steps = (20, 2) if interpreted else (500, 16)
    if kind == "transformers":
        function, counts, measuring = "generate", [1, 32], measure_generate
    else:
        function, counts, measuring = "generate_batch", [32, 128], measure_generate_batch
    for count in counts[:1] if interpreted else counts:
        took = measuring(model, num_seqs=count, context=context, steps=steps)
        print(f"{name:<14} {count:9d} {took * 1e3:10.3f} {count / took:9.0f}  transformers' {function}", flush=True)
        yield {"transformers": [{"model": name, "function": function, "num_seqs": count, "seconds": took}]}
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
