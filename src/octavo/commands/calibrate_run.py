"""The implementation of `octavo calibrate`, apart from its options so that `--help` imports little."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from octavo import LLM, __version__
from octavo.attention import make_backend
from octavo.bench import report
from octavo.calibration.scales import calibrate
from octavo.calibration.search import Found, Loss, Probe, check_candidates, search
from octavo.calibration.text import Text, read_text, windows_of
from octavo.checkpoint.model_source import resolve_model
from octavo.commands.options import engine_options
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.kvcache.codec_table import kv_dtype, write_table
from octavo.kvcache.formats import KV_FORMATS, layer_formats
from octavo.models.kv_scale_file import Origin, path_beside, write_scales
from octavo.runner.runner import ModelRunner

_BLOCK_SIZE = 16
_HELD_OUT = 4  # times as many windows as the calibration uses, from the other half of the text
_DECIDE = 3  # number of windows between two of the search, which decide between the tables that it found


def run(args: argparse.Namespace) -> int:
    if not 0 < args.percentile <= 100:
        raise ConfigError(f"percentile must be above 0 and at most 100, got {args.percentile:g}")
    if args.exchanges < 0:
        raise ConfigError(f"exchanges must be 0 or more, got {args.exchanges}")
    options = engine_options(args)
    if options.get("executor") == "process":
        raise ConfigError("octavo calibrate reads the model's cache, which needs executor 'in_process'")
    text = read_text(args.data)
    return _search(args, options, text) if args.search else _scales(args, options, text)


def _scales(args: argparse.Namespace, options: dict[str, Any], text: Text) -> int:
    asked = EngineConfig.from_options(options).kv_cache_dtype
    asked = "fp8_e4m3" if asked == "auto" else asked
    with _loaded(options, length := args.window or 512) as (llm, runner):
        source = resolve_model(llm.core.config.model)
        model = runner.model
        dtype = kv_dtype(asked, str(model.dtype).removeprefix("torch."), len(model.kv_layers))
        if not any(format.calibrated for format in layer_formats(dtype, len(model.kv_layers))):
            known = ", ".join(name for name, format in KV_FORMATS.items() if format.calibrated)
            raise ConfigError(f"a KV cache in {dtype} needs no scales; those that do are {known}")
        windows = windows_of(llm.tokenizer.encode(text.content), args.windows or 8, length, text.name)
        found = calibrate(model, runner.attention, dtype, windows, method=args.method, percentile=args.percentile)
    method = f"percentile {args.percentile:g}" if args.method == "percentile" else args.method
    path = Path(args.output) if args.output else path_beside(source, dtype)
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
    beside = " (found there by itself)" if not args.output else f": give --kv-scales {path}"
    print(f"written to {path}{beside}")
    return 0


def _search(args: argparse.Namespace, options: dict[str, Any], text: Text) -> int:
    if "kv_cache_dtype" in options:
        raise ConfigError("--search looks for a table of codecs: leave out --kv-cache-dtype, give --candidates")
    candidates = args.candidates.split(",")
    check_candidates(candidates)
    with _loaded(options, length := args.window or 256) as (llm, runner):
        tokens = llm.tokenizer.encode(text.content)
        half, count = len(tokens) // 2, args.windows or 2
        device = runner.model.device

        def probe(pieces: list[list[int]]) -> Probe:
            return Probe(runner.model, lambda: make_backend(runner.attention.name, device), pieces, _BLOCK_SIZE)

        pieces = windows_of(tokens[:half], (1 + _DECIDE) * count, length, f"the first half of {text.name}")
        others = [piece for index, piece in enumerate(pieces) if index % (1 + _DECIDE)] or pieces
        seen = probe(pieces[:: 1 + _DECIDE])
        found = search(
            seen, runner.model.kv_layers, candidates, args.bits, decide=probe(others), exchanges=args.exchanges,
            say=_say,
        )  # fmt: skip
        held = probe(windows_of(tokens[half:], _HELD_OUT * count, length, f"the second half of {text.name}"))
        uniform = _uniform(candidates)
        losses = {name: (seen.loss(name), held.loss(name)) for name in uniform}
        if nearest := _nearest(seen, found.dtype, uniform):
            scales = None
            if KV_FORMATS[nearest].calibrated:
                scales = calibrate(
                    runner.model, runner.attention, nearest, seen.windows, method="mse", percentile=args.percentile
                ).scales
            losses[nearest] = seen.loss(nearest, scales), held.loss(nearest, scales)
        losses.pop(found.dtype, None)  # the last row is the table's
        losses[found.dtype] = found.loss, held.loss(found.dtype)
        sizes = {name: seen.bytes_per_token(name) for name in losses}
        name, plain, tokens_of = llm.core.config.model, held.plain, (seen.tokens, held.tokens)
    path = Path(args.output or "kv_cache_table.toml")
    write_table(
        path,
        [format.keys.name for format in found.formats],
        [format.values.name for format in found.formats],
        name,
        _measured(found, losses, sizes, text.name, tokens_of),
    )
    same = [name for name in uniform if sizes[name] == sizes[found.dtype]]
    if args.json:
        rows = [
            {"kv_cache_dtype": name, "bytes_per_token": sizes[name], "text": asdict(ours), "held_out": asdict(theirs)}
            for name, (ours, theirs) in losses.items()
        ]
        found_json = {"file": str(path), "bits": found.bits, "same_bytes": same, "codecs": rows}
        print(report.as_json_line({"calibrate": "search", "version": __version__, **found_json}))
        return 0
    print(f"a table of {found.bits:.2f} bits a number; losses over {tokens_of[0]:,} tokens, {tokens_of[1]:,} held out")
    heading = ("KV cache", "bytes a token", "KL", "KL held out", "perplexity held out", "top-1 held out")
    print(
        "\n".join(
            report.columns(
                heading,
                [("unquantised", "", "", "", f"{plain.perplexity:.3f}", "")]
                + [
                    (
                        *("the table" if name == found.dtype and name not in uniform else name, sizes[name]),
                        *(f"{ours.kl:.5f}", f"{theirs.kl:.5f}", f"{theirs.perplexity:.3f}"),
                        f"{100 * theirs.agreement:.1f} %",
                    )
                    for name, (ours, theirs) in losses.items()
                ],
            )
        )
    )
    print(f"written to {path}: give --kv-cache-dtype {path}")
    return 0


def _uniform(candidates: list[str]) -> list[str]:
    """Return the uniform codecs with which a table of the candidates can be compared."""
    return [name for name, format in KV_FORMATS.items() if {format.keys.name, format.values.name} <= set(candidates)]


def _nearest(probe: Probe, dtype: str, known: list[str]) -> str | None:
    """Return the smallest other codec that takes at least as many bytes as a cache in `dtype`; None if none does."""
    others = [name for name, format in KV_FORMATS.items() if not format.plain and name not in known]
    least = probe.bytes_per_token(dtype)
    return min(
        (name for name in others if probe.bytes_per_token(name) >= least), key=probe.bytes_per_token, default=None
    )


def _measured(
    found: Found, losses: dict[str, tuple[Loss, Loss]], sizes: dict[str, int], text: str, tokens: tuple[int, int]
) -> list[str]:
    """Return the measurements as lines of TOML."""
    lines = [
        f'text = "{text}"'.replace("\\", "\\\\"),
        f"tokens = {tokens[0]}",
        f"tokens_held_out = {tokens[1]}",
        f"bits = {found.bits:.4f}",
        f"predicted_kl = {found.predicted:.6f}",
        f"bytes_per_token = {sizes[found.dtype]}",
    ]
    lines += [
        f"added_kl_in_{name.replace('/', '_')} = [{', '.join(f'{cost[name]:.6f}' for cost in found.costs)}]"
        for name in list(found.costs[0])[1:]
    ]
    for name, (ours, held) in losses.items():
        title = "table" if name == found.dtype else name
        lines += ["", f"[measured.{title}]", f"bytes_per_token = {sizes[name]}", f"kl = {ours.kl:.6f}"]
        lines += [f"kl_held_out = {held.kl:.6f}", f"perplexity_held_out = {held.perplexity:.4f}"]
        lines += [f"top1_held_out = {held.agreement:.4f}"]
    return lines


@contextmanager
def _loaded(options: dict[str, Any], length: int) -> Iterator[tuple[LLM, ModelRunner]]:
    """Load the model with a small cache, which calibration does not use."""
    small: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": length, "kv_cache_memory": "512MiB"}
    alone = {**options, "kv_cache_dtype": "auto", "swap_space": 0, "preemption_mode": "recompute"}
    with LLM(**{**small, **alone}) as llm:
        runner = llm.core.runner
        assert isinstance(runner, ModelRunner), "the options name no other executor"
        yield llm, runner


def _say(line: str) -> None:
    print(line, file=sys.stderr)
