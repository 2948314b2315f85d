"""`octavo quality`: measure the quality loss of KV cache codecs, or of a KV budget."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.commands.common_options import add_json_option
from octavo.commands.options import add_options, given_options
from octavo.config import EngineConfig, checked_kv_cache_dtype
from octavo.errors import ConfigError
from octavo.kv_budget import KVBudget
from octavo.kvcache.formats import KV_FORMATS
from octavo.option import Options, option
from octavo.workloads import report
from octavo.workloads.plots import require_plot

if TYPE_CHECKING:
    from octavo.llm import LLM

EXIT_WORSE = 1

_BEYOND = 1 << 20  # tokens of a context that sinks go beyond

DESCRIPTION = """\
Compare codecs of the KV cache, or KV budgets (--kv-budget), with the full-precision, unlimited cache: perplexity,
retrieval and, for codecs, KL divergence and agreement.
"""


_quality = partial(option, group="quality options")


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityOptions(Options):
    """The options of `octavo quality`."""

    codecs: str | None = _quality(
        None, "codecs to compare, or .toml files with a codec for each layer; all: every codec", metavar="NAME,…"
    )
    windows: int = _quality(6, "pieces of text", least=1)
    window: int | None = _quality(None, "tokens of each piece (default: 512, or four times the budget)", least=1)
    needle_lengths: Sequence[int] = _quality(
        (),
        "lengths of the texts in which a pass key is hidden (default: 512,1024; with --kv-budget: five up to the "
        "model's context, and twice that with sinks)",
        least=1,
    )
    max_ppl_increase: float | None = _quality(
        None, "exit with 1 if perplexity grows by more than this fraction, such as 0.01"
    )
    plot: str | None = _quality(None, "write the table as a PNG; needs matplotlib", metavar="FILE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_option(parser)
    add_options(parser, QualityOptions)
    add_options(parser, EngineConfig, positional_model=True)


def run(args: argparse.Namespace) -> int:
    asked, engine = QualityOptions(**given_options(args, QualityOptions)), given_options(args, EngineConfig)
    if (budget := engine.pop("kv_budget", None)) is not None:
        return _compare_budgets(_budgets(budget), asked, engine, as_json=args.json)
    window, needle_lengths = asked.window or 512, asked.needle_lengths or (512, 1024)
    codecs = _codecs(asked.codecs, engine.pop("kv_cache_dtype", None))
    if asked.plot:
        require_plot(asked.plot)

    from octavo import LLM, __version__
    from octavo.workloads.quality import measure, plot

    longest = max(window, *needle_lengths) + 160
    defaults: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": longest, "kv_cache_memory": "512MiB"}

    def make(codec: str) -> LLM:
        options = {**defaults, **engine, "kv_cache_dtype": codec}
        if codec == "auto" or (codec in KV_FORMATS and not KV_FORMATS[codec].calibrated):
            # The scales are for those codecs that have any; the unquantised cache is compared too.
            for name in ("kv_scales", "calculate_kv_scales"):
                options.pop(name, None)
        return LLM(**options)

    results = measure(make, codecs, windows=asked.windows, window=window, needle_lengths=needle_lengths)
    if asked.plot:
        plot(results, asked.plot)
    rows = [asdict(result) for result in results]
    if args.json:
        print(report.as_json_line({"bench": "quality", "version": __version__, "codecs": rows}))
    else:
        heading = ("KV cache", "bytes a token", "perplexity", "increase", "KL", "top-1", "needle", "diverges at")
        lines = [
            (
                *(row["kv_cache_dtype"], row["bytes_per_token"], f"{row['perplexity']:.3f}"),
                *(f"{100 * row['ppl_increase']:+.2f} %", f"{row['kl']:.5f}", f"{100 * row['top1']:.1f} %"),
                *(f"{100 * row['needle']:.0f} %", f"{row['diverges_at']:.1f}"),
            )
            for row in rows
        ]
        print("\n".join(report.columns(heading, lines)))
    limit = asked.max_ppl_increase
    return EXIT_WORSE if limit is not None and any(result.ppl_increase > limit for result in results) else 0


def _compare_budgets(budgets: list[KVBudget], asked: QualityOptions, engine: dict[str, Any], *, as_json: bool) -> int:
    codecs = _codecs(asked.codecs, None) if asked.codecs else []
    if asked.plot:
        require_plot(asked.plot)
    from octavo import LLM, __version__
    from octavo.workloads.budget_quality import measure, plot

    window = asked.window or 4 * max(budget.tokens for budget in budgets)
    defaults: dict[str, Any] = {"max_num_seqs": 4, "kv_cache_memory": "1GiB", "max_num_batched_tokens": 512}

    def make(kept: KVBudget | None, codec: str | None) -> LLM:
        limits: dict[str, Any] = {} if kept is None else {"kv_budget": str(kept)}
        if kept is not None and kept.slides:
            limits["max_model_len"] = _BEYOND
        if codec is not None:
            limits["kv_cache_dtype"] = codec
        return LLM(**{**defaults, **engine, **limits})

    results = measure(make, budgets, codecs, window=window, needle_lengths=asked.needle_lengths)
    if asked.plot:
        plot(results, asked.plot)
    if as_json:
        rows = [asdict(result) for result in results]
        print(report.as_json_line({"bench": "quality", "version": __version__, "budgets": rows}))
    else:
        needles = [f"needle in {length:,}" for length in results[0].needle]
        questions = ("question", "next turn", "same answer")
        heading = ("KV budget", "cache", "MiB", "perplexity", "after it", *needles, *questions, "sums")
        lines = [
            (
                *(result.budget or "everything", result.kv_cache_dtype, f"{result.num_bytes / 2**20:.2f}"),
                *(_figure(result.perplexity_within), _figure(result.perplexity_after)),
                *map(_percent, (*result.needle.values(), *result.questions, result.sums)),
            )
            for result in results
        ]
        print("\n".join(report.columns(heading, lines)))
    limit, dense = asked.max_ppl_increase, results[0].perplexity_after
    if limit is None or dense is None:
        return 0
    worst = max(result.perplexity_after or 0.0 for result in results[1:])
    return EXIT_WORSE if worst > dense * (1 + limit) else 0


def _budgets(given: str | dict[str, Any]) -> list[KVBudget]:
    """Read a budget, or a JSON list of them."""
    if isinstance(given, str) and given.lstrip().startswith("["):
        try:
            found = json.loads(given)
        except ValueError as error:
            raise ConfigError(f"--kv-budget is not JSON: {error}") from error
        if not found:
            raise ConfigError("--kv-budget is an empty list: give at least one budget")
        return [KVBudget.parse(each) for each in found]
    return [KVBudget.parse(given)]


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def _codecs(given: str | None, asked: str | None) -> list[str]:
    names = given.split(",") if given else [asked] if asked else []
    every = [name for name, format in KV_FORMATS.items() if not format.plain]
    names = [one for name in names for one in (every if name == "all" else [name])]
    for name in names:
        checked_kv_cache_dtype(name)  # before a model is loaded
    if not names:
        raise ConfigError("name the codecs to compare: --kv-cache-dtype NAME, --codecs NAME,… or --codecs all")
    return names
