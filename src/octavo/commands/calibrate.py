"""`octavo calibrate`: choose the scales of a KV cache, or a codec for each layer, by running a model over text."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.commands.common_options import add_json_option, add_window_options
from octavo.commands.options import add_options, given_options
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.kvcache.formats import KV_FORMATS, layer_formats
from octavo.workloads import report

if TYPE_CHECKING:
    from octavo.calibration.text import Text

DESCRIPTION = """\
Choose how to quantise a model's KV cache, by running it over text (docs/serve/kv_codecs.md). By default, write the
scales of an fp8 or nvfp4 cache to a file next to the model.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("calibration options")
    group.add_argument("--data", metavar="FILE", help="text to calibrate with; default: Python's own documentation")
    group.add_argument(
        "--output", metavar="FILE", help="file to write; default: next to the model; with --search: kv_cache_table.toml"
    )
    add_window_options(group, "8; with --search: 2", "512; with --search: 256; with --entropy: 2048")
    group.add_argument(
        "--method",
        choices=("max", "percentile", "mse"),
        default="mse",
        help="how scales are chosen; max: no value is clipped; percentile: --percentile of each head's values are not "
        "clipped; mse: the smallest squared error",
    )
    group.add_argument(
        "--percentile", type=float, default=99.99, metavar="P", help="percentile for --method percentile"
    )
    group.add_argument("--search", action="store_true", help="search for a codec per layer, for --kv-cache-dtype FILE")
    group.add_argument(
        "--entropy",
        action="store_true",
        help="divide the --kv-budget given by the entropy of attention in each layer, for --kv-budget FILE",
    )
    group.add_argument(
        "--bits", type=float, default=6.0, metavar="B", help="with --search: mean bits per value, without scales"
    )
    group.add_argument(
        "--candidates", default="int8,int4", metavar="NAME,…", help="with --search: codecs to choose from"
    )
    group.add_argument(
        "--exchanges",
        type=int,
        default=12,
        metavar="N",
        help="with --search: number of measured attempts to improve the table",
    )
    add_json_option(parser)
    add_options(parser, EngineConfig, positional_model=True)


def run(args: argparse.Namespace) -> int:
    from octavo.calibration.text import read_text
    from octavo.commands.calibrate_search import run_search

    if not 0 < args.percentile <= 100:
        raise ConfigError(f"percentile must be above 0 and at most 100, got {args.percentile:g}")
    if args.exchanges < 0:
        raise ConfigError(f"exchanges must be 0 or more, got {args.exchanges}")
    options = given_options(args, EngineConfig)
    text = read_text(args.data)
    if args.entropy:
        return _entropy(args, options, text)
    return run_search(args, options, text) if args.search else _scales(args, options, text)


def _entropy(args: argparse.Namespace, options: dict[str, Any], text: Text) -> int:
    from octavo import __version__
    from octavo.calibration.entropy import layer_entropies
    from octavo.checkpoint.model_source import model_of
    from octavo.commands.calibrate_search import loaded
    from octavo.workloads.forward_text import windows_of

    budget = EngineConfig.from_options(options).budget
    if budget is None or budget.slides or args.search:
        raise ConfigError("--entropy divides a budget: give --kv-budget of another mode than sinks, and no --search")
    with loaded(options, length := args.window or 2048) as (llm, runner):
        divided = [
            layer.sliding_window is None and (layer.bounded or budget.evicts) for layer in runner.arena.spec.layers
        ]
        windows = windows_of(llm.tokenizer.encode(text.content), args.windows or 8, length, text.name)
        found = layer_entropies(runner.model, runner.attention, windows)
        source = model_of(llm.core.config)
    means = [sum(of_layer) / len(found) for of_layer in zip(*found, strict=True)]
    layers = tuple(round(mean, 4) for mean, is_divided in zip(means, divided, strict=True) if is_divided)
    budget = replace(budget, layers=layers)
    path = Path(args.output) if args.output else source.companion_file(f"kv_budget-{budget.mode}.toml")
    measured = f"entropies over {sum(map(len, windows)):,} tokens of {text.name}"
    budget.write(path, f"octavo serve {source.name} --kv-budget THIS_FILE; {measured}")
    if args.json:
        print(
            report.as_json_line({"calibrate": "entropy", "version": __version__, "file": str(path), "layers": layers})
        )
    else:
        print(f"{budget}\nwritten to {path}, {measured}: give --kv-budget {path}")
    return 0


def _scales(args: argparse.Namespace, options: dict[str, Any], text: Text) -> int:
    from octavo import __version__
    from octavo.calibration.scales import calibrate
    from octavo.checkpoint.model_source import model_of
    from octavo.commands.calibrate_search import loaded
    from octavo.kvcache.formats import kv_dtype
    from octavo.models.kv_scale_file import Origin, default_scales_path, write_scales
    from octavo.workloads.forward_text import windows_of

    asked = EngineConfig.from_options(options).kv_cache_dtype
    asked = "fp8_e4m3" if asked == "auto" else asked
    with loaded(options, length := args.window or 512) as (llm, runner):
        source = model_of(llm.core.config)
        model = runner.model
        dtype = kv_dtype(asked, str(model.dtype).removeprefix("torch."), len(model.kv_layers))
        if not any(format.calibrated for format in layer_formats(dtype, len(model.kv_layers))):
            known = ", ".join(name for name, format in KV_FORMATS.items() if format.calibrated)
            raise ConfigError(f"a KV cache in {dtype} needs no scales; those that do are {known}")
        windows = windows_of(llm.tokenizer.encode(text.content), args.windows or 8, length, text.name)
        found = calibrate(model, runner.attention, dtype, windows, method=args.method, percentile=args.percentile)
    method = f"percentile {args.percentile:g}" if args.method == "percentile" else args.method
    path = Path(args.output) if args.output else default_scales_path(source, dtype)
    write_scales(path, source, dtype, found.scales, Origin(method, text.name, found.tokens))
    if args.json:
        answer = {"kv_cache_dtype": dtype, "method": method, "text": text.name, "tokens": found.tokens}
        errors = {"errors": found.errors, "errors_at_one": found.errors_at_one}
        print(
            report.as_json_line({"calibrate": "scales", "version": __version__, "file": str(path), **answer, **errors})
        )
        return 0
    print(f"{dtype}, scales by {method} over {found.tokens:,} tokens of {text.name}")
    rows = [
        (side, f"{100 * found.errors[key]:.3f} %", f"{100 * found.errors_at_one[key]:.3f} %")
        for key, side in (("k", "keys"), ("v", "values"))
        if key in found.errors
    ]
    print("\n".join(report.columns(("", "error as stored", "with scales of 1.0"), rows)))
    hint = " (where it is found automatically)" if not args.output else f": give --kv-scales {path}"
    print(f"written to {path}{hint}")
    return 0
