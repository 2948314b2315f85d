"""Flags made from dataclass fields: `max_num_seqs` of `EngineConfig` is `--max-num-seqs`, and so for every field.

Options that are not given stay out of the namespace (`argparse.SUPPRESS`): the dataclass alone knows the defaults,
and an option can be passed on to another process exactly as it came.
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
from octavo.option import flag
from octavo.sampling_params import SamplingParams
from octavo.structured_outputs import StructuredOutputsParams

_SAMPLING_HELP = {
    "n": "completions of each prompt",
    "best_of": "compute this many and return the likeliest n; the width of a beam search",
    "use_beam_search": "look for the likeliest completions instead of drawing tokens",
    "length_penalty": "beams: above 0 gains long ones, below 0 short ones",
    "early_stopping": "beams: end as soon as there are enough finished ones",
    "temperature": "0 takes the most likely token; higher is more varied",
    "top_p": "sample from the most likely tokens that together reach this probability",
    "top_k": "sample from this many most likely tokens; 0: all",
    "min_p": "leave out tokens less likely than this share of the most likely one",
    "repetition_penalty": "above 1 discourages tokens of the prompt and the output",
    "presence_penalty": "discourages tokens that the output has, -2 to 2",
    "frequency_penalty": "discourages tokens by how often the output has them, -2 to 2",
    "seed": "makes sampling reproducible",
    "stop": "a text that ends the output and is left out of it; may be given several times",
    "stop_token_ids": "token ids that end the output, as 1,2,3",
    "ignore_eos": "go on past the model's end-of-sequence token",
    "max_tokens": "most output tokens",
    "min_tokens": "no end before this many output tokens",
    "logprobs": "report this many most likely tokens beside each output token",
    "prompt_logprobs": "the same for the prompt's tokens",
    "logit_bias": "added to the logits of token ids, as '{\"42\": -100}'",
    "structured_outputs": 'what the output must look like, as \'{"regex": "[0-9]+"}\' (docs/structured_outputs.md)',
    "allowed_token_ids": "the only token ids that may be drawn, as 1,2,3",
    "bad_words": "a text that the output must not hold; may be given several times",
    "include_stop_str_in_output": "keep the stop string that ended the output",
    "detokenize": "turn the output into text; --no-detokenize gives token ids only",
    "skip_special_tokens": "leave special tokens out of the text",
}


def add_options(parser: argparse.ArgumentParser, title: str, config: type[Any], omit: Collection[str] = ()) -> None:
    """One flag per field of the dataclass `config`, whose fields carry their help, in a group called `title`."""
    hints = get_type_hints(config)
    group = parser.add_argument_group(title)
    for option in fields(config):
        if option.name in omit:
            continue
        _add_field(group, option, hints[option.name], option.metadata["help"], option.default)


def given_options(args: argparse.Namespace, config: type[Any], omit: Collection[str] = ()) -> dict[str, Any]:
    """The options of `config` that were given, by field name."""
    names = [option.name for option in fields(config) if option.name not in omit]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def add_engine_options(parser: argparse.ArgumentParser, *, positional_model: bool = False) -> None:
    """One flag per field of `EngineConfig`; with `positional_model`, the model may also stand alone as MODEL."""
    if positional_model:
        parser.add_argument(
            "model_argument", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help="short for --model MODEL"
        )
    limits = [limit.name for limit in fields(RequestLimits)]
    add_options(parser, "engine options", EngineConfig, omit=limits)
    add_options(parser, "limits of a request", RequestLimits)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options that were given, by field name.

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
    """Command-line flags equivalent to `options`; None has no flag and is the default wherever it is allowed."""
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
    """One flag per field of `SamplingParams`, except those in `omit`; `defaults` are the command's own."""
    hints = get_type_hints(SamplingParams)
    group = parser.add_argument_group("sampling options")
    for option in fields(SamplingParams):
        if option.name not in omit:
            default = (defaults or {}).get(option.name, option.default)
            _add_field(group, option, hints[option.name], _SAMPLING_HELP[option.name], default)


def _add_field(group: argparse._ArgumentGroup, option: Field[Any], hint: object, help: str, default: object) -> None:
    keywords = value_keywords(hint)
    if "default" not in help and not (default is MISSING or default is None or default in ("", ())):
        shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
        help = f"{help} (default: {shown})"
    group.add_argument(
        flag(option.name), dest=option.name, default=argparse.SUPPRESS, help=help.replace("%", "%%"), **keywords
    )


def value_keywords(hint: object) -> dict[str, Any]:
    """The argparse keywords for a value of type `hint`."""
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
        raise argparse.ArgumentTypeError(f"no description of an output: {error}") from error


def _token_biases(text: str) -> dict[int, float]:
    try:
        return {int(token_id): float(bias) for token_id, bias in json.loads(text).items()}
    except (AttributeError, TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"must be a JSON object as '{{\"42\": -100}}', got {text!r}") from None
