"""The sampling parameters of one request, with the names and meanings of vLLM's `SamplingParams`."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from octavo.errors import RequestError, shown
from octavo.structured_outputs import StructuredOutputsParams

MAX_LENGTH_PENALTY = 10.0
MAX_LOGPROBS = 20
MAX_TOP_K = 2**31 - 1
GREEDY_EPSILON = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The parameters, validated at construction; raises `RequestError` naming the field and the value.

    The limits of an engine are checked separately; see `octavo.limits`.

    Attributes:
        n: number of completions of one prompt; they share the prompt's blocks.
        best_of: number of completions that are computed, of which the best `n` are returned: by log-probability per
            token, as by OpenAI, or by the score of the beam search. None means `n`.
        use_beam_search: search for the most likely completions with `best_of` beams instead of sampling.
        length_penalty: a finished beam scores sum(logprobs) / length ** length_penalty; above 0 favours long ones.
        early_stopping: when a beam search with `best_of` finished beams ends. True: at once; False: when the best
            unfinished beam is worse than all of them at its current length; "never": at any length it may reach.
        temperature: 0 is greedy.
        top_p, top_k, min_p: the usual filters; 1.0, 0 (or -1) and 0.0 switch them off.
        repetition_penalty: > 1 discourages tokens of the prompt and the output (Keskar et al. 2019).
        presence_penalty, frequency_penalty: OpenAI's penalties, over output tokens only, in [-2, 2].
        seed: makes sampling reproducible; None draws a seed at arrival.
        stop: strings that end the output; they are not part of it.
        stop_token_ids: token ids that end the output, besides the model's end-of-sequence; stored as a frozenset.
        ignore_eos: continue past the model's end-of-sequence token.
        max_tokens: maximum number of output tokens; None means up to `max_model_len`.
        min_tokens: number of output tokens before which end-of-sequence and stops are ignored.
        logprobs: number of most likely tokens reported for each output token; None is off.
        prompt_logprobs: the same for the prompt's tokens.
        logit_bias: numbers added to the logits of the given token ids.
        allowed_token_ids: the only tokens that may be sampled; None for all.
        bad_words: texts that the output must not contain, as separate words or within a word: the last token of a text
            is not sampled if it would complete the text's tokens. Where no other token is left (with few
            `allowed_token_ids`), a text of several tokens may come; a text of one token never does.
        include_stop_str_in_output: keep the stop string that ended the output, or the text of the token that did.
        structured_outputs: constraint on the output (`docs/structured_outputs.md`); may be given as a dictionary.
        detokenize: if False, return token ids only (text stays empty, and `stop` is not allowed).
        skip_special_tokens: leave special tokens out of the text.
    """

    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Collection[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Collection[int] | None = None
    bad_words: Sequence[str] = ()
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _token_id_set("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            allowed = _token_id_set("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise RequestError("allowed_token_ids must not be empty", param="allowed_token_ids")
            object.__setattr__(self, "allowed_token_ids", allowed)
        object.__setattr__(self, "bad_words", _tuple("bad_words", self.bad_words))
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise RequestError(
                    f"logit_bias must map token ids to numbers, got {shown(self.logit_bias)}", param="logit_bias"
                )
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        described: object = self.structured_outputs
        if isinstance(described, Mapping):
            object.__setattr__(self, "structured_outputs", StructuredOutputsParams.of(described))
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        self._validate()

    def _validate(self) -> None:
        _require_int("n", self.n, 1, None)
        if self.best_of is not None:
            _require_int("best_of", self.best_of, self.n, None)
        _require_number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise RequestError(
                f'early_stopping must be true, false or "never", got {shown(self.early_stopping)}',
                param="early_stopping",
            )
        _require_number("temperature", self.temperature, 0.0, math.inf)
        _require_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _require_int("top_k", self.top_k, 0, MAX_TOP_K)
        _require_number("min_p", self.min_p, 0.0, 1.0)
        _require_number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        _require_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _require_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _require_int("max_tokens", self.max_tokens, 1, None)
        _require_int("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({shown(self.min_tokens)}) must not exceed max_tokens ({shown(self.max_tokens)})",
                param="min_tokens",
            )
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                _require_int(name, value, 0, MAX_LOGPROBS)
        for name in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "use_beam_search",
            "include_stop_str_in_output",
        ):
            if not isinstance(value := getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {shown(value)}", param=name)
        for name in ("stop", "bad_words"):
            for text in getattr(self, name):
                if not isinstance(text, str) or not text:
                    raise RequestError(f"{name} must hold non-empty strings, got {shown(text)}", param=name)
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True", param="stop")
        for token_id, bias in (self.logit_bias or {}).items():
            _require_int("logit_bias", token_id, 0, None)
            _require_number("logit_bias", bias, -100.0, 100.0)
        self._validate_structured()
        self._validate_beams()

    def _validate_structured(self) -> None:
        if self.structured_outputs is None:
            return
        if not isinstance(self.structured_outputs, StructuredOutputsParams):
            raise RequestError(
                f"structured_outputs must be StructuredOutputsParams, got {shown(self.structured_outputs)}",
                param="structured_outputs",
            )
        # Otherwise no token might be left that both allow.
        for name in ("allowed_token_ids", "bad_words"):
            if getattr(self, name):
                raise RequestError(f"{name} cannot be combined with a structured output", param=name)
        if self.use_beam_search:
            raise RequestError("structured output cannot be combined with use_beam_search", param="structured_outputs")

    def _validate_beams(self) -> None:
        if not self.use_beam_search:
            if self.length_penalty != 1.0:
                raise RequestError("length_penalty needs use_beam_search", param="length_penalty")
            if self.early_stopping is not False:
                raise RequestError("early_stopping needs use_beam_search", param="early_stopping")
            return
        # Sampling filters have no meaning in a beam search; temperatures 1 and 0 are both accepted.
        allowed = {"temperature": (0, 1), "top_p": (1,), "top_k": (0,), "min_p": (0,)}
        for name, values in allowed.items():
            if (value := getattr(self, name)) not in values:
                wanted = " or ".join(str(each) for each in values)
                raise RequestError(f"{name} must be {wanted} with use_beam_search, got {value:g}", param=name)
        if self.stop:
            raise RequestError("stop strings cannot be combined with use_beam_search: use stop_token_ids", param="stop")

    @property
    def num_sequences(self) -> int:
        """The number of sequences computed for one prompt: `best_of` or `n`; with beam search, the beam width."""
        return self.n if self.best_of is None else self.best_of

    @property
    def width_param(self) -> str:
        """The name of the parameter that determines `num_sequences`."""
        return "n" if self.best_of is None else "best_of"

    @property
    def chooses(self) -> bool:
        """Whether the completions are chosen after all are computed, so that none can be streamed."""
        return self.use_beam_search or self.num_sequences > self.n

    @property
    def greedy(self) -> bool:
        """Whether decoding is greedy: the most likely token, without a random draw."""
        return self.temperature < GREEDY_EPSILON

    @property
    def needs_logprobs(self) -> bool:
        """Whether each token's logprob is needed, to be reported or to choose the best completions."""
        return self.logprobs is not None or self.chooses

    @property
    def counts_tokens(self) -> bool:
        """Whether sampling depends on which tokens a sequence has, because of penalties or bad words."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or bool(self.bad_words)
        )

    @property
    def follows_tokens(self) -> bool:
        """Whether a token can only be drawn or reported once the previous ones are known on the host."""
        return self.counts_tokens or self.needs_logprobs or self.use_beam_search or self.structured_outputs is not None

    def with_max_tokens(self, max_tokens: int) -> SamplingParams:
        """Return the parameters with the given output limit."""
        return replace(self, max_tokens=max_tokens, min_tokens=min(self.min_tokens, max_tokens))


def _token_id_set(name: str, value: object) -> frozenset[int]:
    token_ids = _tuple(name, value)
    for token_id in token_ids:
        # Checked before they become a set, in which 1, 1.0 and True are equal.
        _require_int(name, token_id, 0, None)
    return frozenset(token_ids)  # type: ignore[arg-type]


def _tuple(name: str, value: object) -> tuple[object, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise RequestError(f"{name} must be a list, got {shown(value)}", param=name)
    return tuple(value)


def _require_int(name: str, value: object, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {shown(value)}", param=name)
    if value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{name} must be {limits}, got {shown(value)}", param=name)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False


def _require_number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_finite(value):
        raise RequestError(f"{name} must be a finite number, got {shown(value)}", param=name)
    if value < low or value > high or (open_low and value == low):
        bound = "above" if open_low else "at least"
        limits = f"{bound} {low:g}" + ("" if high == math.inf else f" and at most {high:g}")
        raise RequestError(f"{name} must be {limits}, got {value:g}", param=name)
