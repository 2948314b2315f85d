"""Compile every Triton kernel for an NVIDIA GPU, on a machine without one.

    PYTHONPATH=src python scripts/compile_kernels.py --arch 90 80 89

Prints each kernel's shared memory, its registers and the bytes of them that are spilled to memory. Needs torch, and
triton with its own ptxas, but no GPU. Exits with 1 if a kernel does not compile or takes more shared memory than the
GPU has and, with --quick, which compiles the kernels that most steps launch, also if one spills.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--arch", type=int, nargs="+", default=[90], help="compute capabilities; 90 is H100's")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains TEXT")
    parser.add_argument("--quick", action="store_true", help="one shape of each kernel")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)  # before anything imports triton
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    from benchmarks.gpu.cases import cases
    from benchmarks.gpu.compile import SHARED_MEMORY, compile_all

    wrong: list[str] = []
    rows: list[dict[str, object]] = []
    if not args.json:
        print(f"{'sm':>3} {'case':<46} {'kernel':<18} {'warps':>5} {'shared':>7} {'registers':>9} {'spilled':>7}")
    for arch in args.arch:
        for name, call in cases(quick=args.quick):
            if args.only not in name:
                continue
            try:
                found = list(compile_all([(name, call)], arch))
            except Exception as error:
                wrong.append(f"sm_{arch} {name}: {type(error).__name__}: {str(error)[-600:]}")
                continue
            for one in found:
                rows.append({"arch": arch, **asdict(one)})
                if one.shared > SHARED_MEMORY[arch]:
                    wrong.append(f"sm_{arch} {name}: {one.kernel} takes {one.shared} bytes of shared memory")
                if args.quick and one.spilled:
                    wrong.append(f"sm_{arch} {name}: {one.kernel} spills {one.spilled} bytes")
                if not args.json:
                    print(
                        f"{arch:3d} {one.case:<46} {one.kernel:<18} {one.num_warps:5d} {one.shared:7d} "
                        f"{one.registers:9d} {one.spilled:7d}",
                        flush=True,
                    )
    if args.json:
        print(json.dumps({"kernels": rows, "wrong": wrong}))
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
