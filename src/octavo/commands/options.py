"""Flags made from dataclass fields: `max_num_seqs` of `EngineConfig` becomes `--max-num-seqs`, and so on.

Options that are not given stay out of the namespace (`argparse.SUPPRESS`), so that only the dataclass knows the
defaults, and an option can be passed on to another process exactly as it was given.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from octavo.commands.common_options import integer
from octavo.config import EngineConfig, parse_count
from octavo.errors import ConfigError
from octavo.limits import RequestLimits
from octavo.option import REMOVED_VALUES, flag, replacement_of
from octavo.sampling_params import SamplingParams
from octavo.structured_outputs import StructuredOutputsParams

ENGINE_GROUPS: dict[str, tuple[str, ...]] = {
    "model options": (
        *("model", "max_model_len", "dtype", "quantization", "chat_template", "generation_config", "pooling"),
    ),
    "KV cache options": (
        *("kv_cache_memory", "gpu_memory_utilization", "num_blocks", "block_size"),
        *("kv_cache_dtype", "kv_scales", "calculate_kv_scales"),
        *("enable_prefix_caching", "prefix_cache", "eviction_policy", "pin_budget", "pin_tenant_share"),
    ),
    "options for memory below the KV cache (docs/tiers.md)": (
        *("swap_space", "kv_host_memory", "kv_demotion", "kv_disk", "kv_disk_size"),
        *("kv_remote", "kv_remote_secret", "kv_remote_ttl"),
    ),
    "scheduling options": (
        *("max_num_seqs", "max_num_batched_tokens", "itl_slo_ms", "scheduling_policy", "queue_tenant_share"),
        *("preemption_mode", "async_scheduling"),
    ),
    "execution options": (
        *("device", "num_threads", "attention_backend", "deterministic", "seed"),
        *("enforce_eager", "executor", "record_plans"),
    ),
    "limits: the maximum of each (docs/limits.md)": tuple(limit.name for limit in fields(RequestLimits)),
}
"""The groups of `--help` and their options, which are all fields of `EngineConfig`, each once."""

_SAMPLING_HELP = {
    "n": "completions of each prompt",
    "best_of": "compute this many completions and return the n most likely; the width of a beam search",
    "use_beam_search": "search for the most likely completions instead of sampling",
    "length_penalty": "beam search: above 0 favours long completions, below 0 short ones",
    "early_stopping": "beam search: stop as soon as there are enough finished beams",
    "temperature": "0 always takes the most likely token; higher values vary more",
    "top_p": "sample from the most likely tokens that together reach this probability",
    "top_k": "sample from this many of the most likely tokens; 0: all",
    "min_p": "leave out tokens that are less likely than this fraction of the most likely one",
    "repetition_penalty": "above 1: discourage tokens that occur in the prompt or the output",
    "presence_penalty": "-2 to 2; above 0: discourage tokens that occur in the output",
    "frequency_penalty": "-2 to 2; above 0: discourage tokens by how often they occur in the output",
    "seed": "makes sampling reproducible",
    "stop": "text that ends the output, and is left out of it; may be given several times",
    "stop_token_ids": "token ids that end the output, such as 1,2,3",
    "ignore_eos": "continue past the model's end-of-sequence token",
    "max_tokens": "maximum number of output tokens",
    "min_tokens": "minimum number of output tokens",
    "logprobs": "report the log-probability of each output token, and of this many most likely ones",
    "prompt_logprobs": "the same for the prompt's tokens",
    "logit_bias": "numbers added to the logits of token ids, such as '{\"42\": -100}'",
    "structured_outputs": 'constraint on the output, such as \'{"regex": "[0-9]+"}\' (docs/structured_outputs.md)',
    "allowed_token_ids": "the only token ids that may be sampled, such as 1,2,3",
    "bad_words": "text that the output must not contain; may be given several times",
    "include_stop_str_in_output": "keep the stop string at the end of the output",
    "detokenize": "turn the output into text; --no-detokenize gives token ids only",
    "skip_special_tokens": "leave special tokens out of the text",
}


def add_options(parser: argparse.ArgumentParser, groups: Mapping[str, Sequence[str]], config: type[Any]) -> None:
    """Add one flag per field of the dataclass `config`, whose fields carry their help.

    Args:
        groups: names of fields by the title of their group in `--help`, in the order in which they are listed.
    """
    hints = get_type_hints(config)
    declared = {option.name: option for option in fields(config)}
    for title, names in groups.items():
        group = parser.add_argument_group(title)
        for name in names:
            option = declared[name]
            _add_field(group, option, hints[name], option.metadata["help"], option.default, option.metadata["metavar"])


def given_options(args: argparse.Namespace, config: type[Any], omit: Collection[str] = ()) -> dict[str, Any]:
    """Return the options of `config` that were given, by field name."""
    names = [option.name for option in fields(config) if option.name not in omit]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def add_engine_options(parser: argparse.ArgumentParser, *, positional_model: bool = False) -> None:
    """Add one flag per field of `EngineConfig`; with `positional_model`, also a positional argument MODEL."""
    if positional_model:
        parser.add_argument(
            "model_argument", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help="short for --model MODEL"
        )
    add_options(parser, ENGINE_GROUPS, EngineConfig)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine options that were given, by field name.

    Raises:
        ConfigError: two models were given.
    """
    given = given_options(args, EngineConfig)
    if hasattr(args, "model_argument"):
        if "model" in given:
            raise ConfigError(f"two models were given: {args.model_argument} and --model {given['model']}")
        given["model"] = args.model_argument
    return given


def engine_argv(options: Mapping[str, Any]) -> list[str]:
    """Return flags equivalent to `options`; None has no flag, because it is the default wherever it is allowed."""
    argv: list[str] = []
    for name, value in options.items():
        if isinstance(value, bool):
            argv.append(flag(name) if value else flag("no_" + name))
        elif value is not None:
            argv.append(f"{flag(name)}={value}")
    return argv


def add_sampling_options(
    parser: argparse.ArgumentParser, *, omit: Collection[str] = (), defaults: Mapping[str, Any] | None = None
) -> None:
    """Add one flag per field of `SamplingParams` not in `omit`; `defaults` override those shown in `--help`."""
    hints = get_type_hints(SamplingParams)
    group = parser.add_argument_group("sampling options")
    for option in fields(SamplingParams):
        if option.name not in omit:
            default = (defaults or {}).get(option.name, option.default)
            _add_field(group, option, hints[option.name], _SAMPLING_HELP[option.name], default)


def _add_field(
    group: argparse._ArgumentGroup,
    option: Field[Any],
    hint: object,
    help: str,
    default: object,
    metavar: str | None = None,
) -> None:
    keywords = value_keywords(hint)
    if metavar is not None:
        keywords["metavar"] = metavar
    if option.name in REMOVED_VALUES:
        keywords["type"] = _still_accepted(option.name)
    if "default" not in help and not (default is MISSING or default is None or default in ("", ())):
        shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
        help = f"{help} (default: {shown})"
    group.add_argument(
        flag(option.name), dest=option.name, default=argparse.SUPPRESS, help=help.replace("%", "%%"), **keywords
    )


def _still_accepted(name: str) -> Callable[[str], str]:
    def still_accepted(text: str) -> str:
        if says := replacement_of(name, text):
            raise argparse.ArgumentTypeError(says)
        return text

    return still_accepted


def value_keywords(hint: object) -> dict[str, Any]:
    """Return the argparse keywords for a value of type `hint`."""
    members = [m for m in (get_args(hint) if _is_union(hint) else (hint,)) if m is not type(None)]
    literals = [value for m in members if get_origin(m) is Literal for value in get_args(m)]
    origins = {get_origin(m) for m in members}
    if bool in members:
        return {"action": argparse.BooleanOptionalAction}
    if StructuredOutputsParams in members:
        return {"type": _structured_outputs, "metavar": "JSON"}
    if Mapping in origins:
        return {"type": _token_biases, "metavar": "JSON"}
    if Sequence in origins or Collection in origins:
        of_text = any(get_args(m) == (str,) for m in members)
        return {"action": "append", "metavar": "TEXT"} if of_text else {"type": _token_ids, "metavar": "IDS"}
    if literals and int in members:
        return {"type": _integer_or(literals), "metavar": "|".join(("N", *literals))}
    if literals:
        return {"choices": literals}
    if str in members:
        return {"metavar": "SIZE" if int in members else "TEXT"}
    return {"type": float, "metavar": "X"} if float in members else {"type": integer, "metavar": "N"}


def _is_union(hint: object) -> bool:
    return get_origin(hint) in (Union, UnionType)


def _integer_or(words: Sequence[str]) -> Callable[[str], int | str]:
    def integer_or_word(text: str) -> int | str:
        try:
            return text if text in words else parse_count(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be an integer or {' or '.join(words)}, got {text!r}") from None

    return integer_or_word


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be token ids such as 1,2,3, got {text!r}") from None


def _structured_outputs(text: str) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams.of(json.loads(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must describe an output: {error}") from error


def _token_biases(text: str) -> dict[int, float]:
    try:
        return {int(token_id): float(bias) for token_id, bias in json.loads(text).items()}
    except (AttributeError, TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"must be a JSON object as '{{\"42\": -100}}', got {text!r}") from None
