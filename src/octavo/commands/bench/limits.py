"""`octavo bench limits`: the hardware limits of this machine."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from octavo.commands.common_options import add_json_option, positive, thread_count
from octavo.workloads import report

DESCRIPTION = "Measure the hardware limits that the other benchmarks are compared with."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--num-threads",
        type=thread_count,
        metavar="N",
        help="number of threads to compare with one (default: all cores)",
    )
    parser.add_argument(
        "--seconds", type=float, default=0.5, metavar="X", help="seconds per measurement (default: 0.5)"
    )
    parser.add_argument(
        "--dram-mib", type=positive, default=256, metavar="N", help="MiB to read from DRAM (default: 256)"
    )
    parser.add_argument(
        "--cache-mib", type=positive, default=4, metavar="N", help="MiB to read from cache (default: 4)"
    )
    parser.add_argument(
        "--product", type=positive, default=2048, metavar="N", help="size of the square matrices (default: 2048)"
    )
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    from octavo import __version__, kernels
    from octavo.workloads.machine_limits import measure_limits, thread_counts

    limits = list(
        measure_limits(
            thread_counts(args.num_threads),
            seconds=args.seconds,
            dram_bytes=args.dram_mib << 20,
            cache_bytes=args.cache_mib << 20,
            product_size=args.product,
        )
    )
    machine = {**report.machine(), "isa": kernels.isa() if kernels.available() else None}
    if args.json:
        found = [asdict(limit) for limit in limits]
        print(report.as_json_line({"bench": "limits", "version": __version__, "limits": found, "machine": machine}))
    else:
        print(report.as_table({"machine": machine}))
        columns = ("limit", "threads", "median", "best", "", "by")
        rows = [(x.name, x.threads, report.show(x.value), report.show(x.best), x.unit, x.how) for x in limits]
        print("\n".join(report.columns(columns, rows)))
    return 0
