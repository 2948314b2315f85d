"""`octavo calibrate`: choose the scales of a KV cache, or a codec for each layer, by running a model over text."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.calibration.options import CalibrationOptions
from octavo.commands.common_options import add_json_option
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
    add_json_option(parser)
    add_options(parser, CalibrationOptions)
    add_options(parser, EngineConfig, positional_model=True)


def run(args: argparse.Namespace) -> int:
    from octavo.calibration.text import calibration_text
    from octavo.commands.calibrate_search import run_search

    asked = CalibrationOptions(**given_options(args, CalibrationOptions))
    options = given_options(args, EngineConfig)
    text = calibration_text(asked.data)
    work = _entropy if asked.entropy else run_search if asked.search else _scales
    return work(asked, options, text, as_json=args.json)


def _entropy(asked: CalibrationOptions, options: dict[str, Any], text: Text, *, as_json: bool) -> int:
    from octavo import __version__
    from octavo.calibration.entropy import layer_entropies
    from octavo.checkpoint.model_source import model_of
    from octavo.commands.calibrate_search import loaded
    from octavo.workloads.forward_text import windows_of

    budget = EngineConfig.from_options(options).budget
    if budget is None or budget.slides or asked.search:
        raise ConfigError("--entropy divides a budget: give --kv-budget of another mode than sinks, and no --search")
    with loaded(options, length := asked.window or 2048) as (llm, runner):
        divided = [
            layer.sliding_window is None and (layer.bounded or budget.evicts) for layer in runner.arena.spec.layers
        ]
        windows = windows_of(llm.tokenizer.encode(text.content), asked.windows or 8, length, text.name)
        found = layer_entropies(runner.model, runner.attention, windows)
        source = model_of(llm.core.config)
    means = [sum(of_layer) / len(found) for of_layer in zip(*found, strict=True)]
    layers = tuple(round(mean, 4) for mean, is_divided in zip(means, divided, strict=True) if is_divided)
    budget = replace(budget, layers=layers)
    path = Path(asked.output) if asked.output else source.companion_file(f"kv_budget-{budget.mode}.toml")
    measured = f"entropies over {sum(map(len, windows)):,} tokens of {text.name}"
    budget.write(path, f"octavo serve {source.name} --kv-budget THIS_FILE; {measured}")
    if as_json:
        print(
            report.as_json_line({"calibrate": "entropy", "version": __version__, "file": str(path), "layers": layers})
        )
    else:
        print(f"{budget}\nwritten to {path}, {measured}: give --kv-budget {path}")
    return 0


def _scales(asked: CalibrationOptions, options: dict[str, Any], text: Text, *, as_json: bool) -> int:
    from octavo import __version__
    from octavo.calibration.scales import calibrate
    from octavo.checkpoint.model_source import model_of
    from octavo.commands.calibrate_search import loaded
    from octavo.kvcache.formats import kv_dtype
    from octavo.models.kv_scale_file import Origin, default_scales_path, write_scales
    from octavo.workloads.forward_text import windows_of

    wanted = EngineConfig.from_options(options).kv_cache_dtype
    wanted = "fp8_e4m3" if wanted == "auto" else wanted
    with loaded(options, length := asked.window or 512) as (llm, runner):
        source = model_of(llm.core.config)
        model = runner.model
        dtype = kv_dtype(
            "fp8_e4m3" if wanted == "auto" else wanted, str(model.dtype).removeprefix("torch."), len(model.kv_layers)
        )
        if not any(format.calibrated for format in layer_formats(dtype, len(model.kv_layers))):
            known = ", ".join(name for name, format in KV_FORMATS.items() if format.calibrated)
            raise ConfigError(f"a KV cache in {dtype} needs no scales; those that do are {known}")
        windows = windows_of(llm.tokenizer.encode(text.content), asked.windows or 8, length, text.name)
        found = calibrate(model, runner.attention, dtype, windows, method=asked.method, percentile=asked.percentile)
    method = f"percentile {asked.percentile:g}" if asked.method == "percentile" else asked.method
    path = Path(asked.output) if asked.output else default_scales_path(source, dtype)
    write_scales(path, source, dtype, found.scales, Origin(method, text.name, found.tokens))
    if as_json:
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
    hint = " (where it is found automatically)" if not asked.output else f": give --kv-scales {path}"
    print(f"written to {path}{hint}")
    return 0
