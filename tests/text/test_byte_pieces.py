"""Byte-level detokenization by look-up: in any parts, what the tokenizer's own decoder makes of the whole."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from octavo.text.byte_pieces import MAX_LOOK_BACK, BytePieces, ByteTokenDecoder
from octavo.text.detokenizer import TokenDecoder, make_token_decoder
from octavo.text.gguf_tokenizer import byte_alphabet
from octavo.text.tokenizer import Tokenizer as OctavoTokenizer
from tests.text.test_detokenizer import byte_fallback, byte_level, continuation, cut_up, deltas, metaspace, smollm2

REPLACEMENT = "\ufffd"
# First bytes of characters of each length, continuations at the borders of what may follow them, and bytes of neither.
TELLING_BYTES = [0x41, 0x80, 0x8F, 0x9F, 0xA0, 0xBF, 0xC0, 0xC3, 0xE0, 0xE2, 0xED, 0xF0, 0xF4, 0xFF]


@functools.cache
def mixed() -> OctavoTokenizer:
    """Single bytes, parts of characters, and added tokens of every sort."""
    spelled = {byte: character for character, byte in byte_alphabet().items()}
    parts = [b"a\xe2", b"\x82\xac", b"\x82\xac\xe2", b"\xf0\x9f", b"\x98\x80", "é".encode(), b" the", "�".encode()]
    texts = [*(bytes([byte]) for byte in range(256)), *parts]
    vocab = {"".join(spelled[byte] for byte in text): i for i, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>", "é", "北京")])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in ("<tool>", "a b", "ÿ!", "日本", "  ", "Ġ")])
    return OctavoTokenizer(tokenizer)


makers = pytest.mark.parametrize("make", [mixed, smollm2], ids=lambda make: make.__name__)
group_sizes = st.one_of(st.just([1]), st.lists(st.integers(1, 7), min_size=1, max_size=4))


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_bytes_in_any_grouping_decode_as_a_whole(length: int) -> None:
    pieces = BytePieces(lambda byte: bytes([byte]))
    tokenizer = mixed()
    groupings = [[1], [2], [3], [1, 2], [1, 3], [4]]
    for some in itertools.product(TELLING_BYTES, repeat=length):
        whole = tokenizer.decode(some)
        assert whole == bytes(some).decode(errors="replace")
        for sizes in groupings:
            decoder = ByteTokenDecoder(pieces, [])
            assert "".join([decoder.append(group) for group in cut_up(list(some), sizes)]) + decoder.flush() == whole


@pytest.mark.slow
@makers
@settings(max_examples=150, deadline=None)
@given(data=st.data(), sizes=group_sizes, skip=st.booleans())
def test_deltas_add_up_to_what_the_tokenizer_decodes(
    make: Callable[[], OctavoTokenizer], data: st.DataObject, sizes: list[int], skip: bool
) -> None:
    tokenizer = make()
    size = tokenizer.vocab_size
    unknown = st.integers(size, size + 100)
    token_ids = st.one_of(st.integers(0, size - 1), st.integers(max(0, size - 20), size - 1), unknown)
    prompt, output = data.draw(st.lists(token_ids, max_size=12)), data.draw(st.lists(token_ids, max_size=60))
    pieces, detokenizer = deltas(tokenizer, prompt, output, sizes, skip_special_tokens=skip)
    assert "".join(pieces) == continuation(tokenizer, prompt, output, skip)
    assert detokenizer.num_tokens == len(output)


@pytest.mark.slow
@makers
@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_nothing_comes_later_than_by_decoding_anew(
    make: Callable[[], OctavoTokenizer], data: st.DataObject, skip: bool
) -> None:
    tokenizer = make()
    output = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=60))
    prompt = tokenizer.encode("the")
    cheap = make_token_decoder(tokenizer, prompt, skip_special_tokens=skip)
    assert isinstance(cheap, ByteTokenDecoder)
    anew = TokenDecoder(tokenizer, prompt, skip_special_tokens=skip)
    first = second = ""
    for token_id in output:
        first += cheap.append((token_id,))
        second += anew.append((token_id,))
        # Only bytes that can no longer become a character come sooner.
        assert first.startswith(second)
        assert set(first[len(second) :]) <= {REPLACEMENT}
    assert first + cheap.flush() == second + anew.flush()


@makers
def test_no_token_is_decoded_anew(make: Callable[[], OctavoTokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make()
    prompt, output = tokenizer.encode("the"), tokenizer.encode("the 北京 fox 😀 says é\ufffd")
    assert make_token_decoder(tokenizer, prompt, skip_special_tokens=False)
    whole = tokenizer.decode(output, skip_special_tokens=False)
    monkeypatch.setattr(tokenizer, "decode", None)
    pieces, _ = deltas(tokenizer, prompt, output, skip_special_tokens=False)
    assert "".join(pieces) == whole
    assert sum(piece.count(REPLACEMENT) for piece in pieces) == whole.count(REPLACEMENT)


def test_half_a_character_at_the_end_comes_out_at_the_flush_as_one_replacement() -> None:
    tokenizer = mixed()
    assert deltas(tokenizer, [0x41], [0xF0, 0x9F, 0x98])[0] == ["", "", "", REPLACEMENT]
    assert deltas(tokenizer, [0x41], [0xF0, 0x9F, 0x41])[0] == ["", "", REPLACEMENT + "A", ""]


def test_a_character_begun_in_the_prompt_counts_once() -> None:
    tokenizer = mixed()
    special = tokenizer.encode("<s>")
    begun = [0x41, 0xF0, *special * 50, 0x9F]
    assert deltas(tokenizer, begun, [0x98, 0x80])[0] == ["", "😀", ""]
    # The prompt's text has a U+FFFD for it already.
    assert deltas(tokenizer, begun, [0x41])[0] == ["A", ""]
    assert deltas(tokenizer, begun, [0x98])[0] == ["", ""]


def decoding(*steps: Any) -> OctavoTokenizer:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.decoder = decoders.Sequence(list(steps))
    return OctavoTokenizer(tokenizer)


def test_other_decoders_are_left_to_themselves() -> None:
    for tokenizer in (
        OctavoTokenizer(Tokenizer.from_str(metaspace().to_str())),
        OctavoTokenizer(Tokenizer.from_str(byte_fallback().to_str())),
        decoding(decoders.ByteLevel(), decoders.Strip(" ", 1, 0)),
        decoding(decoders.Replace("Ġ", " "), decoders.ByteLevel()),
        OctavoTokenizer(Tokenizer(models.BPE())),
    ):
        assert tokenizer.byte_pieces(skip_special_tokens=True) is None
        decoder = make_token_decoder(tokenizer, [], skip_special_tokens=True)
        assert isinstance(decoder, TokenDecoder)
    assert decoding(decoders.ByteLevel()).byte_pieces(skip_special_tokens=True) is not None


def test_a_tokenizer_that_decodes_otherwise_than_its_parts_say_is_left_to_itself() -> None:
    class Shouting(OctavoTokenizer):
        def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            return super().decode(ids, skip_special_tokens).upper()

    tokenizer = Shouting(Tokenizer.from_str(byte_level().to_str()))
    assert tokenizer.byte_pieces(skip_special_tokens=False) is None
    detokenized, _ = deltas(tokenizer, [], tokenizer.encode("the fox"))
    assert "".join(detokenized) == "THE FOX"


def test_a_prompt_that_ends_in_special_tokens_is_looked_at_no_further_back_than_the_limit() -> None:
    looked_up: list[int] = []

    class Counted(BytePieces):
        def __getitem__(self, token_id: int) -> str | bytes:
            looked_up.append(token_id)
            return super().__getitem__(token_id)

    ByteTokenDecoder(Counted(lambda token_id: b""), [7] * 100 * MAX_LOOK_BACK)
    assert len(looked_up) == MAX_LOOK_BACK
