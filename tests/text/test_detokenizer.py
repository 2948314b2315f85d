"""Incremental text: whole characters only, no part of a stop string, and in sum exactly the decoded whole."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from octavo.checkpoint.model_source import resolve_model
from octavo.sampling_params import SamplingParams
from octavo.text.byte_pieces import MAX_LOOK_BACK
from octavo.text.detokenizer import IncrementalDetokenizer, TokenDecoder
from octavo.text.stop_strings import StopStringMatcher
from octavo.text.tokenizer import Tokenizer as OctavoTokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog, and then the dog sleeps",
    "Größe, naïve café, señor; 北京欢迎你 日本語 한국어 Привет мир",
    "👩‍👩‍👧‍👦 emoji 😀😃 e\u0301 a\u0308 ﷽ \U0001f3f3\ufe0f\u200d\U0001f308",
] * 4
SPECIAL = ["<s>", "</s>", "<|user|>"]


@functools.cache
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=450, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@functools.cache
def straddling() -> Tokenizer:
    """Bytes, and tokens that end or begin within a character: "a\\xe2", "\\x82\\xac", "\\x82\\xac\\xe2" (of "€€")."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    for token in ["aâ", "Ĥ¬", "Ĥ¬â"]:
        vocab[token] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, [("a", "â"), ("Ĥ", "¬"), ("Ĥ¬", "â")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


@functools.cache
def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@functools.cache
def byte_fallback() -> Tokenizer:
    """As Llama 2's: words with ▁, and one token for each byte of what has none."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))])}
    for piece in ["▁", *"helowrd", "▁h", "he"]:
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, [("▁", "h"), ("h", "e")], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


@functools.cache
def smollm2() -> OctavoTokenizer:
    return OctavoTokenizer.from_source(resolve_model("smollm2"))


def vocab_size(tokenizer: Any) -> int:
    return tokenizer.vocab_size if isinstance(tokenizer, OctavoTokenizer) else tokenizer.get_vocab_size()


def encode(tokenizer: Any, text: str) -> list[int]:
    encoded = tokenizer.encode(text)
    return encoded if isinstance(encoded, list) else encoded.ids


def continuation(tokenizer: Any, prompt: list[int], output: list[int], skip_special_tokens: bool = True) -> str:
    """What the output adds to the prompt's text; a character the prompt only began counts as added."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip_special_tokens)
    whole = tokenizer.decode(prompt + output, skip_special_tokens=skip_special_tokens)
    if whole.startswith(before):
        return whole[len(before) :]
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(whole, before, strict=False))
    return whole[sum(1 for _ in same) :]


def cut_up(token_ids: list[int], sizes: list[int]) -> list[list[int]]:
    groups: list[list[int]] = []
    rest = list(token_ids)
    for size in itertools.cycle(sizes):
        if not rest:
            return groups
        groups.append(rest[:size])
        rest = rest[size:]
    return groups


def deltas(
    tokenizer: Any, prompt: list[Any], output: list[Any], sizes: Sequence[int] = (1,), **params: Any
) -> tuple[list[str], IncrementalDetokenizer]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, SamplingParams(**params))
    pieces = [detokenizer.append(group) for group in cut_up(output, list(sizes))]
    return [*pieces, detokenizer.flush()], detokenizer


texts = st.text(
    st.one_of(
        st.sampled_from("the quick brown fox "),
        st.sampled_from("😀👩\u200d👧é\u0301北京ßй\ufffd\ufe0f\U0001f3f3"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=60,
)
group_sizes = st.lists(st.integers(1, 7), min_size=1, max_size=4)
exact = pytest.mark.parametrize("make", [byte_level, straddling, metaspace, smollm2], ids=lambda make: make.__name__)


@pytest.mark.slow
@exact
@settings(max_examples=150, deadline=None)
@given(data=st.data(), sizes=st.one_of(st.just([1]), group_sizes), skip=st.booleans())
def test_deltas_of_random_tokens_add_up_to_the_decoded_whole(
    make: Callable[..., Any], data: st.DataObject, sizes: list[int], skip: bool
) -> None:
    tokenizer = make()
    token_ids = st.one_of(
        st.integers(0, vocab_size(tokenizer) - 1),
        st.sampled_from(encode(tokenizer, "dog 😀 北京 a€€€a€ \ufffd")),
        st.integers(0, 2),
    )
    # Any prompt but one whose last character is cut in two by more special tokens than are looked back upon.
    ordinary = st.integers(20, vocab_size(tokenizer) - 1)
    prompt = [0] * data.draw(st.integers(0, 8)) + data.draw(st.lists(ordinary, max_size=12))
    output = data.draw(st.lists(token_ids, max_size=60))
    pieces, detokenizer = deltas(tokenizer, prompt, output, sizes, skip_special_tokens=skip)
    assert "".join(pieces) == continuation(tokenizer, prompt, output, skip)
    assert detokenizer.text == "".join(pieces)
    assert detokenizer.num_tokens == len(output)


@pytest.mark.parametrize("make", [byte_level, metaspace, byte_fallback, smollm2], ids=lambda make: make.__name__)
@settings(max_examples=150, deadline=None)
@given(prompt=texts, text=texts, sizes=st.one_of(st.just([1]), group_sizes))
def test_no_delta_holds_half_a_character(make: Callable[..., Any], prompt: str, text: str, sizes: list[int]) -> None:
    tokenizer = make()
    prompt_ids, output = encode(tokenizer, prompt + " so"), encode(tokenizer, " " + text)
    pieces, _ = deltas(tokenizer, prompt_ids, output, sizes)
    whole = continuation(tokenizer, prompt_ids, output)
    assert "".join(pieces) == whole
    # Half a character would be a U+FFFD that the text itself does not have.
    assert sum(piece.count("\ufffd") for piece in pieces) == whole.count("\ufffd")


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(data=st.data(), sizes=group_sizes)
def test_bytes_outside_utf8_never_take_back_or_lose_text(data: st.DataObject, sizes: list[int]) -> None:
    tokenizer = byte_fallback()
    some_bytes = st.integers(len(SPECIAL), len(SPECIAL) + 255)
    token_ids = st.one_of(some_bytes, st.integers(0, vocab_size(tokenizer) - 1))
    output = data.draw(st.lists(token_ids, max_size=40)) + encode(tokenizer, " hello")
    pieces, _ = deltas(tokenizer, encode(tokenizer, "hello"), output, sizes)
    assert "".join(pieces).endswith("hello")


def test_a_character_of_several_tokens_comes_out_with_its_last() -> None:
    tokenizer = byte_level()
    output = encode(tokenizer, "🦜")
    assert len(output) > 2
    pieces, _ = deltas(tokenizer, encode(tokenizer, "a"), output)
    assert pieces == [*[""] * (len(output) - 1), "🦜", ""]


def test_a_real_replacement_character_comes_out_once_something_follows() -> None:
    tokenizer: Any = byte_level()
    detokenizer = IncrementalDetokenizer(tokenizer, [], SamplingParams())
    assert detokenizer.append(encode(tokenizer, "a\ufffd")) == "a"
    assert detokenizer.append(encode(tokenizer, "b")) == "\ufffdb"
    assert detokenizer.append(encode(tokenizer, "\ufffd")) == ""
    assert detokenizer.flush() == "\ufffd"


def test_bytes_that_never_make_a_character_are_not_waited_for_forever() -> None:
    tokenizer = byte_level()
    [junk] = [token for token in range(vocab_size(tokenizer)) if tokenizer.id_to_token(token) == "ÿ"]
    pieces, _ = deltas(tokenizer, encode(tokenizer, "a"), [junk] * 100)
    assert "".join(pieces) == "\ufffd" * 100
    assert len("".join(pieces[:-1])) >= 90


def test_the_first_word_after_a_prompt_keeps_its_space() -> None:
    for tokenizer in (metaspace(), byte_fallback()):
        prompt, output = encode(tokenizer, "hello"), encode(tokenizer, "he")
        assert "".join(deltas(tokenizer, prompt, output)[0]) == " he"
        special = [tokenizer.token_to_id("<|user|>")]
        assert "".join(deltas(tokenizer, prompt + special * 9, special + output)[0]) == " he"
        assert "".join(deltas(tokenizer, special, output)[0]) == "he"


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_text_only_where_asked_for(skip: bool) -> None:
    tokenizer = byte_level()
    output = [tokenizer.token_to_id("</s>"), *encode(tokenizer, "dog")]
    pieces, _ = deltas(tokenizer, encode(tokenizer, "the"), output, skip_special_tokens=skip)
    assert "".join(pieces) == ("dog" if skip else "</s>dog")


def test_without_detokenize_there_is_no_text() -> None:
    pieces, detokenizer = deltas(byte_level(), [5], [6, 7, 8], detokenize=False)
    assert (pieces, detokenizer.text, detokenizer.num_tokens) == ([""] * 4, "", 3)


class CountingDecoder:
    """Counts the tokens it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.num_decoded = tokenizer, 0

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(ids)
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("kind", ["text", "junk", "special"])
def test_work_per_token_does_not_grow_with_the_text(kind: str) -> None:
    tokenizer = byte_level()
    [junk] = [token for token in range(vocab_size(tokenizer)) if tokenizer.id_to_token(token) == "ÿ"]
    token_ids = {"text": encode(tokenizer, CORPUS[1]), "junk": [junk], "special": [0]}[kind]
    counting: Any = CountingDecoder(tokenizer)
    decoder = TokenDecoder(counting, encode(tokenizer, CORPUS[0]))
    for token_id in itertools.islice(itertools.cycle(token_ids), 2000):
        decoder.append([token_id])
    assert counting.num_decoded < 2000 * 60


def first_match(text: str, stop: list[str]) -> tuple[int, str] | None:
    """Where the text is cut, and by which: the stop string complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        if complete := [s for s in stop if text[:end].endswith(s)]:
            longest = max(complete, key=len)
            return end - len(longest), longest
    return None


stops = st.lists(st.text("ab<", min_size=1, max_size=5), min_size=1, max_size=4)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(st.text("ab<", max_size=6), max_size=10), stop=stops)
def test_a_stop_string_that_is_kept_is_given_out_too(pieces: list[str], stop: list[str]) -> None:
    cut, whole = StopStringMatcher(stop), StopStringMatcher(stop, keep=True)
    without = "".join(map(cut.feed, pieces)) + cut.flush()
    assert "".join(map(whole.feed, pieces)) + whole.flush() == without + (cut.matched or "")


@given(pieces=st.lists(st.text("ab<", max_size=6), max_size=10), stop=stops)
@example(pieces=["aab"], stop=["ab"])
@example(pieces=["abab", "abc"], stop=["ababc"])
def test_text_is_given_out_up_to_the_first_stop_string(pieces: list[str], stop: list[str]) -> None:
    matcher = StopStringMatcher(stop)
    out = taken_in = ""
    for piece in pieces:
        out, taken_in = out + matcher.feed(piece), taken_in + piece
        held = taken_in[len(out) :]
        # Nothing is held back but a beginning of a stop string.
        assert matcher.matched or not held or any(s.startswith(held) and s != held for s in stop)
    out += matcher.flush()
    text, match = "".join(pieces), first_match("".join(pieces), stop)
    assert (out, matcher.matched) == ((text[: match[0]], match[1]) if match else (text, None))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(text=texts, data=st.data(), sizes=group_sizes)
def test_no_part_of_a_stop_string_is_given_out(text: str, data: st.DataObject, sizes: list[int]) -> None:
    tokenizer = byte_level()
    output = encode(tokenizer, text)
    start = data.draw(st.integers(0, len(text)))
    stop = [text[start : start + data.draw(st.integers(1, 8))] or "never in it"]
    pieces, detokenizer = deltas(tokenizer, encode(tokenizer, "dog"), output, sizes, stop=stop)
    match = first_match(text, stop)
    assert detokenizer.stop_string == (match[1] if match else None)
    assert "".join(pieces) == (text[: match[0]] if match else text)
    one_by_one, other = deltas(tokenizer, encode(tokenizer, "dog"), output, stop=stop)
    assert "".join(one_by_one) == "".join(pieces)
    assert other.num_tokens == detokenizer.num_tokens


def test_a_stop_string_across_tokens_is_held_back_and_counts_its_tokens() -> None:
    tokenizer = byte_level()
    output = [token for piece in ("the", " d", "o", "g", " fox") for token in encode(tokenizer, piece)]
    pieces, detokenizer = deltas(tokenizer, [], output, stop=[" dog"])
    assert "".join(pieces) == "the"
    assert detokenizer.stop_string == " dog"
    completed = detokenizer.num_tokens
    assert tokenizer.decode(output[:completed]) == "the dog"
    assert tokenizer.decode(output[: completed - 1]) == "the do"


def test_a_beginning_of_a_stop_string_comes_out_at_the_end() -> None:
    tokenizer = byte_level()
    pieces, detokenizer = deltas(tokenizer, [], encode(tokenizer, "the d"), stop=[" dogs"])
    assert "".join(pieces[:-1]) == "the"
    assert pieces[-1] == " d"
    assert detokenizer.stop_string is None


def test_stop_strings_count_only_after_min_tokens() -> None:
    tokenizer = byte_level()
    letters = [token for letter in "xaxbxab" for token in encode(tokenizer, letter)]
    assert len(letters) == 7
    pieces, detokenizer = deltas(tokenizer, [], letters, stop=["x"], min_tokens=3)
    assert "".join(pieces) == "xaxb"
    assert detokenizer.num_tokens == 5
    # It may begin before and end after.
    pieces, detokenizer = deltas(tokenizer, [], letters, stop=["axb"], min_tokens=3)
    assert ("".join(pieces), detokenizer.num_tokens) == ("x", 4)


def test_a_long_stop_string_does_not_make_tokens_slow() -> None:
    matcher = StopStringMatcher(["a" * 100_000 + "b"])
    begun = time.thread_time()
    for _ in range(20):
        assert matcher.feed("a" * 100) == ""
    assert time.thread_time() - begun < 10.0, "of the processor; it takes less than a millisecond"
    assert matcher.feed("c") == "a" * 2000 + "c"


@pytest.mark.parametrize("make", [smollm2, byte_fallback], ids=lambda make: make.__name__)
def test_copies_for_several_outputs_of_one_prompt_know_nothing_of_each_other(make: Callable[[], Any]) -> None:
    tokenizer = make()
    encoded = (tokenizer.encode(text) for text in ("a b ", "one stop two", "北京 three"))
    prompt, first, second = (list(getattr(found, "ids", found)) for found in encoded)
    params = SamplingParams(stop="stop")
    original = IncrementalDetokenizer(tokenizer, prompt, params)
    copies = [original.copy() for _ in range(2)]
    texts = ["", ""]
    for pair in itertools.zip_longest(first, second):
        for i, token_id in enumerate(pair):
            if token_id is not None:
                texts[i] += copies[i].append([token_id])
    texts = [text + copy.flush() for text, copy in zip(texts, copies, strict=True)]
    alone = ["".join(deltas(tokenizer, prompt, output, stop="stop")[0]) for output in (first, second)]
    assert texts == alone
    assert (copies[0].stop_string, copies[1].stop_string, original.stop_string) == ("stop", None, None)


def test_a_prompt_without_text_is_decoded_no_further_back_than_the_limit() -> None:
    lengths: list[int] = []

    class Silent:
        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            lengths.append(len(ids))
            return ""

    silent: Any = Silent()
    TokenDecoder(silent, [7] * 1_000_000)
    assert max(lengths) <= 4 * MAX_LOOK_BACK
