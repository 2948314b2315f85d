"""The body of llama.cpp's `POST /completion`, and its translation into a completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from octavo.errors import RequestError
from octavo.server.bodies.protocol import RequestBody, Texts

# llama.cpp's value for a token that must not be drawn.
_NEVER = -100.0
# Fields that a completion has too, under the same names.
_SAME = (
    *("prompt", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "stream", "ignore_eos"),
    *("presence_penalty", "frequency_penalty"),
)
# Fields that a completion has under other names.
_RENAMED = {
    "repeat_penalty": "repetition_penalty",
    "n_probs": "logprobs",
    "grammar": "guided_grammar",
    "json_schema": "guided_json",
}


class LlamaCppBody(RequestBody):
    """`POST /completion`. `prompt`: a string, token ids, or a list of either."""

    prompt: Any
    n_predict: int | None = None
    max_tokens: int | None = None  # taken for `n_predict`, as by llama.cpp
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | Texts | None = None
    ignore_eos: bool | None = None
    logit_bias: Any = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    n_probs: int | None = None
    return_tokens: bool | None = None
    cache_prompt: bool | None = None
    id_slot: int | None = None

    bulky: ClassVar[tuple[str, ...]] = ("prompt", "stop", "logit_bias", "grammar", "json_schema")
    # What a client of this API calls the fields of the completion that its body becomes.
    completion_names: ClassVar[Mapping[str, str]] = {
        "max_tokens": "n_predict",
        **{name: other for other, name in _RENAMED.items()},
        "structured_outputs": "grammar",
    }

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    def completion(self) -> dict[str, Any]:
        """Return the fields of the equivalent completion body; raise `RequestError` for an invalid `logit_bias`."""
        limit = self.n_predict if self.n_predict is not None else self.max_tokens
        fields = {name: getattr(self, name) for name in _SAME}
        fields |= {name: getattr(self, other) for other, name in _RENAMED.items()}
        # Negative: no limit.
        fields["max_tokens"] = None if limit is not None and limit < 0 else limit
        fields["logprobs"] = self.n_probs or None
        fields["guided_grammar"] = self.grammar or None
        fields["logit_bias"] = _biases(self.logit_bias)
        return fields


def _biases(given: Any) -> dict[str, float] | None:
    """Return biases by token id: [[15043, 1.0], [29879, false]], or an object. `false` keeps a token out."""
    if not given:
        return None
    if isinstance(given, dict):
        pairs = list(given.items())
    elif isinstance(given, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in given):
        pairs = given
    else:
        raise RequestError("logit_bias must be a list of [token id, bias], or an object", param="logit_bias")
    biases = {}
    for token, bias in pairs:
        if isinstance(token, bool) or not isinstance(token, int | str) or not isinstance(bias, int | float):
            raise RequestError("logit_bias must have token ids and numbers, or false", param="logit_bias")
        try:
            biases[str(token)] = _NEVER if bias is False else float(bias)
        except OverflowError:
            raise RequestError("logit_bias must have finite numbers", param="logit_bias") from None
    return biases
