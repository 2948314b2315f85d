"""The option `speculative_config`: which method drafts tokens, and how many."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from octavo.errors import ConfigError, shown
from octavo.option import json_object

METHODS = ("ngram", "suffix", "draft_model")

_BOUNDS = {"num_speculative_tokens": (1, 64), "prompt_lookup_min": (2, 16), "prompt_lookup_max": (2, 64)}


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Options for drafting tokens, with vLLM's names.

    Attributes:
        method: "ngram": from the request's own text; "suffix": also from what followed the same text in the prefix
            cache; "draft_model": as "suffix", and from a smaller model where that is more likely to be right.
        model: the smaller model, a name as for `--model`; it must have the same tokenizer.
        num_speculative_tokens: maximum number of tokens in a draft.
        prompt_lookup_min, prompt_lookup_max: length of the text that must occur before, in tokens. A draft is no longer
            than it.
    """

    method: str
    model: str | None = None
    num_speculative_tokens: int = 8
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 8

    @classmethod
    def parse(cls, given: str | dict[str, Any]) -> SpeculativeConfig:
        """Read a JSON object, or its text; raises `ConfigError` if a field is unknown or out of range."""
        values = json_object(given, "speculative_config")
        known = [field.name for field in fields(cls)]
        for name, value in values.items():
            if name not in known:
                raise ConfigError(f"speculative_config has no {name!r}; its fields are {', '.join(known)}")
            if name in _BOUNDS:
                least, most = _BOUNDS[name]
                if type(value) is not int or not least <= value <= most:
                    raise ConfigError(
                        f"{name} in speculative_config must be from {least} to {most}, got {shown(value)}"
                    )
        if (method := values.get("method")) not in METHODS:
            raise ConfigError(f"method in speculative_config must be one of {', '.join(METHODS)}, got {shown(method)}")
        model = values.get("model")
        if (method == "draft_model") != isinstance(model, str) or model == "":
            raise ConfigError(
                f"model in speculative_config names the model of method draft_model, and of no other: got method "
                f"{method} with model {shown(model)}"
            )
        config = cls(**values)
        if config.prompt_lookup_min > config.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min in speculative_config is {config.prompt_lookup_min}, but prompt_lookup_max is "
                f"{config.prompt_lookup_max}"
            )
        return config

    def __str__(self) -> str:
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None})
