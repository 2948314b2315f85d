"""Ids and texts equal those of transformers' tokenizer for the same folder or file."""

from __future__ import annotations

import importlib.util
import json
import pickle
import re
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any
from unittest.mock import patch

import gguf
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from octavo.checkpoint.gguf_file import GGUFFile
from octavo.checkpoint.model_source import ModelFormat, ModelSource, resolve_model
from octavo.errors import ContextLengthError, CorruptModelError, ModelNotFoundError, RequestError, UnsupportedModelError
from octavo.text.gguf_tokenizer import build_tokenizer, merges_by_score_in_python
from octavo.text.prompt_checks import check_text_length
from octavo.text.tokenizer import Tokenizer, TokenizerFiles, read_ahead
from tests.models import tiny

TEXTS = [
    "",
    " ",
    "Hello world",
    "  two  spaces   three\t\ttabs\n\n\n newlines \r\n end ",
    "It's what they've said: we'LL see, I'M sure",
    "1234567890 3.14 1,000,000 a1b2c3 x²½ ٣٤٥",
    "a  1   22    333\n 4\n  5",
    "def f(x):\n    return x ** 2  # squared\n\n\tif True:\n\t\tpass\n",
    "héllo wörld façade naïve ﬁ é e\u0301 \u200b\u00a0\ufeff",
    "日本語のテキスト 한국어 العربية עברית ไทย हिन्दी",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 🇩🇪 \U0001f9ff",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><|im_end|><|im_start",
    "!?.,;:'\"()[]{}<>/\\|@#$%^&*-_=+~`",
    "The_quick-brown.fox@example.com https://example.org/?q=1&r=%20",
    "\x00\x01\x7f\x80",
]
CORPUS = TEXTS + list(topics.values())
SOME = CORPUS[: len(TEXTS) + 8]


def folder_source(folder: Path) -> ModelSource:
    return ModelSource(str(folder), folder, ModelFormat.HUGGINGFACE)


def write_vocabulary(path: Path, fill: Any) -> ModelSource:
    """A GGUF file of nothing but a vocabulary, which `fill` adds to the writer."""
    writer = gguf.GGUFWriter(path, "llama")
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelSource(str(path), path, ModelFormat.GGUF)


def assert_equal_on(texts: list[str], ours: Tokenizer, theirs: Any) -> None:
    for text in texts:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer.from_source(resolve_model("smollm2"))


@pytest.fixture(scope="module")
def smollm2_of_transformers() -> Any:
    source = resolve_model("smollm2")
    theirs = AutoTokenizer.from_pretrained(source.path.parent, gguf_file=source.path.name)
    # SmolLM2's tokenizer.json splits off every digit; transformers does not know GGUF's name "smollm" for that.
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return theirs


@pytest.mark.slow
def test_the_packaged_model_tokenises_as_transformers(smollm2: Tokenizer, smollm2_of_transformers: Any) -> None:
    assert_equal_on(CORPUS, smollm2, smollm2_of_transformers)
    assert smollm2.vocab_size == len(smollm2_of_transformers) == 49152
    assert (smollm2.bos_token_id, smollm2.eos_token_ids) == (1, frozenset({2}))
    assert smollm2.special_ids == frozenset(range(17))


@pytest.mark.slow
def test_the_packaged_model_renders_chats_as_transformers(smollm2: Tokenizer, smollm2_of_transformers: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    expected = smollm2_of_transformers.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert smollm2.apply_chat_template(messages) == expected


# SmolLM2's vocabulary lacks some control characters and the bytes that begin the planes from U+40000 on.
@given(st.text(st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs", "Cc"]), max_size=60))
def test_text_survives_the_way_through_tokens(smollm2: Tokenizer, text: str) -> None:
    ids = smollm2.encode(text)
    assert smollm2.decode(ids, skip_special_tokens=False) == text
    assert b"".join(smollm2.token_bytes(token_id) for token_id in ids).decode() == text


def test_half_a_surrogate_pair_is_the_clients_error(smollm2: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"lone surrogate '\\ud800' at character 2") as error:
        smollm2.encode("ab\ud800")
    assert error.value.param == "prompt"


def test_tokens_have_names_and_bytes_and_unknown_ids_have_none(smollm2: Tokenizer) -> None:
    (token_id,) = smollm2.encode(" the")
    assert (smollm2.id_to_token(token_id), smollm2.token_bytes(token_id)) == ("Ġthe", b" the")
    assert (smollm2.id_to_token(2), smollm2.token_bytes(2)) == ("<|im_end|>", b"<|im_end|>")
    for nothing in (-1, 10**6):
        assert (smollm2.id_to_token(nothing), smollm2.token_bytes(nothing)) == (None, b"")


def test_part_of_a_character_has_its_own_bytes(smollm2: Tokenizer) -> None:
    pieces = [smollm2.token_bytes(token_id) for token_id in smollm2.encode("\U0001f9ff")]
    assert len(pieces) > 1
    assert b"".join(pieces) == "\U0001f9ff".encode()


@pytest.mark.parametrize("pre", ["gpt-2", "default", "qwen2", "llama-bpe", "tekken", "smollm"])
def test_a_byte_level_file_tokenises_as_transformers_by_its_pre_tokenizer(pre: str, tmp_path: Path) -> None:
    source = write_vocabulary(tmp_path / "v.gguf", lambda writer: tiny.add_byte_level_vocabulary(writer, pre=pre))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="v.gguf")
    if pre == "smollm":
        theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    assert_equal_on(SOME, Tokenizer.from_source(source), theirs)


# How llama.cpp splits one text; its ids of the corpus above were the same with every name that is known but "default".
SPLIT = {
    "gpt-2": "It¦'s¦ I¦'¦LL¦ CamelCase¦ ¦ 12345¦ +¦9¦,¦8¦!/¦\n\n\n ¦ x漢字かなab¦.¦to",
    "smollm": "It¦'s¦ I¦'¦LL¦ CamelCase¦  ¦1¦2¦3¦4¦5¦ +¦9¦,¦8¦!/¦\n\n\n ¦ x漢字かなab¦.¦to",
    "glm4": "It¦'s¦ I¦'LL¦ CamelCase¦ ¦ ¦123¦45¦ +¦9¦,¦8¦!/\n\n\n¦ ¦ x漢字かなab¦.to",
    "hunyuan": "It¦'s¦ I¦'LL¦ CamelCase¦ ¦ ¦1¦2¦3¦4¦5¦ +¦9¦,¦8¦!/\n\n\n¦ ¦ x漢字かなab¦.to",
    "gpt-4o": "It's¦ I'LL¦ Camel¦Case¦ ¦ ¦123¦45¦ +¦9¦,¦8¦!/\n\n\n¦ ¦ x漢字かなab¦.to",
    "tekken": "It¦'s¦ I¦'LL¦ Camel¦Case¦ ¦ ¦1¦2¦3¦4¦5¦ +¦9¦,¦8¦!/\n\n\n¦ ¦ x漢字かなab¦.to",
    "deepseek-v3": "It¦'s¦ I¦'LL¦ CamelCase¦  ¦123¦45¦ +¦9¦,¦8¦!/\n\n\n¦ ¦ x¦漢字かな¦ab¦.to",
    "deepseek-llm": "It¦'¦s¦ I¦'¦LL¦ CamelCase¦  ¦12345¦ +¦9¦,¦8¦!/¦\n¦\n¦\n¦ ¦ x¦漢字かな¦ab¦.¦to",
    "deepseek-coder": "It¦'¦s¦ I¦'¦LL¦ CamelCase¦  ¦1¦2¦3¦4¦5¦ +¦9¦,¦8¦!/¦\n¦\n¦\n¦ ¦ x¦漢字かな¦ab¦.¦to",
    "falcon": "It¦'¦s¦ I¦'¦LL¦ CamelCase¦ ¦ ¦123¦45¦ ¦+¦9¦,¦8¦!/¦\n\n\n ¦ x漢字かなab¦.¦to",
    "bailingmoe2": "It¦'s¦ I¦'LL¦ CamelCase¦ ¦ ¦1¦2¦3¦4¦5¦ +¦9¦,¦8¦!/\n\n\n¦ ¦ x漢字かなab¦.to",
    "seed-coder": "It¦'s¦ I¦'LL¦ CamelCase¦ ¦ ¦1¦2¦3¦4¦5¦ +¦9¦,¦8¦!/¦\n\n\n¦ ¦ x漢字かなab¦.to",
    "jais-2": "It¦'s¦ I¦'LL¦ CamelCase¦ ¦ ¦123¦45¦ +¦9¦,¦8¦!/\n\n\n¦ ¦ x漢字かなab¦.to",
}


def test_a_byte_level_file_splits_text_as_its_pre_tokenizer_does_in_llama_cpp(tmp_path: Path) -> None:
    for name, split in SPLIT.items():
        path = tmp_path / f"{name}.gguf"
        write_vocabulary(path, lambda writer, pre=name: tiny.add_byte_level_vocabulary(writer, pre=pre))
        backend, _ = build_tokenizer(GGUFFile(path))
        text = split.replace("¦", "")
        pieces = backend.pre_tokenizer.pre_tokenize_str(text)
        assert "¦".join(text[start:end] for _, (start, end) in pieces) == split, name


def test_a_pre_tokenizer_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    source = write_vocabulary(tmp_path / "v.gguf", lambda writer: tiny.add_byte_level_vocabulary(writer, pre="grok-9"))
    with pytest.raises(UnsupportedModelError, match=r"'grok-9' is not supported \(.*llama-bpe.*qwen2"):
        Tokenizer.from_source(source)


def test_a_kind_of_vocabulary_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    def fill(writer: Any) -> None:
        writer.add_tokenizer_model("rwkv")
        writer.add_token_list(["a"])

    with pytest.raises(UnsupportedModelError, match=r"'rwkv' is not supported \(gpt2, llama\)"):
        Tokenizer.from_source(write_vocabulary(tmp_path / "v.gguf", fill))


def test_a_file_without_a_vocabulary_is_corrupt(tmp_path: Path) -> None:
    with pytest.raises(CorruptModelError, match=r"tokenizer\.ggml\.model"):
        Tokenizer.from_source(write_vocabulary(tmp_path / "v.gguf", lambda writer: None))


def test_a_bos_id_outside_the_vocabulary_is_corrupt(tmp_path: Path) -> None:
    def fill(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a"])
        writer.add_token_merges([])
        writer.add_bos_token_id(5)

    with pytest.raises(CorruptModelError, match="bos_token has id 5 in a vocabulary of 1"):
        Tokenizer.from_source(write_vocabulary(tmp_path / "v.gguf", fill))


def sentencepiece_backend() -> Backend:
    """BPE over ▁-text with byte fallback, as Llama 2 and Mistral have it."""
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=specials, show_progress=False)
    backend.train_from_iterator(list(topics.values())[:5], trainer)
    return backend


def fill_sentencepiece(writer: Any, *, add_space: bool = True, add_bos: bool | None = None) -> None:
    vocab = sorted(sentencepiece_backend().get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("llama")
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_scores([0.0 if token_id < 259 else -float(token_id) for _, token_id in vocab])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(vocab) - 259))
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_space_prefix(add_space)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)


@pytest.mark.skipif(not importlib.util.find_spec("octavo._native"), reason="needs the compiled library")
@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.text("ab▁é𝄞", max_size=6), st.sampled_from([-3.5, -1.0, 0.0, 2.0])), max_size=60),
    st.lists(st.text("ab▁é𝄞", max_size=30), max_size=8),
)
def test_the_merges_that_the_library_leaves_out_are_never_done(
    scored: list[tuple[str, float]], texts: list[str]
) -> None:
    from octavo._native import merges_by_score

    scored = list(dict(scored).items())
    pieces, scores = [piece for piece, _ in scored], [score for _, score in scored]
    every, some = merges_by_score_in_python(pieces, scores), merges_by_score(pieces, scores)
    assert len(some) <= len(pieces)
    assert some == [merge for merge in every if merge in set(some)]
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    for text in [*pieces, *texts, "".join(pieces)]:
        a, b = (Backend(models.BPE(vocab=vocab, merges=merges)).encode(text).ids for merges in (every, some))
        assert a == b


@pytest.mark.slow
@pytest.mark.parametrize("add_bos", [None, True, False])
def test_a_sentencepiece_file_tokenises_as_transformers(add_bos: bool | None, tmp_path: Path) -> None:
    source = write_vocabulary(tmp_path / "v.gguf", lambda writer: fill_sentencepiece(writer, add_bos=add_bos))
    ours = Tokenizer.from_source(source)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="v.gguf")
    assert_equal_on(SOME, ours, theirs)
    assert (ours.encode("a")[0] == ours.bos_token_id) == (add_bos is not False)


def test_sentencepiece_tokens_have_the_bytes_of_their_text(tmp_path: Path) -> None:
    ours = Tokenizer.from_source(write_vocabulary(tmp_path / "v.gguf", fill_sentencepiece))
    ids = ours.encode("the ü😀 end", add_special_tokens=False)
    assert b"".join(map(ours.token_bytes, ids)).decode() == " the ü😀 end"


def test_a_sentencepiece_file_may_want_no_space_before_a_text(tmp_path: Path) -> None:
    source = write_vocabulary(tmp_path / "v.gguf", lambda writer: fill_sentencepiece(writer, add_space=False))
    ours = Tokenizer.from_source(source)
    assert ours.decode(ours.encode(" the end")) == " the end"
    assert ours.encode("the", False) != ours.encode(" the", False)


def test_a_folder_tokenises_as_transformers(tmp_path: Path) -> None:
    theirs = tiny.write_tokenizer(tmp_path)
    ours = Tokenizer.from_source(folder_source(tmp_path))
    assert_equal_on(SOME, ours, theirs)
    messages = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert ours.chat_template == tiny.CHATML
    assert (ours.bos_token_id, ours.eos_token_ids) == (1, frozenset({2}))


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": True, "add_eos_token": True}])
@pytest.mark.parametrize("processor", [None, "<|im_start|> $A"])
def test_what_is_put_around_a_text_is_what_transformers_puts(
    flags: dict[str, bool], processor: str | None, tmp_path: Path
) -> None:
    tiny.write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | flags))
    if processor:
        backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
        backend.post_processor = processors.TemplateProcessing(processor, None, [("<|im_start|>", 1)])
        backend.save(str(tmp_path / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert_equal_on(TEXTS, Tokenizer.from_source(folder_source(tmp_path)), theirs)


def test_tokens_added_by_the_configuration_are_tokens(tmp_path: Path) -> None:
    theirs = tiny.write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": "<pad>", "extra_special_tokens": ["<x>"]}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_source(folder_source(tmp_path))
    assert_equal_on(["a<pad>b<x>c", *TEXTS], ours, theirs)
    assert ours.decode(ours.encode("a<x>b")) == "ab"


def test_normalisation_and_truncation_of_a_folder_are_handled_as_by_transformers(tmp_path: Path) -> None:
    backend = tiny.byte_level_backend()
    backend.normalizer = normalizers.NFC()
    backend.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert_equal_on(["<think>é e\u0301</think>", *TEXTS], Tokenizer.from_source(folder_source(tmp_path)), theirs)


def test_a_template_for_tools_is_used_where_tools_are_given(tmp_path: Path) -> None:
    tiny.write_tokenizer(tmp_path)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools: {{ tools | length }}")
    ours = Tokenizer.from_source(folder_source(tmp_path))
    messages = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(messages, tools=[{"type": "function"}]) == "tools: 1"
    assert ours.apply_chat_template(messages).startswith("<|im_start|>user")


def test_templates_in_the_configuration_are_read_in_both_forms(tmp_path: Path) -> None:
    tiny.write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    path = tmp_path / "tokenizer_config.json"
    stated = json.loads(path.read_text())
    messages = [{"role": "user", "content": "Hi"}]
    for form in ("one", [{"name": "default", "template": "one"}, {"name": "rag", "template": "two"}]):
        path.write_text(json.dumps(stated | {"chat_template": form}))
        assert Tokenizer.from_source(folder_source(tmp_path)).apply_chat_template(messages) == "one"


def test_a_folder_without_a_template_refuses_chats(tmp_path: Path) -> None:
    tiny.write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    ours = Tokenizer.from_source(folder_source(tmp_path))
    assert ours.chat_template is None
    with pytest.raises(RequestError, match="no chat template"):
        ours.apply_chat_template([{"role": "user", "content": "Hi"}])


def test_ids_that_end_a_generation_are_those_of_the_model_and_of_its_tokenizer(tmp_path: Path) -> None:
    tiny.write_hf_model(tmp_path, "Llama", tokenizer=True, eos_token_id=[0, 9])
    assert Tokenizer.from_source(folder_source(tmp_path)).eos_token_ids == {0, 2, 9}


def test_an_older_vocabulary_is_converted_by_transformers(tmp_path: Path) -> None:
    tiny.byte_level_backend().model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}'
    )
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(theirs, transformers.GPT2Tokenizer)
    assert_equal_on(TEXTS, Tokenizer.from_source(folder_source(tmp_path)), theirs)


def test_a_folder_without_a_tokenizer_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no tokenizer\.json"):
        Tokenizer.from_source(folder_source(tmp_path))


def test_an_unsupported_vocabulary_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"no sentencepiece model")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(UnsupportedModelError, match="save_pretrained"):
        Tokenizer.from_source(folder_source(tmp_path))


def test_a_damaged_tokenizer_is_corrupt(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(CorruptModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_source(folder_source(tmp_path))


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
@pytest.mark.parametrize("stated", [{}, {"legacy": True}, {"legacy": False}, {"add_prefix_space": False}])
def test_a_sentencepiece_folder_writes_spaces_as_transformers(
    model_type: str, stated: dict[str, bool], tmp_path: Path
) -> None:
    older = json.loads(sentencepiece_backend().to_str())
    older["added_tokens"] = older["added_tokens"][:3]
    older["pre_tokenizer"] = None
    spaces = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    older["normalizer"] = {"type": "Sequence", "normalizers": spaces}
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    older["decoder"] = json.loads(decoders.Sequence(steps).__getstate__())
    (tmp_path / "tokenizer.json").write_text(json.dumps(older))
    named = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named | stated))
    tiny.make_model("Llama" if model_type == "llama" else "Mistral").config.save_pretrained(tmp_path)
    ours = Tokenizer.from_source(folder_source(tmp_path))
    assert_equal_on(["<s>hi</s> the", "a<s> b", *TEXTS], ours, AutoTokenizer.from_pretrained(tmp_path))
    assert b"".join(map(ours.token_bytes, ours.encode("ü 😀"))).decode().strip() == "ü 😀"


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("tokens", [1, 2, 3], "tokenizer.ggml.tokens is not an array of strings"),
        ("tokens", "abc", "tokenizer.ggml.tokens is not an array of strings"),
        ("token_type", [1.0, 1.0, 1.0], "tokenizer.ggml.token_type is not an array of integers"),
        ("merges", [5], "tokenizer.ggml.merges is not an array of strings"),
        ("merges", ["a zz"], "its vocabulary cannot be used"),
        ("merges", ["nothing"], "its vocabulary cannot be used"),
        ("bos_token_id", -1, "bos_token has id -1 in a vocabulary of 3"),
        ("eos_token_id", "b", "eos_token has id 'b' in a vocabulary of 3"),
    ],
)
def test_a_damaged_vocabulary_is_an_error_that_names_the_part(key: str, value: Any, says: str, tmp_path: Path) -> None:
    parts: dict[str, Any] = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "merges": ["a b"], key: value}

    def fill(writer: Any) -> None:
        for name, part in parts.items():
            add = {list: writer.add_array, str: writer.add_string, int: writer.add_int32}[type(part)]
            add(f"tokenizer.ggml.{name}", part)

    with pytest.raises(CorruptModelError, match=re.escape(says)):
        Tokenizer.from_source(write_vocabulary(tmp_path / "v.gguf", fill))


@pytest.mark.slow
def test_a_tokenizer_that_has_decoded_can_be_sent_to_another_process() -> None:
    tokenizer = Tokenizer.from_source(resolve_model("smollm2"))
    assert tokenizer.byte_pieces(True) is not None
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode("Hello world", add_special_tokens=True) == tokenizer.encode(
        "Hello world", add_special_tokens=True
    )
    assert copy.byte_pieces(True) is not None


@pytest.mark.slow
def test_another_process_reads_the_vocabulary_from_the_files_while_they_are_unchanged(tmp_path: Path) -> None:
    """Sending 262,144 tokens would stop all other threads for half a second."""
    path = tmp_path / "model.gguf"
    path.write_bytes(resolve_model("smollm2").path.read_bytes())
    source = ModelSource("model", path, ModelFormat.GGUF)
    tokenizer = Tokenizer.from_source(source).with_chat_template("{{ 7 }}")
    pickled = pickle.dumps(tokenizer)
    assert len(pickled) < 20_000
    read_ahead(TokenizerFiles.of(source))
    with patch.object(Tokenizer, "from_source", side_effect=AssertionError("it was read again")):
        copy = pickle.loads(pickled)
    assert copy.apply_chat_template([{"role": "user", "content": "Hello"}]) == "7"
    assert copy.encode("Hello world") == tokenizer.encode("Hello world")

    path.write_bytes(b"another model")
    assert pickle.loads(pickle.dumps(tokenizer)).encode("Hello world") == tokenizer.encode("Hello world")
    with pytest.raises(CorruptModelError):
        pickle.loads(pickled)


@pytest.mark.slow
def test_a_text_has_at_most_so_many_bytes_a_token_but_for_those_that_the_vocabulary_lacks(smollm2: Tokenizer) -> None:
    most, dropped = smollm2.max_kept_token_bytes, smollm2.dropped_bytes
    assert most is not None
    assert dropped
    assert smollm2.max_token_bytes is None
    everything = bytes(range(128)).decode() + "\u00e9\u20ac\U0001f600\U00050000"
    for text in ("\U00050000" * 50, "a" * 500, " " * 500, everything * 20, bytes(dropped[-1:]).decode("latin-1") * 50):
        kept = text.encode().translate(None, dropped)
        assert len(kept) <= most * len(smollm2.encode(text, add_special_tokens=False))
    with pytest.raises(ContextLengthError, match="but the prompt has 15000000 bytes"):
        check_text_length("a" * 15_000_000, 8192, most, dropped)
