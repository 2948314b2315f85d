"""The bodies of llama.cpp's `POST /completion` and `POST /infill`, and their translation into a completion."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, ClassVar

from octavo.errors import FieldError, RequestError
from octavo.server.bodies.fields import RequestBody, taken
from octavo.server.bodies.openai_bodies import OF_ONE_ANSWER
from octavo.server.engine_client import TokenizerLike

# llama.cpp's value for a token that must not be drawn.
_NEVER = -100.0


@dataclass(kw_only=True)
class LlamaCppBody(RequestBody):
    """`POST /completion`."""

    PARAMETERS: ClassVar[Collection[str]] = tuple(
        name for name in (*OF_ONE_ANSWER, "logprobs") if name not in ("logit_bias", "structured_outputs")
    )
    CALLED: ClassVar[Mapping[str, str]] = {
        "max_tokens": "n_predict",
        "most_tokens": "max_tokens",
        "repetition_penalty": "repeat_penalty",
        "logprobs": "n_probs",
        "guided_grammar": "grammar",
        "guided_json": "json_schema",
    }
    SOURCES: ClassVar[Mapping[str, str]] = {"structured_outputs": "grammar"}

    prompt: Any = taken("a text, token ids, or a list of either", default=MISSING, bulky=True)
    stream: bool | None = taken("send the answer as it is written")
    most_tokens: int | None = taken("taken for n_predict, as by llama.cpp")
    logit_bias: Any = taken("biases by token id; false keeps a token out", bulky=True)
    guided_grammar: str | None = taken("a grammar of the answer", bulky=True)
    guided_json: dict[str, Any] | None = taken("a JSON Schema of the answer", bulky=True)
    return_tokens: bool | None = taken("return the ids of the answer's tokens")
    cache_prompt: bool | None = taken("has no effect")
    id_slot: int | None = taken("has no effect")

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    def completion(self) -> dict[str, Any]:
        """Return the fields of the equivalent completion body; raise `RequestError` for an invalid `logit_bias`."""
        limit = self.sampling.get("max_tokens", self.most_tokens)
        return {
            **self.sampling,
            "prompt": self.prompt,
            "max_tokens": None if limit in _NO_LIMIT else limit,
            "logprobs": self.sampling.get("logprobs") or None,
            "guided_grammar": self.guided_grammar or None,
            "guided_json": self.guided_json,
            "logit_bias": _biases(self.logit_bias),
        }


# llama.cpp's numbers for an answer without end, and for one that fills the context.
_NO_LIMIT = (-1, -2)


def _biases(given: Any) -> dict[str, float] | None:
    """Return biases by token id: [[15043, 1.0], [29879, false]], or an object. `false` keeps a token out."""
    if not given:
        return None
    if isinstance(given, dict):
        pairs = list(given.items())
    elif isinstance(given, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in given):
        pairs = given
    else:
        raise FieldError("logit_bias", "must be a list of [token id, bias], or an object")
    biases = {}
    for token, bias in pairs:
        if isinstance(token, bool) or not isinstance(token, int | str) or not isinstance(bias, int | float):
            raise FieldError("logit_bias", "must have token ids and numbers, or false")
        try:
            biases[str(token)] = _NEVER if bias is False else float(bias)
        except OverflowError:
            raise FieldError("logit_bias", "must have finite numbers") from None
    return biases


# Of the families that have them: Qwen and CodeGemma, StarCoder, SantaCoder, DeepSeek, CodeLlama, GLM.
_FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
)
_FILE_SEPARATORS = ("<|file_sep|>", "<file_sep>")
# Tokens with which these models end a middle, beside their end of sequence.
_ENDS = (
    *_FILE_SEPARATORS,
    *("<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|repo_name|>", "<repo_name>", "▁<EOT>", "<EOT>"),
)


@dataclass(kw_only=True)
class InfillBody(LlamaCppBody):
    """`POST /infill`: the fields of `/completion`, of which `prompt` is the beginning of the middle."""

    SOURCES: ClassVar[Mapping[str, str]] = {**LlamaCppBody.SOURCES, "prompt": "input_prefix"}

    prompt: str | None = taken("the beginning of the middle", bulky=True)
    input_prefix: str = taken("the text before", default=MISSING, bulky=True)
    input_suffix: str = taken("the text after", default=MISSING, bulky=True)
    input_extra: list[dict[str, Any]] | None = taken("other files: text and filename", bulky=True)


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """A model's tokens for filling in the middle.

    Attributes:
        file_separator: the token before another file's name; None if the model has none.
        ends: tokens that end the middle.
    """

    prefix: int
    suffix: int
    middle: int
    file_separator: int | None
    ends: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: TokenizerLike) -> InfillTokens:
        """Find a model's tokens by their names; raises `RequestError` if it has none."""
        for family in _FAMILIES:
            ids = _token_ids(tokenizer, family)
            if len(ids) == len(family):
                prefix, suffix, middle = ids
                separator = next(iter(_token_ids(tokenizer, _FILE_SEPARATORS)), None)
                return cls(prefix, suffix, middle, separator, (*ids, *_token_ids(tokenizer, _ENDS)))
        raise RequestError(
            "this model cannot fill in the middle: its vocabulary has no tokens for a prefix, a suffix and a middle, "
            f"such as {_FAMILIES[0][0]}",
            param="input_prefix",
        )

    def prompt(self, body: InfillBody, tokenizer: TokenizerLike, most: int) -> list[int]:
        """Return the prompt as tokens, of which there are at most `most`.

        As in llama.cpp, what is farthest from the middle is cut off first: extra files, then what is over three
        quarters of the room of the prefix and one quarter of the suffix.
        """
        beginning, started = tokenizer.encode("", True), tokenizer.encode(body.prompt or "", False)
        room = max(0, most - len(beginning) - len(started) - 3)
        prefix, suffix = tokenizer.encode(body.input_prefix, False), tokenizer.encode(body.input_suffix, False)
        suffix = suffix[: max(room // 4, room - len(prefix))]
        prefix = prefix[max(0, len(prefix) - (room - len(suffix))) :]
        extra = self._extra(body.input_extra or [], tokenizer)
        extra = extra[max(0, len(extra) - (room - len(prefix) - len(suffix))) :]
        return [*beginning, *extra, self.prefix, *prefix, self.suffix, *suffix, self.middle, *started]

    def _extra(self, files: list[dict[str, Any]], tokenizer: TokenizerLike) -> list[int]:
        token_ids: list[int] = []
        for place, file in enumerate(files):
            name, text = file.get("filename", ""), file.get("text", "")
            if not isinstance(name, str) or not isinstance(text, str):
                where = f"input_extra[{place}]"
                raise FieldError(where, "must have a text and a filename, which are strings")
            if self.file_separator is not None:
                token_ids.append(self.file_separator)
            token_ids += tokenizer.encode(f"{name}\n{text}\n" if name else f"{text}\n", False)
        return token_ids


def _token_ids(tokenizer: TokenizerLike, names: Iterable[str]) -> list[int]:
    """Return the ids of those of the names that are tokens."""
    encoded = ((name, tokenizer.encode(name, False)) for name in names)
    return [ids[0] for name, ids in encoded if len(ids) == 1 and tokenizer.id_to_token(ids[0]) == name]
