"""Check Octavo on a machine with an NVIDIA GPU: the GPU tests, then what the kernels and a decode reach.

    PYTHONPATH=src python scripts/gpu_check.py --json gpu.json

Needs torch, triton, transformers, pytest and hypothesis; no compiled library, no network. Ends within eight minutes:
what there is no time for is named as left out. Each part runs in a process of its own, since an error on a GPU leaves
nothing that works in the process that made it: a part that fails is named, and the others go on. With --interpret
everything runs on a CPU, in Triton's interpreter and with tiny shapes, which proves the script and says nothing of
speed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
TESTS = [
    "tests/attention/test_triton.py",
    "tests/models/test_triton_ops.py",
    "tests/sampling/test_triton_choice.py",
    "tests/storage/test_block_copy.py",
    "tests/runner/test_graphs.py",
    "tests/engine/test_device_path.py",
]
BUDGET_S = 465.0
TESTS_S = 220.0
MODELS = ("Llama-3.1-8B", "Qwen3-0.6B", "SmolLM2-135M")  # the largest first, where the time may run out
PARTS = {
    "limits": 45.0,
    "attention": 45.0,
    "kernels": 75.0,
    **{f"decode {model}": 75.0 for model in MODELS},
    f"transformers {MODELS[0]}": 75.0,
}
"""Parts of the benchmark, and the most seconds that each may take."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--interpret", action="store_true", help="on a CPU, in Triton's interpreter, tiny shapes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything found to FILE, after each part")
    parser.add_argument("--tests", nargs="*", default=TESTS, metavar="PATH", help="the tests to run; none: no tests")
    parser.add_argument("--no-benchmark", action="store_true", help="run the tests only")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # in a process of its own: this part, given the limits
    parser.add_argument("--limits", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    started = time.perf_counter()
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    sys.path[:0] = [str(ROOT / "src")]
    if args.part:
        print(json.dumps(measure(args.part, args.limits, args.interpret)))
        return 0
    import torch

    if not args.interpret and not torch.cuda.is_available():
        print("torch finds no CUDA device here; --interpret runs the same on a CPU, slowly", file=sys.stderr)
        return 2
    report: dict[str, Any] = {"machine": machine(), "interpreted": args.interpret, "left_out": []}
    print("  ".join(f"{key}: {value}" for key, value in report["machine"].items()), flush=True)

    def write() -> None:
        report["seconds"] = round(time.perf_counter() - started, 1)
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")

    if args.tests:
        report["tests"] = run_tests(args.tests)
        print(f"tests: {report['tests']}", flush=True)
        write()
    if not args.no_benchmark:
        benchmark(report, Clock(started + BUDGET_S), args.interpret, write)
    write()
    print(f"{report['seconds']} s; left out: {', '.join(report['left_out']) or 'nothing'}")
    if args.interpret:
        print("interpreted on a CPU: the numbers say nothing of a GPU")
    tests = report.get("tests", {})
    return 1 if tests.get("failed") or (args.tests and not tests.get("passed")) else 0


def machine() -> dict[str, str]:
    import torch
    import triton

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"device": device, "torch": torch.__version__, "cuda": str(torch.version.cuda), "triton": triton.__version__}


def run_tests(paths: list[str]) -> dict[str, Any]:
    """Run each file's tests in a process of its own: an error on a GPU would fail all that come after it."""
    total: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "failures": []}
    clock = Clock(time.perf_counter() + TESTS_S)
    for path in paths:
        for key, value in run_file(path, max(1.0, clock.left)).items():
            total[key] += value
    return total


def run_file(path: str, seconds: float) -> dict[str, Any]:
    """Run pytest without plugins and without this project's options, which need some."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-o", "filterwarnings=default", "-p"]
        command += ["no:cacheprovider", "--tb=short", f"--junit-xml={results}", path]
        places = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        try:
            ran = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": places, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
                capture_output=True,
                text=True,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return {"failed": 1, "failures": [f"{path}: not done after {seconds:.0f} s"]}
        if not results.exists():
            return {"failed": 1, "failures": [f"{path}: {(ran.stdout + ran.stderr)[-4000:]}"]}
        cases = list(ElementTree.parse(results).getroot().iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    if bad:
        print(ran.stdout[-8000:])
    return {
        "passed": len(cases) - len(bad) - len(skipped),
        "failed": len(bad),
        "skipped": len(skipped),
        "failures": [f"{case.get('classname')}::{case.get('name')}" for case in bad],
    }


class Clock:
    """What is left of the time."""

    def __init__(self, end: float) -> None:
        self._end = end

    @property
    def left(self) -> float:
        return self._end - time.perf_counter()


def benchmark(report: dict[str, Any], clock: Clock, interpreted: bool, write: Callable[[], None]) -> None:
    parts = {"limits": 0, "attention": 0, "kernels": 0, "decode tiny": 0, "transformers tiny": 0}
    for name, seconds in parts.items() if interpreted else PARTS.items():
        guarded(report, name, clock, seconds, lambda name=name: found(report, name, clock, interpreted))
        write()


def found(report: dict[str, Any], name: str, clock: Clock, interpreted: bool) -> dict[str, Any]:
    """What a part finds, in a process of its own unless it is interpreted."""
    if interpreted:
        return measure(name, report.get("limits"), interpreted)
    command = [sys.executable, __file__, "--part", name]
    if "limits" in report:
        command += ["--limits", json.dumps(report["limits"])]
    return in_a_process(command, min(PARTS[name], clock.left))


def in_a_process(command: list[str], seconds: float) -> dict[str, Any]:
    """The JSON on the last line of what a command prints; the other lines are shown.

    Raises:
        RuntimeError: it has failed, or was not done in time.
    """
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not done after {seconds:.0f} s") from None
    *lines, last = ran.stdout.splitlines() or [""]
    if ran.returncode:
        print("\n".join([*lines, last, ran.stderr[-4000:]]), flush=True)
        raise RuntimeError(f"ended with {ran.returncode}: {' '.join(ran.stderr.splitlines()[-1:])}")
    print("\n".join(lines), flush=True)
    result: dict[str, Any] = json.loads(last)
    return result


def guarded(
    report: dict[str, Any], name: str, clock: Clock, seconds: float, measure: Callable[[], dict[str, Any]]
) -> None:
    """Add what is measured to the report; leave out what there is no time for, and say what failed."""
    if clock.left < seconds / 2:
        report["left_out"].append(f"{name} (no time)")
        return
    try:
        result = measure()
    except Exception as error:
        report["left_out"].append(f"{name} ({type(error).__name__}: {str(error)[:300]})")
        return
    for key, value in result.items():
        if isinstance(value, list):
            report.setdefault(key, []).extend(value)
        else:
            report[key] = value


def measure(part: str, limits: dict[str, float] | None, interpreted: bool) -> dict[str, Any]:
    """Measure one part, and print its table."""
    import torch

    from octavo.bench import gpu_kernels

    device = torch.device("cpu" if interpreted else "cuda")
    sizes, repeats = (gpu_kernels.SMALL, 1) if interpreted else (gpu_kernels.FULL, 20)
    kind, _, model = part.partition(" ")
    if kind == "limits":
        best = gpu_kernels.measure_limits(device, sizes, repeats=repeats)
        print(f"copy {best.copy_bandwidth / 1e12:.2f} TB/s, products {best.matrix_rate / 1e12:.0f} TFLOP/s")
        return {"limits": asdict(best)}
    if kind == "transformers":
        return {"transformers": generate(model, device, interpreted)}
    if limits is None:
        raise RuntimeError("the machine's limits are not known")
    if kind == "decode":
        return {"decode": decode(model, device, limits["copy_bandwidth"], interpreted)}
    known = gpu_kernels.Limits(**limits)
    if kind == "attention":
        rows = gpu_kernels.measure_attention(device, sizes, known, repeats=repeats)
    else:
        codecs = ("int4",) if interpreted else None
        rows = gpu_kernels.measure_kernels(device, sizes, known, repeats=repeats, codecs=codecs)
    print(f"{kind:<34} {'ms':>9} {'of limit':>9} {'torch ms':>9}")
    for row in rows:
        torch_ms = "" if row.torch_seconds is None else f"{row.torch_seconds * 1e3:9.3f}"
        print(f"{row.name:<34} {row.seconds * 1e3:9.3f} {row.share:9.1%} {torch_ms:>9}")
    return {kind: [asdict(row) for row in rows]}


def decode(name: str, device: Any, bandwidth: float, interpreted: bool) -> list[dict[str, Any]]:
    import torch

    from octavo.bench.gpu_decode import DecodeBench
    from octavo.runner.graphs import CudaCapture

    counts, context, steps = ([1, 2], 20, 2) if interpreted else ([1, 32, 128, 256], 500, 32)
    dtype = torch.float32 if interpreted else torch.bfloat16
    capture = None if interpreted else CudaCapture(device)
    bench = DecodeBench(name, device, dtype, most_seqs=counts[-1], context=context, steps=steps, capture=capture)
    print(f"{'decode':<14} {'sequences':>9} {'ms a step':>10} {'tokens/s':>9} {'of floor':>9}")
    found = []
    for count in counts:
        row = bench.measure(count, bandwidth)
        print(f"{name:<14} {count:9d} {row.seconds * 1e3:10.3f} {row.tokens_per_second:9.0f} {row.share:9.1%}")
        found.append({"model": name, "num_seqs": count, "context": context, "seconds": row.seconds, "floor": row.floor})
    return found


def generate(name: str, device: Any, interpreted: bool) -> list[dict[str, Any]]:
    import torch

    from octavo.bench.gpu_decode import measure_transformers

    dtype = torch.float32 if interpreted else torch.bfloat16
    context, steps = (20, 2) if interpreted else (500, 16)
    found = []
    for count in [1] if interpreted else [1, 32]:
        took = measure_transformers(name, device, dtype, num_seqs=count, context=context, steps=steps)
        print(f"{name:<14} {count:9d} {took * 1e3:10.3f} {count / took:9.0f}  transformers' generate")
        found.append({"model": name, "num_seqs": count, "seconds": took})
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return found


if __name__ == "__main__":
    sys.exit(main())
