"""The body of llama.cpp's `POST /infill`: text between a prefix and a suffix, as editors ask for.

    [beginning] [extra files] PREFIX input_prefix SUFFIX input_suffix MIDDLE prompt      -> the model writes the middle

The three tokens are the model's own; a model that was not trained with any cannot do it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from octavo.errors import RequestError
from octavo.server.bodies.llamacpp_body import LlamaCppBody
from octavo.server.bodies.protocol import Objects
from octavo.server.engine_client import TokenizerLike

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
