"""The tokenizer of a Hugging Face folder or a GGUF file, usually without importing transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from octavo.checkpoint.hf_config import read_hf_config
from octavo.checkpoint.model_source import ModelFormat, ModelSource
from octavo.errors import CorruptModelError, ModelError, RequestError
from octavo.text.byte_pieces import BytePieces
from octavo.text.chat_template import render_chat
from octavo.text.folder_tokenizer import build_folder_tokenizer, chat_templates, tokenizer_config
from octavo.text.gguf_tokenizer import build_tokenizer, byte_alphabet

_BYTE_OF = byte_alphabet()
_BYTE_TOKENS = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
# Number of tokens, and of added tokens, with which a byte-level decoder is checked.
_NUM_CHECKED = 256
# Texts of at least this many characters are encoded without the interpreter's lock.
_LONG_TEXT = 1024


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Files from which another process can read a tokenizer again.

    Attributes:
        source: where it was read from.
        stamps: path, inode, size and modification time of each file.
    """

    source: ModelSource
    stamps: tuple[tuple[Path, int, int, int], ...]

    @classmethod
    def of(cls, source: ModelSource) -> TokenizerFiles:
        path = source.path.absolute()
        files = [path] if source.format is ModelFormat.GGUF else sorted(path.glob("*.json"))
        states = [(file, file.stat()) for file in files]
        # Neither options nor mappings, which need not be picklable.
        plain = ModelSource(source.name, path, source.format)
        return cls(plain, tuple((file, state.st_ino, state.st_size, state.st_mtime_ns) for file, state in states))

    @property
    def is_unchanged(self) -> bool:
        try:
            return TokenizerFiles.of(self.source) == self
        except OSError:
            return False


class Tokenizer:
    """One model's tokenizer. Encoding and decoding take no lock and may run in several threads.

    Attributes:
        vocab_size: number of ids, including added tokens; a model may have more rows of logits.
        bos_token_id: id of the token that begins a text, or None.
        eos_token_ids: all ids that end a generation.
        special_ids: ids that `decode` leaves out by default.
        chat_template: the template used without tools, or None.
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
            named_tokens: bos_token, eos_token and the like, which chat templates may use by these names.
            chat_templates: templates by name: "default", and "tool_use" if the model has a separate one for tools.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._files: TokenizerFiles | None = None
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
            UnsupportedModelError: neither Octavo nor the installed transformers can read the vocabulary.
        """
        is_gguf = source.format is ModelFormat.GGUF
        tokenizer = cls._from_gguf(source.path) if is_gguf else cls._from_folder(source.path)
        if not needs_transformers(source):  # which convert slowly
            tokenizer._files = TokenizerFiles.of(source)
        # Check the byte pieces now rather than while the first request waits.
        tokenizer.byte_pieces(skip_special_tokens=True)
        return tokenizer

    def with_chat_template(self, template: str) -> Tokenizer:
        """Return a copy that uses only the given chat template."""
        other = copy(self)
        other._chat_templates = {"default": template}
        return other

    @classmethod
    def _from_gguf(cls, path: Path) -> Tokenizer:
        from octavo.checkpoint.gguf_config import gguf_eos_token_ids
        from octavo.checkpoint.gguf_file import GGUFFile

        file = GGUFFile(path)
        template = file.get("tokenizer.chat_template", None)
        backend, named = build_tokenizer(file)
        return cls(
            backend,
            named_tokens=named,
            eos_token_ids=gguf_eos_token_ids(file),
            chat_templates={"default": template} if isinstance(template, str) else {},
        )

    @classmethod
    def _from_folder(cls, folder: Path) -> Tokenizer:
        config = tokenizer_config(folder)
        backend, named = build_folder_tokenizer(folder, config)
        has_config = (folder / "config.json").is_file()
        return cls(
            backend,
            named_tokens=named,
            eos_token_ids=read_hf_config(folder).eos_token_ids if has_config else frozenset(),
            chat_templates=chat_templates(folder, config),
        )

    @property
    def chat_template(self) -> str | None:
        return self._chat_templates.get("default")

    @property
    def chat_template_text(self) -> str:
        """All chat templates, concatenated."""
        return "\n".join(self._chat_templates.values())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. Special tokens that are written out in it become those tokens.

        Args:
            add_special_tokens: add the tokens that the model expects around a text, such as a leading BOS.

        Raises:
            RequestError: the text holds half of a surrogate pair, which is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text must be valid Unicode, got the lone surrogate {error.object[error.start]!a} at character "
                f"{error.start}",
                param="prompt",
            ) from error
        if len(text) < _LONG_TEXT:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        else:
            # `encode_batch` releases the interpreter's lock, which encoding a megabyte would hold for seconds.
            (encoding,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    @cached_property
    def max_token_bytes(self) -> int | None:
        """Maximum number of bytes of a text that one token can stand for; None if there is no limit."""
        return None if self.dropped_bytes else self.max_kept_token_bytes

    @cached_property
    def dropped_bytes(self) -> bytes:
        """Byte values that leave no trace in the tokens, because a byte-level vocabulary lacks them."""
        if "ByteLevel" not in self._decoder_kinds:
            return b""
        return bytes(byte for symbol, byte in _BYTE_OF.items() if self._backend.model.token_to_id(symbol) is None)

    @cached_property
    def max_kept_token_bytes(self) -> int | None:
        """`max_token_bytes` for texts without any of the `dropped_bytes`; None if there is no limit."""
        if not _keeps_every_byte(self._backend, self._decoder_kinds):
            return None
        # Byte-level vocabularies spell each byte as one character; others consist of plain text.
        spelled = len if "ByteLevel" in self._decoder_kinds else _encoded_length
        added = [len(token.content.encode()) for token in self._backend.get_added_tokens_decoder().values()]
        # One token at a time: a copy of 262,144 tokens as a dictionary takes three times as long, and 40 MB.
        tokens = filter(None, map(self._backend.id_to_token, range(self.vocab_size)))
        return max(1, max(map(spelled, tokens), default=0), *added)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; incomplete characters become U+FFFD, and unknown ids are ignored."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def to_json(self) -> str:
        """Return the tokenizer in the format of tokenizer.json, for libraries that read it."""
        return str(self._backend.to_str())

    def __getstate__(self) -> dict[str, Any]:
        # The pieces hold functions, which cannot be pickled; a copy makes its own on first use. A copy also reads the
        # vocabulary itself while the files are unchanged: writing 262,144 tokens as JSON takes half a second, during
        # which no other thread runs, and 90 MB; parsing it takes longer than reading the files.
        left_out = {"_spelled_out"}
        if self._files is not None and self._files.is_unchanged:
            left_out.add("_backend")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "_backend" in state:
            return
        files: TokenizerFiles = state["_files"]
        self._backend = _backend_of(files)
        if not files.is_unchanged:
            raise CorruptModelError(f"{files.source.path} changed while its tokenizer was being read")

    def byte_pieces(self, skip_special_tokens: bool) -> BytePieces | None:
        """Return what each token adds to any text; None if that depends on the surrounding tokens."""
        return self._spelled_out[skip_special_tokens] if self._spelled_out is not None else None

    @cached_property
    def _spelled_out(self) -> tuple[BytePieces, BytePieces] | None:
        """The pieces with and without special tokens, or None."""
        backend = self._backend
        if not _is_byte_level(backend):
            return None
        special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}

        def plain(token_id: int) -> bytes:
            return _unspelled(backend.id_to_token(token_id) or "")

        def skipping(token_id: int) -> bytes:
            token = backend.id_to_token(token_id) or ""
            return b"" if token in special else _unspelled(token)

        # Compare with the decoder itself, and leave a tokenizer that does anything else to it.
        ids = [*range(0, self.vocab_size, self.vocab_size // _NUM_CHECKED + 1), *sorted(self._added)[:_NUM_CHECKED]]
        pieces = BytePieces(plain), BytePieces(skipping)
        for skip, some in enumerate(pieces):
            if some.join(ids).decode(errors="replace") != self.decode(ids, skip_special_tokens=bool(skip)):
                return None
        return pieces

    def id_to_token(self, token_id: int) -> str | None:
        """Return the vocabulary entry of a token ("Ġthe", "▁the"), or None if there is no such id."""
        token: str | None = self._backend.id_to_token(token_id) if token_id >= 0 else None
        return token

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of one token, possibly part of a character; b"" if there is no such id."""
        token = self.id_to_token(token_id)
        if token is None:
            return b""
        if "ByteFallback" in self._decoder_kinds and (byte := _BYTE_TOKENS.get(token)) is not None:
            return byte
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
        """Render the prompt for a conversation; encode it with add_special_tokens=False, because it has its own.

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


@lru_cache(maxsize=1)
def _backend_of(files: TokenizerFiles) -> tokenizers.Tokenizer:
    return Tokenizer.from_source(files.source)._backend


def read_ahead(files: TokenizerFiles) -> None:
    """Read a tokenizer's files, in a process that will unpickle a `Tokenizer` of theirs."""
    with suppress(OSError, ModelError):  # the process that loads the model reports what is wrong
        _backend_of(files)


def needs_transformers(source: ModelSource) -> bool:
    """Whether transformers, which imports torch, must convert a source's vocabulary."""
    return source.format is not ModelFormat.GGUF and not (source.path / "tokenizer.json").is_file()


def _encoded_length(token: str) -> int:
    return len(token.encode())


def _keeps_every_byte(backend: tokenizers.Tokenizer, decoder_kinds: frozenset[str]) -> bool:
    """Return whether each byte of any text ends up in some token, so that a text's length bounds its number of tokens.

    Bytes that a byte-level vocabulary lacks are not considered.
    """
    knows = backend.model.token_to_id
    if "ByteLevel" in decoder_kinds:
        # An unknown token may stand for a run of missing bytes.
        if getattr(backend.model, "unk_token", None) is not None and any(knows(symbol) is None for symbol in _BYTE_OF):
            return False
    elif "ByteFallback" not in decoder_kinds or any(knows(token) is None for token in _BYTE_TOKENS):
        return False
    if backend.normalizer is not None:
        return False
    # Tokens that include surrounding white space may take megabytes of it.
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
    """Return whether decoding only replaces each token by the bytes that it spells."""
    if backend.decoder is None:
        return False
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    return [step["type"] for step in steps] == ["ByteLevel"]


def _unspelled(token: str) -> bytes:
    """Return the bytes that a byte-level token spells; a token with any other character is plain text."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def _decoder_kinds(backend: tokenizers.Tokenizer) -> frozenset[str]:
    """Return the types of the decoding steps, as named in tokenizer.json."""
    if backend.decoder is None:
        return frozenset()
    state = json.loads(backend.decoder.__getstate__())
    return frozenset(step["type"] for step in [state, *state.get("decoders", [])])
