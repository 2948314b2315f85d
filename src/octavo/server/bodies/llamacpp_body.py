"""The bodies of llama.cpp's `POST /completion` and `POST /infill`, and their translation into a completion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from octavo.errors import RequestError
from octavo.server.bodies.openai_bodies import CompletionBody, Objects, RequestBody, Texts
from octavo.server.engine_client import TokenizerLike

# llama.cpp's value for a token that must not be drawn.
_NEVER = -100.0
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


# Fields that a completion has too, with the same meaning.
_SAME = LlamaCppBody.model_fields.keys() & CompletionBody.model_fields.keys() - {"model", "max_tokens", "logit_bias"}


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


class InfillBody(LlamaCppBody):
    """`POST /infill`: the fields of `/completion`, of which `prompt` is the beginning of the middle."""

    prompt: str | None = None
    input_prefix: str
    input_suffix: str
    input_extra: Objects | None = None

    bulky: ClassVar[tuple[str, ...]] = (*LlamaCppBody.bulky, "input_prefix", "input_suffix", "input_extra")
    completion_names: ClassVar[Mapping[str, str]] = {**LlamaCppBody.completion_names, "prompt": "input_prefix"}


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
                raise RequestError(f"{where} must have a text and a filename, which are strings", param=where)
            if self.file_separator is not None:
                token_ids.append(self.file_separator)
            token_ids += tokenizer.encode(f"{name}\n{text}\n" if name else f"{text}\n", False)
        return token_ids


def _token_ids(tokenizer: TokenizerLike, names: Iterable[str]) -> list[int]:
    """Return the ids of those of the names that are tokens."""
    encoded = ((name, tokenizer.encode(name, False)) for name in names)
    return [ids[0] for name, ids in encoded if len(ids) == 1 and tokenizer.id_to_token(ids[0]) == name]
