"""`octavo plan`: compute the memory that a model needs for a workload, before anything is bought or loaded."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from octavo.commands.common_options import add_json_option
from octavo.commands.options import add_options, given_options
from octavo.errors import ConfigError
from octavo.planner.plan_options import PlanOptions
from octavo.units import format_bytes
from octavo.workloads.report import columns

DESCRIPTION = """\
Compute the memory that a model needs for a workload, and how many sequences fit. Nothing is loaded or downloaded: a
config.json, a GGUF file or the name of a well-known model (--list) is enough.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--list", action="store_true", help="print the names of the well-known models and exit")
    add_json_option(parser, "tables")
    parser.add_argument(
        "--plot", metavar="FILE.png", help="plot how many users fit at once, by context (needs --memory; octavo[plot])"
    )
    add_options(parser, PlanOptions, positional_model=True)


def run(args: argparse.Namespace) -> int:
    from octavo.planner.deployment import Deployment
    from octavo.planner.known_models import KNOWN_MODELS
    from octavo.planner.machine import computes_bf16
    from octavo.planner.report import report_of
    from octavo.planner.sources import find_shape
    from octavo.workloads.plots import require_plot

    if args.list:
        print("\n".join(KNOWN_MODELS))
        return 0
    given = given_options(args, PlanOptions)
    if args.plot:
        require_plot(args.plot)
    here = _machine(given)
    options = PlanOptions(**{**here, **given})
    report = report_of(Deployment(find_shape(options.model), options))
    is_served_here = options.machine is None and here.get("device") == "cpu"
    if is_served_here and options.dtype == "auto" and report["weights"] == "bfloat16" and not computes_bf16():
        report["notes"].append("this CPU lacks bf16 instructions: `octavo serve` here takes --dtype float32")
    if "memory" in given and "device" not in given:
        report["notes"].append("--memory is taken as a GPU's: give --device cpu too for a machine without one")
    print(json.dumps(report) if args.json else "\n".join(_tables(report)))
    if args.plot:
        _draw(report, args.plot)
    return 0


def _machine(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that describe this machine, or that of --machine; empty if options describe another."""
    from octavo.planner.machine import available_memory, gpu_memory, limited_memory
    from octavo.planner.roofline import find_machine

    if "machine" in given:
        if others := [name for name in ("memory", "device") if name in given]:
            raise ConfigError(f"--machine gives --memory and --device; leave out --{others[0]}")
        machine = find_machine(given["machine"])
        return {"device": "cpu" if machine.on_cpu else "cuda", "memory": machine.memory}
    if given.keys() & {"device", "memory", "tensor_parallel_size"}:
        return {}
    if (memory := gpu_memory()) is not None:
        return {"device": "cuda", "memory": limited_memory(memory)}
    return {"device": "cpu", "memory": limited_memory(available_memory())}


def _tables(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the report as text: the workload, its memory by item, and the alternatives."""
    yield _verdict(report)
    active = report["active_parameters"]
    used = "" if active == report["parameters"] else f", of which a token uses {active / 1e9:.2f}"
    yield f"{report['model']}: {report['architecture']}, {report['parameters'] / 1e9:.2f} billion parameters{used}"
    devices = report["tensor_parallel_size"]
    yield (
        f"{report['concurrency']:,} {'sequence' if report['concurrency'] == 1 else 'sequences'} of "
        f"{report['context']:,} tokens in blocks of {report['block_size']:,}, "
        f"{report['weights']} weights, {report['kv_cache_dtype']} KV cache, {devices} × {report['device']}"
    )
    yield from _table(
        "KV cache",
        {
            "per token": format_bytes(report["kv_bytes_per_token"]),
            "per sequence": (
                f"{format_bytes(report['kv_bytes_per_sequence'])}, {report['blocks_per_sequence']:,} blocks"
            ),
            "of all sequences": format_bytes(report["kv_bytes_total"]),
            "of that wasted": _share(report["waste"]),
            "layers": _groups(report["kv_groups"]),
        },
    )
    yield from _table(
        "memory of one device",
        {
            "weights": format_bytes(report["weight_bytes_per_device"]),
            "activations": f"{format_bytes(report['activation_bytes_per_device'])}, estimated",
            "KV cache": format_bytes(report["kv_bytes_total_per_device"]),
            "swap space": _swap(report),
            "draft model": _draft_model(report["draft_model_bytes"]),
            "prefixes in host memory": _host_prefixes(report),
            "index of the disk, and blocks from Redis": _stores(report),
            "process": format_bytes(report["process_bytes"]) if report["process_bytes"] else None,
            "needed": format_bytes(report["memory_needed_per_device"]),
        },
    )
    if (memory := report["memory"]) is not None:
        yield from _table("what fits", _fitting(memory, report["device"]))
        yield from _users(memory["by_context"])
    if report.get("price"):
        yield from _price(report["price"], report)
    yield from _alternatives(report)
    if (window := report["sliding_window"]) is not None:
        yield ""
        yield (
            f"sliding windows of {', '.join(f'{w:,}' for w in window['windows'])} tokens in {window['layers']} layers "
            f"save {_share(window['share_saved'])} of a sequence: {format_bytes(window['kv_bytes_saved_per_sequence'])}"
        )
    for note in report["notes"]:
        yield f"note: {note}"


def _verdict(report: Mapping[str, Any]) -> str:
    """Return the answer in a sentence."""
    count, context, memory = report["concurrency"], report["context"], report["memory"]
    users = f"{count:,} {'user' if count == 1 else 'users'} with {context:,} tokens each"
    need = "needs" if count == 1 else "need"
    published = f", though published in {report['published_weights']}" if report["published_weights"] else ""
    counted = f"{report['weights']} weights{published}, {report['kv_cache_dtype']} cache"
    counted += " of latents" if report["caches_latents"] else ""
    needed = f"{need} {format_bytes(report['memory_needed_per_device'])} of each device's memory ({counted})"
    if memory is None:
        return f"{users} {needed}."
    if memory["sequences_that_fit"] >= count:
        return f"Fits: {users} {needed}."
    longest = memory["longest_context"]
    rest = f"with {longest:,} tokens each they would" if longest else "nor does any shorter context"
    return f"Does not fit: {users} {needed}; {rest}."


def _users(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the table of users at once: a row for each context of which any fit, a column for each KV cache."""
    fitting = [row for row in rows if any(row["by_kv_dtype"].values())] or rows[:1]
    heading = ["users at once by context", *(f"{dtype[:11]} cache" for dtype in rows[0]["by_kv_dtype"])]
    counts = [[f"{row['context']:,} tokens", *(f"{n:,}" for n in row["by_kv_dtype"].values())] for row in fitting]
    yield from ("", *columns(heading, counts))


def _price(price: Mapping[str, Any], report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the least price of output tokens, what it assumes, and how to include prompts and idle time."""
    users = f"{price['users']:,} {'user' if price['users'] == 1 else 'users'}"
    yield from _table(
        f"price at {price['per_hour']:g} an hour, ESTIMATED from the data sheet of {price['machine']}",
        {
            "a million output tokens": f"at least {price['per_million_output_tokens']:.3g}",
            "tokens per second": f"at most {price['output_tokens_per_second']:,.0f}, while {users} decode at "
            f"{report['context']:,} tokens",
        },
    )
    yield "  Prompts and idle time add to it; simulate your traffic to include them:"
    devices = report["tensor_parallel_size"]
    yield (
        f"    octavo simulate {report['model']} --machine {price['machine']}"
        + (f" --num-devices {devices}" if devices > 1 else "")
        + f" --price-per-hour {price['per_hour']:g} --concurrency {price['users']} --trace FILE"
    )


def _fitting(memory: Mapping[str, Any], device: str) -> dict[str, str]:
    of_device = memory["memory_per_device"]
    rows = {
        "memory of one device": format_bytes(of_device) if of_device else "not given",
        "left for the KV cache": format_bytes(memory["kv_cache_bytes_per_device"])
        + (", at most 40 % of what the weights leave; --kv-cache-memory gives it more" if device == "cpu" else ""),
        "blocks": f"{memory['pool_blocks']:,}",
        "sequences at once": f"{memory['sequences_that_fit']:,}",
        "longest context": f"{memory['longest_context']:,} tokens",
    }
    if "fits" in memory:
        rows["the workload"] = "fits" if memory["fits"] else "does not fit"
    if not memory["sequences_that_fit"] or not memory.get("fits", True):
        devices = memory["smallest_tensor_parallel_size"]
        rows["would fit"] = (
            f"divided among {devices} such devices, by an engine that can: Octavo's ranks share one machine"
            if devices
            else "on no number of such devices"
        )
    return rows


def _alternatives(report: Mapping[str, Any]) -> Iterator[str]:
    caches = {f"paged, {dtype}": figures for dtype, figures in report["by_kv_dtype"].items()}
    reserved = f"{report['max_model_len']:,} tokens each"
    caches[f"contiguous, {report['kv_cache_dtype']}, {reserved}"] = report["contiguous"]
    heading, rows = ["KV cache", "per sequence", "all sequences"], []
    for name, figures in caches.items():
        sizes = [format_bytes(figures[key]) for key in ("kv_bytes_per_sequence", "kv_bytes_total")]
        rows.append([name, *sizes])
        if report["memory"] is not None:
            rows[-1].append(f"{figures['sequences_that_fit']:,}")
    if report["memory"] is not None:
        heading.append("sequences that fit")
    yield from ("", *columns(heading, rows))
    yield f"a contiguous allocator would waste {_share(report['contiguous']['waste'])} of its memory"


def _table(title: str, rows: Mapping[str, str | None]) -> Iterator[str]:
    """Yield a titled table of names and values, without the rows that have none."""
    yield ""
    yield title
    given = {name: value for name, value in rows.items() if value is not None}
    width = max(map(len, given)) + 2
    for name, value in given.items():
        yield f"  {name:<{width}}{value}"


def _groups(groups: Sequence[Mapping[str, Any]]) -> str:
    """Format layer groups, with equal ones combined: '10 full, 5 × 10 sliding 1,024, 2 sliding 1,024'."""
    names = [
        f"{group['layers']} "
        + ("int8 copies, " if group["int8_copies"] else "")
        + ("full" if (w := group["sliding_window"]) is None else f"sliding {w:,}")
        for group in groups
    ]
    return ", ".join(name if count == 1 else f"{count} × {name}" for name, count in Counter(names).items())


def _swap(report: Mapping[str, Any]) -> str:
    """Format swap space: whether it is in the host's memory, and whether it is required or only used if available."""
    size = report["swap_bytes"]
    if not size:
        return "none"
    if report["device"] != "cpu":
        return f"{format_bytes(size)}, in the host's memory"
    return format_bytes(size) if report["swap_is_needed"] else f"{format_bytes(size)}, or what is left"


def _draft_model(sizes: Mapping[str, int]) -> str | None:
    """Format the memory of the draft model; None if none is asked for."""
    if not any(sizes.values()):
        return None
    parts = ", ".join(f"{format_bytes(size)} of {name}" for name, size in sizes.items())
    return f"{format_bytes(sum(sizes.values()))}: {parts}"


def _host_prefixes(report: Mapping[str, Any]) -> str | None:
    """Format the memory for prefixes in host memory; None if none are asked for."""
    if not (size := report["host_prefix_bytes"]):
        return None
    where = "" if report["device"] == "cpu" else ", in the host's memory"
    slots = report["host_prefix_slots"]
    tokens = slots // len(report["kv_groups"]) * report["block_size"]
    return f"{format_bytes(size)}, {slots:,} blocks, {tokens:,} tokens{where}"


def _stores(report: Mapping[str, Any]) -> str | None:
    """Format what disk and Redis take in memory; None without them."""
    if not (size := report["store_bytes"]):
        return None
    return f"at most {format_bytes(size)}" + ("" if report["device"] == "cpu" else ", in the host's memory")


def _share(share: float) -> str:
    return f"{100 * share:.1f} %"


def _draw(report: Mapping[str, Any], path: str) -> None:
    """Plot the users at once over the context, a line for each format of the cache, and mark what was asked for.

    Raises:
        ConfigError: no memory is given, nothing fits, or the file cannot be written.
    """
    from octavo.workloads.plots import COLOURS, new_figure, save

    if report["memory"] is None:
        raise ConfigError("nothing to plot: give --memory, the memory of one device")
    rows = report["memory"]["by_context"]
    lines = {dtype: [row for row in rows if row["by_kv_dtype"][dtype]] for dtype in rows[0]["by_kv_dtype"]}
    if not any(lines.values()):
        raise ConfigError("nothing to plot: no user fits with any context")
    figure = new_figure(7, 4.5)
    axes = figure.subplots()
    for colour, (dtype, fitting) in zip(COLOURS, lines.items(), strict=False):
        users = [row["by_kv_dtype"][dtype] for row in fitting]
        axes.plot([row["context"] for row in fitting], users, "o-", color=colour, ms=4, label=f"{dtype} cache")
    asked = f"asked for: {report['concurrency']:,} × {report['context']:,} tokens"
    axes.plot([report["context"]], [report["concurrency"]], "k*", ms=12, label=asked)
    contexts = [row["context"] for row in rows]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(contexts, [f"{n // 1024}k" if n % 1024 == 0 else f"{n:,}" for n in contexts])
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set_xlabel("context of each user, tokens")
    axes.set_ylabel("users at once")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    memory = format_bytes(report["memory"]["memory_per_device"])
    devices = f"{report['tensor_parallel_size']} × {report['device']} of {memory}"
    axes.set_title(f"{report['model']}, {report['weights']} weights, {devices}", fontsize=10)
    save(figure, path)
