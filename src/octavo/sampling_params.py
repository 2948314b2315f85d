"""The sampling parameters of one request, with the names and meanings of vLLM's `SamplingParams`."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args

from octavo.errors import FieldError, shown
from octavo.kv_budget import KVBudget
from octavo.option import option, options_of
from octavo.request_limits import RequestLimits
from octavo.structured_outputs import StructuredOutputsParams

MAX_LENGTH_PENALTY = 10.0
MAX_LOGPROBS = 20
MAX_TOP_K = 2**31 - 1
GREEDY_EPSILON = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The parameters, validated at construction; raises `RequestError` naming the field and the value.

    From each field come its check, the flag of `octavo generate` and its range in the API's description.

    The limits of an engine are checked separately; see `octavo.request_limits`.

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
        structured_outputs: constraint on the output (`docs/serve/structured_outputs.md`); may be given as a dictionary.
        kv_budget: how much of its keys and values each sequence keeps; may be given as a dictionary. None means the
            engine's, by default all.
        detokenize: if False, return token ids only (text stays empty, and `stop` is not allowed).
        skip_special_tokens: leave special tokens out of the text.
    """

    n: int = option(1, "completions of each prompt", least=1, limit="max_n")
    best_of: int | None = option(
        None,
        "compute this many completions and return the n most likely; the width of a beam search",
        least=1,
        limit="max_n",
    )
    use_beam_search: bool = option(False, "search for the most likely completions instead of sampling")
    length_penalty: float = option(
        1.0,
        "beam search: above 0 favours long completions, below 0 short ones",
        least=-MAX_LENGTH_PENALTY,
        most=MAX_LENGTH_PENALTY,
    )
    early_stopping: bool | Literal["never"] = option(
        False, "beam search: stop as soon as there are enough finished beams"
    )
    temperature: float = option(1.0, "0 always takes the most likely token; higher values vary more", least=0)
    top_p: float = option(
        1.0, "sample from the most likely tokens that together reach this probability", above=0, most=1
    )
    top_k: int = option(0, "sample from this many of the most likely tokens; 0: all", least=-1, most=MAX_TOP_K)
    min_p: float = option(
        0.0, "leave out tokens that are less likely than this fraction of the most likely one", least=0, most=1
    )
    repetition_penalty: float = option(
        1.0, "above 1: discourage tokens that occur in the prompt or the output", above=0
    )
    presence_penalty: float = option(
        0.0, "-2 to 2; above 0: discourage tokens that occur in the output", least=-2, most=2
    )
    frequency_penalty: float = option(
        0.0, "-2 to 2; above 0: discourage tokens by how often they occur in the output", least=-2, most=2
    )
    seed: int | None = option(None, "makes sampling reproducible", least=-(2**63), most=2**64 - 1)
    stop: str | Sequence[str] = option(
        (),
        "text that ends the output, and is left out of it; may be given several times",
        limit="max_stop_strings",
        text_limit="max_stop_string_length",
    )
    stop_token_ids: Collection[int] = option(
        (), "token ids that end the output, such as 1,2,3", limit="max_stop_token_ids"
    )
    ignore_eos: bool = option(False, "continue past the model's end-of-sequence token")
    max_tokens: int | None = option(16, "maximum number of output tokens", least=1)
    min_tokens: int = option(0, "minimum number of output tokens", least=0)
    logprobs: int | None = option(
        None,
        "report the log-probability of each output token, and of this many most likely ones",
        least=0,
        most=MAX_LOGPROBS,
    )
    prompt_logprobs: int | None = option(None, "the same for the prompt's tokens", least=0, most=MAX_LOGPROBS)
    logit_bias: Mapping[int, float] | None = option(
        None, "numbers added to the logits of token ids, such as '{\"42\": -100}'", limit="max_logit_bias"
    )
    allowed_token_ids: Collection[int] | None = option(
        None, "the only token ids that may be sampled, such as 1,2,3", limit="max_allowed_token_ids"
    )
    bad_words: Sequence[str] = option(
        (),
        "text that the output must not contain; may be given several times",
        limit="max_bad_words",
        text_limit="max_bad_word_length",
    )
    include_stop_str_in_output: bool = option(False, "keep the stop string at the end of the output")
    structured_outputs: StructuredOutputsParams | None = option(  # noqa: RUF009 (the default is None)
        None, 'constraint on the output, such as \'{"regex": "[0-9]+"}\' (docs/serve/structured_outputs.md)'
    )
    kv_budget: KVBudget | None = option(  # noqa: RUF009 (the default is None)
        None, 'keys and values to keep, such as \'{"mode": "sinks", "tokens": 2048}\' (docs/serve/kv_budgets.md)'
    )
    detokenize: bool = option(True, "turn the output into text; --no-detokenize gives token ids only")
    skip_special_tokens: bool = option(True, "leave special tokens out of the text")

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _token_id_set("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            allowed = _token_id_set("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise FieldError("allowed_token_ids", "must not be empty")
            object.__setattr__(self, "allowed_token_ids", allowed)
        object.__setattr__(self, "bad_words", _tuple("bad_words", self.bad_words))
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise FieldError("logit_bias", f"must map token ids to numbers, got {shown(self.logit_bias)}")
            object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        described: object = self.structured_outputs
        if isinstance(described, Mapping):
            object.__setattr__(self, "structured_outputs", StructuredOutputsParams.of(described))
        budget: object = self.kv_budget
        if isinstance(budget, Mapping):
            object.__setattr__(self, "kv_budget", KVBudget.of(budget))
        elif budget is not None and not isinstance(budget, KVBudget):
            raise FieldError("kv_budget", f"must be a KVBudget, got {shown(budget)}")
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        self._validate()

    def _validate(self) -> None:
        for name, is_optional, is_integer, low, high, is_open in _numbers():
            if (value := getattr(self, name)) is None and is_optional:
                continue
            if is_integer:
                _require_int(name, value, low, high)
            else:
                _require_number(name, value, low, high, open_low=is_open)
        if self.num_sequences < self.n:
            raise FieldError("best_of", f"must be at least {self.n}, got {self.best_of}")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise FieldError("early_stopping", f'must be true, false or "never", got {shown(self.early_stopping)}')
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            least, most = shown(self.min_tokens), shown(self.max_tokens)
            raise FieldError("min_tokens", f"({least}) must not exceed {{}} ({most})", "max_tokens")
        for name in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "use_beam_search",
            "include_stop_str_in_output",
        ):
            if not isinstance(value := getattr(self, name), bool):
                raise FieldError(name, f"must be true or false, got {shown(value)}")
        for name in ("stop", "bad_words"):
            for text in getattr(self, name):
                if not isinstance(text, str) or not text:
                    raise FieldError(name, f"must contain non-empty strings, got {shown(text)}")
        if self.stop and not self.detokenize:
            raise FieldError("stop", "strings need detokenize=True")
        for token_id, bias in (self.logit_bias or {}).items():
            _require_int("logit_bias", token_id, 0, math.inf)
            _require_number("logit_bias", bias, -100.0, 100.0)
        self._validate_structured()
        self._validate_beams()

    def _validate_structured(self) -> None:
        if self.structured_outputs is None:
            return
        if not isinstance(self.structured_outputs, StructuredOutputsParams):
            raise FieldError(
                "structured_outputs", f"must be StructuredOutputsParams, got {shown(self.structured_outputs)}"
            )
        # Otherwise no token might be left that both allow.
        for name in ("allowed_token_ids", "bad_words"):
            if getattr(self, name):
                raise FieldError(name, "cannot be combined with a structured output")
        if self.use_beam_search:
            raise FieldError("structured_outputs", "cannot be combined with use_beam_search")

    def _validate_beams(self) -> None:
        if not self.use_beam_search:
            if self.length_penalty != 1.0:
                raise FieldError("length_penalty", "needs use_beam_search")
            if self.early_stopping is not False:
                raise FieldError("early_stopping", "needs use_beam_search")
            return
        # Sampling filters have no meaning in a beam search; temperatures 1 and 0 are both accepted.
        allowed = {"temperature": (0, 1), "top_p": (1,), "top_k": (0,), "min_p": (0,)}
        for name, values in allowed.items():
            if (value := getattr(self, name)) not in values:
                wanted = " or ".join(str(each) for each in values)
                raise FieldError(name, f"must be {wanted} with use_beam_search, got {value:g}")
        if self.stop:
            raise FieldError("stop", "strings cannot be combined with use_beam_search: use stop_token_ids")

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
    def awaits_tokens(self) -> bool:
        """Whether the scheduler must know a step's result before it can plan the next: of beams, within a grammar, and
        if attention decides what is kept.
        """
        measures = self.kv_budget is not None and self.kv_budget.measures
        return self.use_beam_search or self.structured_outputs is not None or measures

    def with_max_tokens(self, max_tokens: int) -> SamplingParams:
        """Return the parameters with the given output limit."""
        return replace(self, max_tokens=max_tokens, min_tokens=min(self.min_tokens, max_tokens))


def check_limits(params: SamplingParams | Mapping[str, Any], limits: RequestLimits) -> None:
    """Refuse parameters that exceed a limit; counts are checked before entries are inspected.

    Args:
        params: the parameters, or by name those that were given.

    Raises:
        FieldError: a limit is exceeded; the message has the field, its count, the limit and its option.
    """
    value_of = params.get if isinstance(params, Mapping) else partial(getattr, params)
    for each in options_of(SamplingParams).values():
        if each.limit is None or (value := value_of(each.name)) is None:
            continue
        if int in each.types:
            if isinstance(value, int) and value > (most := getattr(limits, each.limit)):
                raise FieldError(each.name, f"must be at most {most} (--limits {each.limit}), got {shown(value)}")
            continue
        entries = (value,) if isinstance(value, str) else value
        limits.at_most(each.limit, each.name, len(entries), "entries")
        if each.text_limit is not None:
            longest = max((len(text) for text in entries if isinstance(text, str)), default=0)
            limits.at_most(each.text_limit, each.name, longest, "characters in one entry")
    stop = value_of("stop") or ()
    texts = [stop] if isinstance(stop, str) else [text for text in stop if isinstance(text, str)]
    size = sum(len(text.encode(errors="surrogatepass")) for text in texts)
    limits.at_most("max_stop_bytes", "stop", size, "bytes in all entries together")
    width = "n" if value_of("best_of") is None else "best_of"
    beams = value_of(width)
    if value_of("use_beam_search") and isinstance(beams, int) and beams > (most := limits.max_beam_width):
        raise FieldError(
            width, f"asks for {shown(beams)} beams, but at most {most} are allowed (--limits max_beam_width)"
        )


class _Number(NamedTuple):
    """A parameter that is a number, and its range; `is_open`: the lower bound is not in it."""

    name: str
    is_optional: bool
    is_integer: bool
    low: float
    high: float
    is_open: bool


@cache
def _numbers() -> tuple[_Number, ...]:
    """Return the parameters that are numbers, as their fields declare them."""
    numbers = []
    for each in options_of(SamplingParams).values():
        if {int, float} & {*each.types}:
            low = each.least if each.above is None else each.above
            assert low is not None
            high = math.inf if each.most is None else each.most
            is_optional = NoneType in get_args(each.hint)
            numbers.append(_Number(each.name, is_optional, int in each.types, low, high, each.above is not None))
    return tuple(numbers)


def _token_id_set(name: str, value: object) -> frozenset[int]:
    token_ids = _tuple(name, value)
    for token_id in token_ids:
        # Checked before they become a set, in which 1, 1.0 and True are equal.
        _require_int(name, token_id, 0, math.inf)
    return frozenset(token_ids)  # type: ignore[arg-type]


def _biases(logit_bias: Mapping[Any, float]) -> dict[int, float]:
    """Return biases by token id; JSON's keys are texts."""
    try:
        return {int(key) if isinstance(key, str) else key: bias for key, bias in logit_bias.items()}
    except ValueError:
        raise FieldError("logit_bias", 'must have token ids as keys, such as "50256"') from None


def _tuple(name: str, value: object) -> tuple[object, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise FieldError(name, f"must be a list, got {shown(value)}")
    return tuple(value)


def _require_int(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise FieldError(name, f"must be an integer, got {shown(value)}")
    if not low <= value <= high:
        limits = f"at least {low}" if high == math.inf else f"between {low} and {high}"
        raise FieldError(name, f"must be {limits}, got {shown(value)}")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False


def _require_number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_finite(value):
        raise FieldError(name, f"must be a finite number, got {shown(value)}")
    if value < low or value > high or (open_low and value == low):
        bound = "above" if open_low else "at least"
        limits = f"{bound} {low:g}" + ("" if high == math.inf else f" and at most {high:g}")
        raise FieldError(name, f"must be {limits}, got {value:g}")
