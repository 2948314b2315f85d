"""`octavo calibrate --search`: look for a table of codecs, and compare it with the uniform ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from octavo import LLM, __version__
from octavo.attention import make_backend
from octavo.calibration.options import CalibrationOptions
from octavo.calibration.scales import calibrate
from octavo.calibration.search import Found, Probe, check_candidates, search
from octavo.calibration.text import Text
from octavo.errors import ConfigError
from octavo.kvcache.formats import KV_FORMATS, write_table
from octavo.runner.runner import ModelRunner
from octavo.workloads import report
from octavo.workloads.forward_text import Loss, windows_of
from octavo.workloads.quality import runner_of

_BLOCK_SIZE = 16
_HELD_OUT = 4  # times as many windows as the calibration uses, from the other half of the text
_DECIDE = 3  # number of windows between two of the search, which decide between the tables that it found


@dataclass(frozen=True, slots=True)
class Comparison:
    """A table of codecs and the uniform codecs, on the text of the search and on text held out from it.

    Attributes:
        model: the model's name.
        found: the table.
        uniform: the uniform codecs made of the candidates.
        codecs: each codec's size, and its loss on both texts; the table comes last.
        plain: perplexity on the held-out text with an unquantised cache.
        tokens: tokens of both texts.
    """

    model: str
    found: Found
    uniform: list[str]
    codecs: dict[str, tuple[int, Loss, Loss]]
    plain: float
    tokens: tuple[int, int]


@contextmanager
def loaded(options: dict[str, Any], length: int) -> Iterator[tuple[LLM, ModelRunner]]:
    """Load the model with a small cache, which calibration does not use."""
    small: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": length, "kv_cache_memory": "512MiB"}
    alone = {**options, "kv_cache_dtype": "auto", "swap_space": 0, "preemption_mode": "recompute"}
    with LLM(**{**small, **alone}) as llm:
        yield llm, runner_of(llm)


def run_search(asked: CalibrationOptions, options: dict[str, Any], text: Text, *, as_json: bool) -> int:
    """Search, write the table and print the comparison."""
    if "kv_cache_dtype" in options:
        raise ConfigError("--search chooses a codec for each layer: give --candidates instead of --kv-cache-dtype")
    compared = _compare(asked, options, text)
    path = Path(asked.output or "kv_cache_table.toml")
    formats = compared.found.formats
    write_table(
        path,
        [format.keys.name for format in formats],
        [format.values.name for format in formats],
        compared.model,
        _measured(compared, text.name),
    )
    if not as_json:
        print(_as_text(compared, path))
        return 0
    sizes = {name: size for name, (size, _, _) in compared.codecs.items()}
    same = [name for name in compared.uniform if sizes[name] == sizes[compared.found.dtype]]
    rows = [
        {"kv_cache_dtype": name, "bytes_per_token": size, "text": asdict(ours), "held_out": asdict(theirs)}
        for name, (size, ours, theirs) in compared.codecs.items()
    ]
    found = {"file": str(path), "bits": compared.found.bits, "same_bytes": same, "codecs": rows}
    print(report.as_json_line({"calibrate": "search", "version": __version__, **found}))
    return 0


def _compare(asked: CalibrationOptions, options: dict[str, Any], text: Text) -> Comparison:
    """Search for a table on the first half of the text, and measure codecs on it and on windows of the second half."""
    candidates = asked.candidates.split(",")
    check_candidates(candidates)
    with loaded(options, length := asked.window or 256) as (llm, runner):
        tokens = llm.tokenizer.encode(text.content)
        half, count = len(tokens) // 2, asked.windows or 2
        pieces = windows_of(tokens[:half], (1 + _DECIDE) * count, length, f"the first half of {text.name}")
        others = [piece for index, piece in enumerate(pieces) if index % (1 + _DECIDE)] or pieces
        seen, decide = _probe(runner, pieces[:: 1 + _DECIDE]), _probe(runner, others)
        found = search(
            seen, runner.model.kv_layers, candidates, asked.bits, decide=decide, exchanges=asked.exchanges, say=_say
        )
        held = _probe(runner, windows_of(tokens[half:], _HELD_OUT * count, length, f"the second half of {text.name}"))
        uniform = _uniform(candidates)
        losses = {name: (seen.loss(name), held.loss(name)) for name in uniform}
        if nearest := _nearest(seen, found.dtype, uniform):
            scales = None
            if KV_FORMATS[nearest].calibrated:
                scales = calibrate(
                    runner.model, runner.attention, nearest, seen.windows, method="mse", percentile=asked.percentile
                ).scales
            losses[nearest] = seen.loss(nearest, scales), held.loss(nearest, scales)
        losses.pop(found.dtype, None)  # the last row is the table's
        losses[found.dtype] = found.loss, held.loss(found.dtype)
        return Comparison(
            model=llm.core.config.model,
            found=found,
            uniform=uniform,
            codecs={name: (seen.bytes_per_token(name), *both) for name, both in losses.items()},
            plain=held.plain.perplexity,
            tokens=(seen.tokens, held.tokens),
        )


def _probe(runner: ModelRunner, pieces: list[list[int]]) -> Probe:
    device = runner.model.device
    return Probe(runner.model, lambda: make_backend(runner.attention.name, device), pieces, _BLOCK_SIZE)


def _as_text(compared: Comparison, path: Path) -> str:
    found, (seen, held) = compared.found, compared.tokens
    heading = ("KV cache", "bytes a token", "KL", "KL held out", "perplexity held out", "top-1 held out")
    rows: list[tuple[str, ...]] = [("unquantised", "", "", "", f"{compared.plain:.3f}", "")]
    rows += [
        (
            "the table" if name == found.dtype and name not in compared.uniform else name,
            str(size),
            f"{ours.kl:.5f}",
            f"{theirs.kl:.5f}",
            f"{theirs.perplexity:.3f}",
            f"{100 * theirs.agreement:.1f} %",
        )
        for name, (size, ours, theirs) in compared.codecs.items()
    ]
    lines = [
        f"a table of {found.bits:.2f} bits a number; losses over {seen:,} tokens, {held:,} held out",
        *report.columns(heading, rows),
        f"written to {path}: give --kv-cache-dtype {path}",
    ]
    return "\n".join(lines)


def _uniform(candidates: list[str]) -> list[str]:
    """Return the uniform codecs to compare a table of the candidates with."""
    return [name for name, format in KV_FORMATS.items() if {format.keys.name, format.values.name} <= set(candidates)]


def _nearest(probe: Probe, dtype: str, known: list[str]) -> str | None:
    """Return the smallest other codec that takes at least as many bytes as a cache in `dtype`; None if none does."""
    others = [name for name, format in KV_FORMATS.items() if not format.plain and name not in known]
    least = probe.bytes_per_token(dtype)
    return min(
        (name for name in others if probe.bytes_per_token(name) >= least), key=probe.bytes_per_token, default=None
    )


def _measured(compared: Comparison, text: str) -> list[str]:
    """Return the measurements as lines of TOML."""
    found = compared.found
    lines = [
        f'text = "{text}"'.replace("\\", "\\\\"),
        f"tokens = {compared.tokens[0]}",
        f"tokens_held_out = {compared.tokens[1]}",
        f"bits = {found.bits:.4f}",
        f"predicted_kl = {found.predicted:.6f}",
        f"bytes_per_token = {compared.codecs[found.dtype][0]}",
    ]
    lines += [
        f"added_kl_in_{name.replace('/', '_')} = [{', '.join(f'{cost[name]:.6f}' for cost in found.costs)}]"
        for name in list(found.costs[0])[1:]
    ]
    for name, (size, ours, held) in compared.codecs.items():
        title = "table" if name == found.dtype else name
        lines += ["", f"[measured.{title}]", f"bytes_per_token = {size}", f"kl = {ours.kl:.6f}"]
        lines += [f"kl_held_out = {held.kl:.6f}", f"perplexity_held_out = {held.perplexity:.4f}"]
        lines += [f"top1_held_out = {held.agreement:.4f}"]
    return lines


def _say(line: str) -> None:
    print(line, file=sys.stderr)
