"""The sampling parameters of one request, with the names and meanings of vLLM's `SamplingParams`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

from octavo.errors import FieldError, shown
from octavo.kv_budget import KVBudget
from octavo.option import Options, option, options_of
from octavo.request_limits import RequestLimits
from octavo.structured_outputs import StructuredOutputsParams

MAX_LENGTH_PENALTY = 10.0
MAX_LOGPROBS = 20
MAX_TOP_K = 2**31 - 1
GREEDY_EPSILON = 1e-5
_LARGEST_BIAS = 100


def _biases(given: Mapping[Any, float]) -> dict[int, float]:
    """Return biases by token id; JSON's keys are texts."""
    try:
        biases = {int(key) if isinstance(key, str) else key: bias for key, bias in given.items()}
    except ValueError:
        raise FieldError("logit_bias", 'must have token ids as keys, such as "50256"') from None
    for token_id, bias in biases.items():
        if type(token_id) is not int or token_id < 0:
            raise FieldError("logit_bias", f"must have token ids as keys, got {shown(token_id)}")
        if type(bias) not in (int, float) or not -_LARGEST_BIAS <= bias <= _LARGEST_BIAS:
            problem = f"must have numbers between {-_LARGEST_BIAS} and {_LARGEST_BIAS}, got {shown(bias)}"
            raise FieldError("logit_bias", problem)
    return biases


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(Options):
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

    ERROR: ClassVar = FieldError

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
        needs="use_beam_search",
    )
    early_stopping: bool | Literal["never"] = option(
        False, "beam search: stop as soon as there are enough finished beams", needs="use_beam_search"
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
        (), "token ids that end the output, such as 1,2,3", limit="max_stop_token_ids", least=0, metavar="IDS"
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
        None,
        "numbers added to the logits of token ids, such as '{\"42\": -100}'",
        limit="max_logit_bias",
        read=_biases,
    )
    allowed_token_ids: Collection[int] | None = option(
        None,
        "the only token ids that may be sampled, such as 1,2,3",
        limit="max_allowed_token_ids",
        least=0,
        metavar="IDS",
    )
    bad_words: Sequence[str] = option(
        (),
        "text that the output must not contain; may be given several times",
        limit="max_bad_words",
        text_limit="max_bad_word_length",
    )
    include_stop_str_in_output: bool = option(False, "keep the stop string at the end of the output")
    structured_outputs: StructuredOutputsParams | None = option(  # noqa: RUF009 (the default is None)
        None,
        'constraint on the output, such as \'{"regex": "[0-9]+"}\' (docs/serve/structured_outputs.md)',
        read=StructuredOutputsParams.of,
    )
    kv_budget: KVBudget | None = option(  # noqa: RUF009 (the default is None)
        None,
        'keys and values to keep, such as \'{"mode": "sinks", "tokens": 2048}\' (docs/serve/kv_budgets.md)',
        read=KVBudget.of,
    )
    detokenize: bool = option(True, "turn the output into text; --no-detokenize gives token ids only")
    skip_special_tokens: bool = option(True, "leave special tokens out of the text")

    def _check_together(self) -> None:
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise FieldError("allowed_token_ids", "must not be empty")
        if self.num_sequences < self.n:
            raise FieldError("best_of", f"must be at least {self.n}, got {self.best_of}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            least, most = shown(self.min_tokens), shown(self.max_tokens)
            raise FieldError("min_tokens", f"({least}) must not exceed {{}} ({most})", "max_tokens")
        if self.stop and not self.detokenize:
            raise FieldError("stop", "strings need detokenize=True")
        self._check_structured()
        self._check_beams()

    def _check_structured(self) -> None:
        if self.structured_outputs is None:
            return
        # Otherwise no token might be left that both allow.
        for name in ("allowed_token_ids", "bad_words"):
            if getattr(self, name):
                raise FieldError(name, "cannot be combined with a structured output")
        if self.use_beam_search:
            raise FieldError("structured_outputs", "cannot be combined with use_beam_search")

    def _check_beams(self) -> None:
        if not self.use_beam_search:
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
        if "integer" in each.type_names:
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
