"""KV budgets: how much of its keys and values a sequence keeps (docs/serve/kv_budgets.md).

    mode      keeps                                                                  published as
    sinks     the first block, and the most recent tokens: `tokens` in all           StreamingLLM (Xiao et al. 2024)

A budget that a sequence never exceeds changes nothing: it computes the same bits as without one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from octavo.errors import ConfigError, FieldError, shown
from octavo.option import json_object

MODES = ("sinks",)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVBudget:
    """A budget of one sequence.

    Attributes:
        mode: see above.
        tokens: the most tokens whose keys and values are kept, in layers without a sliding window.
    """

    mode: str
    tokens: int

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> KVBudget:
        """Read a JSON object; raises `FieldError` naming what is wrong with it."""
        names = [field.name for field in fields(cls)]
        for name in given:
            if name not in names:
                raise FieldError("kv_budget", f"has no {shown(name)}; its fields are {', '.join(names)}")
        if (mode := given.get("mode")) not in MODES:
            raise FieldError("kv_budget.mode", f"must be one of {', '.join(MODES)}, got {shown(mode)}")
        tokens = given.get("tokens")
        if type(tokens) is not int or tokens < 1:
            raise FieldError("kv_budget.tokens", f"must be a positive integer, got {shown(tokens)}")
        return cls(mode=str(mode), tokens=tokens)

    @classmethod
    def parse(cls, given: str | Mapping[str, Any]) -> KVBudget:
        """Read an option, a JSON object or its text; raises `ConfigError`."""
        values = json_object(given, "kv_budget")
        try:
            return cls.of(values)
        except FieldError as error:
            raise ConfigError(str(error)) from error

    def __str__(self) -> str:
        return json.dumps(asdict(self))


def choose_budget(
    given: KVBudget | None, default: KVBudget | None, *, block_size: int, longest: int, refusal: str
) -> KVBudget | None:
    """Return the budget of a request; None if it keeps everything.

    Args:
        given: the request's own.
        default: the engine's, which is also the most that a request may have.
        longest: context length of the model, beyond which it was not trained to attend.
        refusal: why the model cannot have budgets; empty if it can.

    Raises:
        FieldError: the request's budget is not within the engine's, or makes no sense here.
    """
    budget = default if given is None else given
    if budget is None:
        return None
    if refusal:
        raise FieldError("kv_budget", f"is not possible here: {refusal}")
    if given is not None and default is not None and (given.mode != default.mode or given.tokens > default.tokens):
        raise FieldError("kv_budget", f"must be within this server's, {default}, got {given}")
    if not 2 * block_size <= budget.tokens <= longest:
        numbers = f"must be from {2 * block_size}, two KV blocks, to {longest}, the model's context"
        raise FieldError("kv_budget.tokens", f"{numbers}, got {budget.tokens}")
    return budget
