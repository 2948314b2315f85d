"""Flags made from declared options: `max_num_seqs` of `EngineConfig` becomes `--max-num-seqs`, and so on.

Options that are not given stay out of the namespace (`argparse.SUPPRESS`), so that only the declaration knows the
defaults, and an option can be passed on to another process exactly as it was given.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.option import Option, flag, options_of
from octavo.sampling_params import SamplingParams
from octavo.structured_outputs import StructuredOutputsParams

# Characters of an option's choices that fit on the line of its flag.
_LONGEST_CHOICES = 50


def add_options(
    parser: argparse.ArgumentParser,
    config: type[Any],
    *,
    omit: Collection[str] = (),
    positional_model: bool = False,
) -> None:
    """Add one flag per option that the dataclass `config` declares, in its groups.

    Args:
        omit: names of options that get no flag.
        positional_model: whether `model` may also be given as an argument without a flag.
    """
    if positional_model:
        parser.add_argument(
            "model_argument", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help="short for --model MODEL"
        )
    declared = options_of(config).values()
    _add_flags(parser, [option for option in declared if not option.internal and option.name not in omit])


def given_options(args: argparse.Namespace, config: type[Any], omit: Collection[str] = ()) -> dict[str, Any]:
    """Return the options of `config` that were given, by field name.

    Raises:
        ConfigError: two models were given.
    """
    names = [option.name for option in fields(config) if option.name not in omit]
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    if "model" in names and hasattr(args, "model_argument"):
        if "model" in given:
            raise ConfigError(f"two models were given: {args.model_argument} and --model {given['model']}")
        given["model"] = args.model_argument
    return given


def engine_argv(options: Mapping[str, Any]) -> list[str]:
    """Return flags equivalent to `options`; None has a flag only where a command may have another default."""
    declared = options_of(EngineConfig)
    given = {
        name: value
        for name, value in options.items()
        if (value is not None or declared[name].none) and not declared[name].internal
    }
    return [argument for name, value in given.items() for argument in declared[name].argv(value)]


def add_sampling_options(
    parser: argparse.ArgumentParser, *, omit: Collection[str] = (), defaults: Mapping[str, Any] | None = None
) -> None:
    """Add one flag per field of `SamplingParams` not in `omit`; `defaults` override those shown in `--help`."""
    declared = [each for each in options_of(SamplingParams).values() if each.name not in omit]
    shown = {**{each.name: each.default for each in declared}, **(defaults or {})}
    _add_flags(parser, [replace(each, default=shown[each.name], group="sampling options") for each in declared])


def _add_flags(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in options:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        help, default = option.help, option.default
        if "default" not in help and not option.is_table and default not in (MISSING, None, "", ()):
            shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
            shown = ",".join(map(str, default)) if isinstance(default, tuple) else shown
            help = f"{help} (default: {shown})"
        keywords = _keywords(option)
        if sum(map(len, keywords.get("choices", ()))) > _LONGEST_CHOICES:
            keywords["metavar"] = "NAME"
            help = f"{help}; one of {', '.join(option.choices)}"
        if option.metavar is not None:
            keywords["metavar"] = option.metavar
        groups[option.group].add_argument(
            flag(option.name), dest=option.name, default=argparse.SUPPRESS, help=help.replace("%", "%%"), **keywords
        )


def _keywords(option: Option) -> dict[str, Any]:
    """Return the argparse keywords for an option's type."""
    if option.is_switch:
        return {"action": argparse.BooleanOptionalAction}
    if option.record is StructuredOutputsParams:
        return {"type": _structured_outputs, "metavar": "JSON"}
    if any(each.has_token_keys for each in option.types):
        return {"type": _token_biases, "metavar": "JSON"}
    if option.is_list and option.has_texts:
        return {"action": "append", **({"choices": option.choices} if option.choices else {"metavar": "TEXT"})}
    if option.is_list:
        return {"type": _value_of(option), "metavar": "N,…"}
    if option.is_choice:
        return {"choices": option.choices, **({"type": _value_of(option)} if option.removed else {})}
    number = "X" if "number" in option.type_names else "N" if "integer" in option.type_names else "TEXT"
    metavar = option.unit.metavar if option.unit is not None else "|".join((number, *option.choices))
    return {"type": _value_of(option), "metavar": metavar, "action": _Merge if option.is_table else "store"}


def _value_of(option: Option) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return option.parse(text, "the value")
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


class _Merge(argparse.Action):
    """Joins the tables of a flag that is given several times."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, {**getattr(namespace, self.dest, {}), **values})


def _structured_outputs(text: str) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams.of(json.loads(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must describe an output: {error}") from error


def _token_biases(text: str) -> Mapping[int, float] | None:
    try:
        return SamplingParams(logit_bias=json.loads(text)).logit_bias
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; an example: '{{\"42\": -100}}'") from error
