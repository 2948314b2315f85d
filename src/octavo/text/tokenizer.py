"""Text to token ids and back, from a Hugging Face folder or a GGUF file, without importing transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from octavo.checkpoint.hf_config import read_hf_config, read_json
from octavo.checkpoint.model_source import ModelFormat, ModelSource
from octavo.errors import CorruptModelError, ModelNotFoundError, RequestError, UnsupportedModelError
from octavo.text.byte_pieces import BytePieces
from octavo.text.chat_template import render_chat
from octavo.text.gguf_tokenizer import build_tokenizer, byte_alphabet, special_tokens, write_spaces_as_sentencepiece

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_BYTE_OF = byte_alphabet()
# Tokens by which a byte-level decoder is checked, and as many of those that were added.
_NUM_CHECKED = 256
# Characters from which on encoding lets other threads run.
_LONG_TEXT = 1024


class Tokenizer:
    """One model's tokenizer. Encoding and decoding take no lock and may run in several threads.

    Attributes:
        vocab_size: ids in all, added tokens included; a model may have more rows than that.
        bos_token_id: what begins a text, if anything does.
        eos_token_ids: every id that ends a generation.
        special_ids: ids that `decode` leaves out by default.
        chat_template: the template in use without tools, or None.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named_tokens: Mapping[str, str] | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            named_tokens: bos_token, eos_token and their like, which chat templates may use by these names.
            chat_templates: "default", and "tool_use" where a model has one of its own for tools.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._named_tokens = dict(named_tokens or {})
        self._chat_templates = dict(chat_templates or {})
        added = backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._named_id("bos_token")
        eos = self._named_id("eos_token")
        self.eos_token_ids = eos_token_ids | (frozenset() if eos is None else {eos})
        self._decoder_kinds = _decoder_kinds(backend)

    @classmethod
    def from_source(cls, source: ModelSource) -> Tokenizer:
        """Read the tokenizer that comes with a model.

        Raises:
            ModelNotFoundError: the folder holds no tokenizer.
            CorruptModelError: a tokenizer file is damaged.
            UnsupportedModelError: a kind of vocabulary that neither Octavo nor transformers can read here.
        """
        is_gguf = source.format is ModelFormat.GGUF
        tokenizer = cls._from_gguf(source.path) if is_gguf else cls._from_folder(source.path)
        # Checked here rather than while the first request waits.
        tokenizer.byte_pieces(skip_special_tokens=True)
        return tokenizer

    def with_chat_template(self, template: str) -> Tokenizer:
        """The same with another chat template instead of all its own."""
        other = copy(self)
        other._chat_templates = {"default": template}
        return other

    @classmethod
    def _from_gguf(cls, path: Path) -> Tokenizer:
        from octavo.checkpoint.gguf_config import gguf_eos_token_ids
        from octavo.checkpoint.gguf_file import GGUFFile

        file = GGUFFile(path)
        template = file.get("tokenizer.chat_template", None)
        return cls(
            build_tokenizer(file),
            named_tokens=special_tokens(file),
            eos_token_ids=gguf_eos_token_ids(file),
            chat_templates={"default": template} if isinstance(template, str) else {},
        )

    @classmethod
    def _from_folder(cls, folder: Path) -> Tokenizer:
        config = {**(read_json(folder / "special_tokens_map.json") or {})}
        config |= read_json(folder / "tokenizer_config.json") or {}
        named = {name: text for name in _NAMED_TOKENS if (text := _content(config.get(name))) is not None}
        path = folder / "tokenizer.json"
        if path.is_file():
            try:
                backend = tokenizers.Tokenizer.from_file(str(path))
            except Exception as error:  # tokenizers raises Exception itself
                raise CorruptModelError(f"{path} cannot be read: {error}") from error
            _complete(backend, config, named)
            _write_spaces_as_llama(backend, config, folder)
        else:
            backend, named = _through_transformers(folder, named)
        has_config = (folder / "config.json").is_file()
        return cls(
            backend,
            named_tokens=named,
            eos_token_ids=read_hf_config(folder).eos_token_ids if has_config else frozenset(),
            chat_templates=_chat_templates(folder, config),
        )

    @property
    def chat_template(self) -> str | None:
        return self._chat_templates.get("default")

    @property
    def chat_template_text(self) -> str:
        """All chat templates that there are, one after the other."""
        return "\n".join(self._chat_templates.values())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written out in it become those tokens either way;
        `add_special_tokens` adds what the model puts around a text, such as a leading BOS.

        Raises:
            RequestError: the text holds half of a surrogate pair, which no UTF-8 text can.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text holds the lone surrogate {error.object[error.start]!a} at character {error.start}, "
                "which is not valid Unicode",
                param="prompt",
            ) from error
        if len(text) < _LONG_TEXT:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        else:
            # Only a batch is encoded without the interpreter's lock, which a megabyte would hold for seconds.
            (encoding,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    @cached_property
    def max_token_bytes(self) -> int | None:
        """Most bytes of a text that one token can stand for; None where tokens may swallow any amount of text."""
        return None if self.dropped_bytes else self.max_kept_token_bytes

    @cached_property
    def dropped_bytes(self) -> bytes:
        """Bytes that leave no trace in the tokens: the vocabulary, made from text without them, lacks them."""
        if "ByteLevel" not in self._decoder_kinds:
            return b""
        vocab = self._backend.get_vocab(with_added_tokens=False)
        return bytes(byte for symbol, byte in _BYTE_OF.items() if symbol not in vocab)

    @cached_property
    def max_kept_token_bytes(self) -> int | None:
        """`max_token_bytes` of a text without its `dropped_bytes`."""
        if not _keeps_every_byte(self._backend, self._decoder_kinds):
            return None
        # Byte-level vocabularies spell each byte as one character; elsewhere characters are themselves.
        spelled = len if "ByteLevel" in self._decoder_kinds else _encoded_length
        added = (len(token.content.encode()) for token in self._backend.get_added_tokens_decoder().values())
        return max(1, *map(spelled, self._backend.get_vocab(with_added_tokens=False)), *added)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are no whole character become U+FFFD, unknown ids nothing."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def to_json(self) -> str:
        """All of it as tokenizer.json has it, for libraries that read that."""
        return str(self._backend.to_str())

    def __getstate__(self) -> dict[str, Any]:
        # The pieces are made of functions; whoever gets a copy makes its own on first use.
        return {name: value for name, value in self.__dict__.items() if name != "_spelled_out"}

    def byte_pieces(self, skip_special_tokens: bool) -> BytePieces | None:
        """What each token adds to any text; None where that depends on the tokens around it."""
        return self._spelled_out[skip_special_tokens] if self._spelled_out is not None else None

    @cached_property
    def _spelled_out(self) -> tuple[BytePieces, BytePieces] | None:
        """The pieces with special tokens and without."""
        if not _is_byte_level(self._backend):
            return None
        special = {token.content for token in self._backend.get_added_tokens_decoder().values() if token.special}

        def plain(token_id: int) -> bytes:
            return _unspelled(self._backend.id_to_token(token_id) or "")

        def skipping(token_id: int) -> bytes:
            token = self._backend.id_to_token(token_id) or ""
            return b"" if token in special else _unspelled(token)

        # The decoder itself has the last word: a tokenizer that does anything else besides is left to it.
        ids = [*range(0, self.vocab_size, self.vocab_size // _NUM_CHECKED + 1), *sorted(self._added)[:_NUM_CHECKED]]
        pieces = BytePieces(plain), BytePieces(skipping)
        for skip, some in enumerate(pieces):
            if some.join(ids).decode(errors="replace") != self.decode(ids, skip_special_tokens=bool(skip)):
                return None
        return pieces

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary entry of a token ("Ġthe", "▁the"), or None if there is no such id."""
        token: str | None = self._backend.id_to_token(token_id) if token_id >= 0 else None
        return token

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of one token, possibly part of a character; b"" if there is no such id."""
        token = self.id_to_token(token_id)
        if token is None:
            return b""
        if "ByteFallback" in self._decoder_kinds and re.fullmatch("<0x[0-9A-F]{2}>", token):
            return bytes([int(token[3:5], 16)])
        if token_id in self._added:
            return token.encode()
        if "ByteLevel" in self._decoder_kinds:
            return bytes(_BYTE_OF[character] for character in token if character in _BYTE_OF)
        return token.replace("▁", " ").encode()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation; encode it with add_special_tokens=False, for it brings its own.

        Raises:
            RequestError: see `render_chat`.
        """
        template = self._chat_templates.get("tool_use") if tools else None
        return render_chat(
            template or self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            **{**self._named_tokens, **variables},
        )

    def _named_id(self, name: str) -> int | None:
        text = self._named_tokens.get(name)
        token_id: int | None = None if text is None else self._backend.token_to_id(text)
        return token_id


def _content(token: Any) -> str | None:
    """A token as configurations write it: a string, or an object with its text under "content"."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _complete(backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Add the tokens that tokenizer_config.json names and tokenizer.json does not, as transformers does.

    Its flags add_bos_token and add_eos_token are ignored there and here: tokenizer.json itself says what is put around
    a text.
    """
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    additions = []
    for _, token in sorted(listed.items(), key=lambda item: int(item[0])):
        if (text := _content(token)) is not None and text not in known:
            flags = {key: bool(token.get(key)) for key in ("single_word", "lstrip", "rstrip", "normalized", "special")}
            additions.append(AddedToken(text, **flags))
            known.add(text)
    further = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    texts = further.values() if isinstance(further, Mapping) else further
    for text in [*named.values(), *map(_content, texts)]:
        if text is not None and text not in known:
            additions.append(AddedToken(text, normalized=False, special=True))
            known.add(text)
    if additions:
        backend.add_tokens(additions)


def _write_spaces_as_llama(backend: tokenizers.Tokenizer, config: Mapping[str, Any], folder: Path) -> None:
    """transformers 5 rebuilds what a Llama 2 folder says about spaces from the name of the tokenizer's class: older
    files put a ▁ after every special token, which Llama's own SentencePiece does not. Mistral's files it takes as is.
    """
    if config.get("tokenizer_class") not in ("LlamaTokenizer", "LlamaTokenizerFast"):
        return
    model_type = (read_json(folder / "config.json") or {}).get("model_type", "llama")
    if model_type != "llama" or not getattr(backend.model, "byte_fallback", False):
        return
    backend.normalizer = None
    if config.get("add_prefix_space") is False:
        write_spaces_as_sentencepiece(backend, "never")
    else:
        write_spaces_as_sentencepiece(backend, "always" if config.get("legacy") else "first")


def _through_transformers(folder: Path, named: dict[str, str]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """For vocabularies in older files (tokenizer.model, vocab.json with merges.txt), which transformers converts."""
    if not any((folder / name).is_file() for name in ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")):
        raise ModelNotFoundError(f"{folder} holds no tokenizer.json and no other vocabulary")
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        backend: tokenizers.Tokenizer = converted.backend_tokenizer
    except Exception as error:  # whatever a conversion raises, an ImportError of sentencepiece among it
        raise UnsupportedModelError(
            f"{folder} has no tokenizer.json, and transformers cannot convert its vocabulary ({error}); "
            "save it once with AutoTokenizer.from_pretrained(folder).save_pretrained(folder) where sentencepiece is"
        ) from error
    return backend, {**{name: str(text) for name, text in converted.special_tokens_map.items()}, **named}


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Template files go before the key in tokenizer_config.json, as in transformers."""
    templates: dict[str, str] = {}
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    if templates:
        return templates
    stated = config.get("chat_template") or (read_json(folder / "chat_template.json") or {}).get("chat_template")
    if isinstance(stated, str):
        return {"default": stated}
    named = stated if isinstance(stated, list) else []
    return {entry["name"]: entry["template"] for entry in named if {"name", "template"} <= entry.keys()}


def _encoded_length(token: str) -> int:
    return len(token.encode())


def _keeps_every_byte(backend: tokenizers.Tokenizer, decoder_kinds: frozenset[str]) -> bool:
    """Whether each byte of any text ends up in some token, so that a text's length bounds its tokens from below.

    Bytes that a byte-level vocabulary lacks apart.
    """
    vocab = backend.get_vocab(with_added_tokens=False)
    if "ByteLevel" in decoder_kinds:
        # An unknown token may stand for a run of them.
        if getattr(backend.model, "unk_token", None) is not None and any(symbol not in vocab for symbol in _BYTE_OF):
            return False
    elif "ByteFallback" not in decoder_kinds or any(f"<0x{byte:02X}>" not in vocab for byte in range(256)):
        return False
    if backend.normalizer is not None:
        return False
    # Tokens that take the white space around them along may take megabytes of it.
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return False
    if backend.pre_tokenizer is None:
        return True
    state = json.loads(backend.pre_tokenizer.__getstate__())
    steps = [state, *state.get("pretokenizers", [])]
    return all(
        step["type"] in ("Sequence", "ByteLevel", "Digits", "Metaspace")
        or (step["type"] == "Split" and step["behavior"] == "Isolated")
        for step in steps
    )


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Whether decoding does nothing but replace each token by the bytes that it spells."""
    if backend.decoder is None:
        return False
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    return [step["type"] for step in steps] == ["ByteLevel"]


def _unspelled(token: str) -> bytes:
    """The bytes that a byte-level token spells; a token with any other character in it is its own text."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def _decoder_kinds(backend: tokenizers.Tokenizer) -> frozenset[str]:
    """The decoding steps, by their names in tokenizer.json."""
    if backend.decoder is None:
        return frozenset()
    state = json.loads(backend.decoder.__getstate__())
    return frozenset(step["type"] for step in [state, *state.get("decoders", [])])
