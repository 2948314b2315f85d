"""A GGUF file's vocabulary as a `tokenizers.Tokenizer`.

GGUF names a vocabulary's pre-tokenizer instead of describing it. The meanings of the names are those of llama.cpp
(src/llama-vocab.cpp). transformers interprets some names differently: it takes "smollm" for plain GPT-2, although
SmolLM was trained with every digit split off first, so that "a  1" becomes different tokens there.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from octavo.errors import CorruptModelError, OctavoError, UnsupportedModelError

if TYPE_CHECKING:
    from octavo.checkpoint.gguf_file import GGUFFile


class TokenType(IntEnum):
    """The token types of llama.cpp's `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """The rule that splits text before merging.

    Attributes:
        patterns: regular expressions, each of which splits what those before it have left or found; its matches are
            pieces, and so is the text between two of them.
        ignore_merges: whether a piece that is a token as a whole becomes that token regardless of merges.
        add_bos: whether a BOS token is added if the file does not say so.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        # Both of these patterns are built into `tokenizers`, where they are faster.
        *others, last = self.patterns
        built_in = last == _GPT2
        steps = [
            pre_tokenizers.Digits(individual_digits=True)
            if pattern == _DIGIT
            else pre_tokenizers.Split(Regex(pattern), "isolated")
            for pattern in (others if built_in else self.patterns)
        ]
        return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=built_in)])


_DIGIT, _DIGITS = r"\p{N}", r"\p{N}{1,3}"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_WORD, _SIGNS = rf"{_BEFORE_WORD}\p{{L}}+", r" ?[^\s\p{L}\p{N}]+"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|{_DIGITS}|{_SIGNS}[\r\n]*|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|{_DIGIT}|{_SIGNS}[\r\n]*|{_TAIL}"
_SPACES = "|".join(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1))  # in runs of powers of two
_JAIS2 = rf"{_CONTRACTIONS}|{_WORD}|{_DIGITS}|{_SIGNS}[\r\n]*|\s*[\r\n]+|{_SPACES}|\s{{1,2}}(?!\S)|\s"
_SEED = rf"{_CONTRACTIONS}|{_WORD}|{_DIGIT}|{_SIGNS}|{_TAIL}"
_BAILING = rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}|{_DIGIT}|{_SIGNS}[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_TEKKEN = rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+|{_BEFORE_WORD}{_UPPER}+{_LOWER}*|{_DIGIT}|{_SIGNS}[\r\n/]*|{_TAIL}"
_GPT4O = (
    rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_BEFORE_WORD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|{_DIGITS}|{_SIGNS}[\r\n/]*|{_TAIL}"
)
_DEEPSEEK3 = (
    _DIGITS,
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _TAIL,
)
_CJK = "[一-龥\u0800-一가-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    r"\s+$",
    _CJK,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT)
_FALCON = (r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9]{3}")

_PRE_TOKENIZERS = {
    name: rule
    for names, rule in (
        ("default gpt-2 phi-2 mellum gigachat a.x-4.0 mpt olmo jais exaone4", _PreTokenizer((_GPT2,))),
        ("trillion granite-docling", _PreTokenizer((_GPT2,))),
        ("smollm starcoder refact codeshell command-r exaone minerva-7b", _PreTokenizer((_DIGIT, _GPT2))),
        ("llama-bpe llama3 llama-v3 falcon3 midm-2.0 pixtral", _PreTokenizer((_LLAMA3,), True, True)),
        ("dbrx smaug-bpe glm4 chatglm-bpe", _PreTokenizer((_LLAMA3,))),
        ("qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan solar-open", _PreTokenizer((_QWEN2,))),
        ("gpt-4o llama4 kanana2 minimax-m2", _PreTokenizer((_GPT4O,))),
        ("tekken", _PreTokenizer((_TEKKEN,), True, True)),
        ("deepseek-v3 hunyuan-dense", _PreTokenizer(_DEEPSEEK3)),
        ("deepseek-llm", _PreTokenizer(_DEEPSEEK_LLM)),
        ("deepseek-coder", _PreTokenizer(_DEEPSEEK_CODER)),
        ("falcon", _PreTokenizer(_FALCON)),
        ("bailingmoe bailingmoe2", _PreTokenizer((_BAILING,))),
        ("seed-coder", _PreTokenizer((_SEED,))),
        ("jais-2", _PreTokenizer((_JAIS2,))),
    )
    for name in names.split()
}

_SPECIAL_TOKEN_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def byte_alphabet() -> dict[str, int]:
    """Return the 256 printable characters that byte-level vocabularies are written in, with the byte of each
    (GPT-2, encoder.py: `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    characters = [*map(chr, printable), *(chr(256 + rank) for rank in range(len(others)))]
    return dict(zip(characters, [*printable, *others], strict=True))


def build_tokenizer(file: GGUFFile) -> tuple[Tokenizer, dict[str, str]]:
    """Build the tokenizer that a GGUF file describes.

    Returns:
        It, and its bos_token, eos_token, unk_token and pad_token, as far as the file names them.

    Raises:
        UnsupportedModelError: the kind of vocabulary or the pre-tokenizer is not supported; the message names it.
        CorruptModelError: the file holds no vocabulary, or its parts do not match.
    """
    # A collector that follows each of a million strings and pairs takes a fifth of the time.
    collects = gc.isenabled()
    gc.disable()
    try:
        return _build(file)
    except OctavoError:
        raise
    except Exception as error:  # `tokenizers` raises nothing narrower if the parts do not match
        raise CorruptModelError(f"{file.path}: its vocabulary cannot be used: {error}") from error
    finally:
        if collects:
            gc.enable()


def _build(file: GGUFFile) -> tuple[Tokenizer, dict[str, str]]:
    kind = file.get("tokenizer.ggml.model")
    tokens: list[str] = _array(file, "tokens", str)
    types: list[int] = [TokenType.NORMAL] * len(tokens)
    if file.length("tokenizer.ggml.token_type"):
        types = _array(file, "token_type", int)
    if len(types) != len(tokens):
        raise CorruptModelError(f"{file.path}: {len(types)} token types for {len(tokens)} tokens")
    named = _special_tokens(file, tokens)
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(file, tokens, types)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(file, tokens, named), True
    else:
        raise UnsupportedModelError(f"{file.path}: a vocabulary of kind {kind!r} is not supported (gpt2, llama)")
    control = _of_type(TokenType.CONTROL, tokens, types)
    control += [token for token in named.values() if token not in set(control)]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    whole = _of_type(TokenType.USER_DEFINED, tokens, types)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in whole])
    tokenizer.post_processor = _bos_eos_template(
        tokenizer,
        bos=named.get("bos_token") if file.get("tokenizer.ggml.add_bos_token", add_bos) else None,
        eos=named.get("eos_token") if file.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    return tokenizer, named


def _of_type(wanted: TokenType, tokens: Sequence[str], types: Sequence[int]) -> list[str]:
    value = wanted.value  # comparing with a member of an enumeration takes ten times as long
    return [token for token, token_type in zip(tokens, types, strict=True) if token_type == value]


def _special_tokens(file: GGUFFile, tokens: Sequence[str]) -> dict[str, str]:
    named = {name: file.get(f"tokenizer.ggml.{key}_token_id", None) for name, key in _SPECIAL_TOKEN_KEYS.items()}
    for name, token_id in named.items():
        if token_id is not None and not (type(token_id) is int and 0 <= token_id < len(tokens)):
            raise CorruptModelError(f"{file.path}: {name} has id {token_id!r:.80} in a vocabulary of {len(tokens)}")
    return {name: tokens[token_id] for name, token_id in named.items() if token_id is not None}


def _array(file: GGUFFile, name: str, kind: type[Any]) -> list[Any]:
    """Return the array `tokenizer.ggml.<name>`; raise `CorruptModelError` unless every element is a `kind`."""
    values = file.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not set(map(type, values)) <= {kind}:
        raise CorruptModelError(f"{file.path}: tokenizer.ggml.{name} is not an array of {_KINDS[kind]}")
    return values


_KINDS = {str: "strings", int: "integers", float: "floating-point numbers"}


def _bos_eos_template(tokenizer: Tokenizer, *, bos: str | None, eos: str | None) -> processors.PostProcessor:
    """Return a post-processor that adds `bos` before and `eos` after a text, if they are not None."""
    parts = [f"{bos}:0"] if bos is not None else []
    parts.append("$A:0")
    parts += [f"{eos}:0"] if eos is not None else []
    added = {token: tokenizer.token_to_id(token) for token in (bos, eos) if token is not None}
    return processors.TemplateProcessing(single=parts, pair=[*parts, "$B:1"], special_tokens=list(added.items()))


def _byte_level(file: GGUFFile, tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    name = file.get("tokenizer.ggml.pre", "default")
    pre_tokenizer = _PRE_TOKENIZERS.get(name)
    if pre_tokenizer is None:
        raise UnsupportedModelError(
            f"{file.path}: pre-tokenizer {name!r} is not supported ({', '.join(sorted(_PRE_TOKENIZERS))})"
        )
    alphabet = byte_alphabet()
    spelling = {byte: character for character, byte in alphabet.items()}
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    for index, token in enumerate(tokens):
        # Tokens that were added to a vocabulary are stored as plain text, but merging only ever produces spelled bytes.
        if types[index] == TokenType.NORMAL and not token.isascii() and not alphabet.keys() >= set(token):
            del vocab[token]
            vocab["".join(spelling[byte] for byte in token.encode())] = index
    merges = _merges(file)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre_tokenizer.ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre_tokenizer.add_bos


def _sentencepiece(file: GGUFFile, tokens: list[str], named: dict[str, str]) -> Tokenizer:
    """Build a SentencePiece BPE tokenizer: spaces are written as ▁, unknown characters as bytes <0x00> … <0xFF>."""
    merges = _merges(file) if "tokenizer.ggml.merges" in file else _merges_by_score(file, tokens)
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=named.get("unk_token"), fuse_unk=True, byte_fallback=True)
    )
    add_space = file.get("tokenizer.ggml.add_space_prefix", True)
    write_spaces_as_sentencepiece(tokenizer, "first" if add_space else "never")
    return tokenizer


def write_spaces_as_sentencepiece(tokenizer: Tokenizer, prepend: Literal["first", "always", "never"]) -> None:
    """Make a tokenizer write spaces as ▁ and remove the first one when decoding.

    Args:
        prepend: where to add a space: before the text ("first"), also before every piece between special tokens
            ("always"), or nowhere ("never").
    """
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=prepend, split=False)
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prepend != "never":
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)


def _merges(file: GGUFFile) -> list[tuple[str, str]]:
    merges: list[str] = _array(file, "merges", str)
    pairs = [merge.partition(" ") for merge in merges]
    return [(left, right) for left, _, right in pairs]


def _merges_by_score(file: GGUFFile, tokens: list[str]) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece vocabulary, the best score first."""
    scores: list[float] = _array(file, "scores", float)
    if len(scores) != len(tokens):
        raise CorruptModelError(f"{file.path}: {len(scores)} scores for {len(tokens)} tokens")
    try:
        from octavo._native import merges_by_score
    except ImportError:  # not compiled
        return merges_by_score_in_python(tokens, scores)
    return merges_by_score(tokens, scores)


def merges_by_score_in_python(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that form a piece. The C++ library leaves out those that are never merged."""
    pieces = set(tokens)
    merges = [
        (order, left, right)
        for order, token in enumerate(tokens)
        for cut in range(1, len(token))
        if (left := token[:cut]) in pieces and (right := token[cut:]) in pieces
    ]
    merges.sort(key=lambda merge: (-scores[merge[0]], -len(merge[1]), -len(merge[2])))
    return [(left, right) for _, left, right in merges]
