"""The tokenizer files of a Hugging Face folder: the vocabulary as a `tokenizers.Tokenizer`, and the chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from octavo.checkpoint.hf_config import read_json
from octavo.errors import CorruptModelError, ModelNotFoundError, UnsupportedModelError
from octavo.text.gguf_tokenizer import write_spaces_as_sentencepiece

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json over special_tokens_map.json, which it replaced; {} if there is neither.

    Raises:
        CorruptModelError: a file is not a JSON object.
    """
    return (read_json(folder / "special_tokens_map.json") or {}) | (read_json(folder / "tokenizer_config.json") or {})


def build_folder_tokenizer(folder: Path, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Return a folder's vocabulary, and the texts of its named tokens ("bos_token", …).

    Args:
        config: its `tokenizer_config`.

    Raises:
        ModelNotFoundError: the folder holds no vocabulary.
        CorruptModelError: its tokenizer.json is damaged.
        UnsupportedModelError: it has none, and the installed transformers cannot convert its older files.
    """
    named = {name: text for name in _NAMED_TOKENS if (text := _content(config.get(name))) is not None}
    path = folder / "tokenizer.json"
    if not path.is_file():
        return _through_transformers(folder, named)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises Exception itself
        raise CorruptModelError(f"{path} cannot be read: {error}") from error
    _complete(backend, config, named)
    _write_spaces_as_llama(backend, config, folder)
    return backend, named


def chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name; files override the key in tokenizer_config.json, as in transformers."""
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


def _content(token: Any) -> str | None:
    """Return the text of a token in a configuration: a string, or an object with the text under "content"."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _complete(backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Add the tokens that tokenizer_config.json names and tokenizer.json does not, as transformers does.

    The flags add_bos_token and add_eos_token are ignored, as in transformers: tokenizer.json itself defines which
    tokens are added around a text.
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
    """Handle spaces in Llama 2 folders as transformers 5 does.

    It rebuilds the handling from the name of the tokenizer's class, because older files put a ▁ after every special
    token, which Llama's own SentencePiece does not. It uses Mistral's files as they are.
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
    """Let transformers convert a vocabulary in older files (tokenizer.model, vocab.json with merges.txt)."""
    if not any((folder / name).is_file() for name in ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")):
        raise ModelNotFoundError(f"{folder} has no tokenizer.json and no other vocabulary")
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        backend: tokenizers.Tokenizer = converted.backend_tokenizer
    except Exception as error:  # a conversion may raise anything, such as an ImportError of sentencepiece
        raise UnsupportedModelError(
            f"{folder} has no tokenizer.json, and transformers cannot convert its vocabulary ({error}); "
            "save it once with AutoTokenizer.from_pretrained(folder).save_pretrained(folder) where sentencepiece is"
        ) from error
    return backend, {**{name: str(text) for name, text in converted.special_tokens_map.items()}, **named}
