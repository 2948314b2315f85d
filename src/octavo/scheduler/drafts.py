"""Drafts: tokens that may follow a sequence, found without a model.

They change when tokens come, never which.

    prediction  the text that the request predicts, or the outline of its JSON Schema
    replaced    the same after its next token, in place of which another came, such as other white space
    quoted      names and numbers of the prompt, as they are spelled at the beginning of a string in JSON
    copy        the text that the last tokens are a copy of, with changes: an edit
    ngram       what followed the last tokens where they occurred before, in the sequence's own prompt and output
    suffix      what followed the whole sequence before, in the tree of cached blocks, which has its own scope's alone
    recent      what followed the last tokens in the scope's latest outputs

Of those that begin with the last tokens, the longest match wins. Method "ngram" has the first five.
What must be remembered of a sequence is in `Sequence.state`, so it ends with the sequence; outputs are kept apart.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence as Seq
from typing import NamedTuple, cast

from octavo.kvcache.manager import KVCacheManager
from octavo.request import GAP, Sequence

_TOKEN_BITS = 24
# Occurrences compared to find the longest match, the latest first.
_MOST_OCCURRENCES = 8
# Tokens that a copy may leave out or replace at once.
_MOST_LEFT_OUT = 8
# A prediction counts as a copy of so many tokens at first, and of so many more where some of it occurs again.
_TRUSTED = 8
# Tokens indexed in one step, so that no step waits long for a prompt: 4,096 take about 2 ms.
_INDEXED_AT_ONCE = 4096
# Of each of the scopes used last, the latest 8,192 to 16,384 tokens of outputs are kept: about 2 MB a scope.
_KEPT_OUTPUTS = 8192
_MOST_SCOPES = 32


class Draft(NamedTuple):
    """Tokens that may follow a sequence.

    Attributes:
        source: where they were found.
        match: how many of the sequence's last tokens precede them there, as far as they were compared.
    """

    token_ids: tuple[int, ...]
    source: str
    match: int


class Copy:
    """Earlier tokens of which a sequence's last tokens are a copy, with changes.

        earlier     a b c d e f
        copy        a b x d         e is expected after d, and nothing after x: it may replace c, or be inserted

    Attributes:
        expected: place of the token that follows if the copy goes on.
        num_copied: how many tokens agree, halved where some are left out or replaced.
        agrees: whether the last one does.
        num_changed: tokens since the last one that agreed.
        inserted: tokens that the copy has inserted after a token the last time, such as a line's indentation.
    """

    __slots__ = ("agrees", "expected", "inserted", "num_changed", "num_copied")

    def __init__(self, expected: int, num_copied: int) -> None:
        self.expected, self.num_copied, self.agrees = expected, num_copied, num_copied > 0
        self.inserted: dict[int, Seq[int]] = {}
        self.num_changed = 0

    def follow(self, tokens: Seq[int], first: int) -> None:
        """Compare the tokens of the copy from the place `first` on. What a gap stands for is no change."""
        for place in range(first, len(tokens)):
            token, expected = tokens[place], self.expected
            if expected < place and tokens[expected] == token:
                last = tokens[place - self.num_changed - 1]
                if 0 < self.num_changed <= _MOST_LEFT_OUT:
                    self.inserted[last] = tokens[place - self.num_changed : place]
                else:
                    self.inserted.pop(last, None)
                self.num_changed = 0
                self.expected, self.num_copied, self.agrees = expected + 1, self.num_copied + 1, True
                continue
            self.agrees = False
            self.num_changed += 1
            for at in range(expected + 1, min(place, expected + 1 + _MOST_LEFT_OUT)):
                if tokens[at] == token and (at == expected + 1 or tokens[at - 1] == tokens[place - 1]):
                    self.num_copied = 1 + self.num_copied // (1 if tokens[expected] == GAP else 2)
                    self.expected, self.agrees, self.num_changed = at + 1, True, 0
                    break

    def with_insertions(self, last: int, following: Seq[int]) -> tuple[int, ...]:
        """Return the tokens that follow a last one, with those that the copy has inserted between such tokens."""
        draft: list[int] = []
        for token_id in following:
            draft += [*self.inserted.get(last, ()), token_id]
            last = token_id
        return tuple(draft)


class TokenIndex:
    """The tokens of a sequence, and where each run of `width` tokens occurred before.

        tokens      a b c d a b c       width 2
        earlier     . . . . . 1 2       for the run that ends at each token, the end of its last occurrence

    Attributes:
        tokens: all tokens indexed so far.
        num_before: number of tokens before the sequence, with the gaps after them.
        first_quoted: how many of these are predicted; the others may be quoted.
        copies: what the output is a copy of, by source: of the tokens before the sequence, and of what it copied last.

    Args:
        predicted: tokens that the sequence's output may be a copy of.
        quoted: see `Request.quoted_ids`.
    """

    def __init__(self, width: int, predicted: Seq[int] = (), quoted: Seq[int] = ()) -> None:
        self.tokens = array("i")
        self.copies = {"prediction": Copy(0, _TRUSTED)} if predicted else dict[str, Copy]()
        self._num_followed = 0
        self.first_quoted = len(predicted) + 1 if predicted else 0
        self.num_before = self.first_quoted + len(quoted)
        self._width = width
        self._mask = (1 << _TOKEN_BITS * width) - 1
        self._run = 0
        self._latest: dict[int, int] = {}
        self._earlier = array("i")
        if predicted:
            self.append([*predicted, GAP])
        self.append(quoted)

    def extend(self, seq: Sequence) -> bool:
        """Index the tokens that a sequence has gained; returns whether all of them are indexed now."""
        if (first := len(self.tokens) - self.num_before) < seq.num_prompt_tokens:
            self._num_followed = self.num_before + seq.num_prompt_tokens
        last = min(seq.num_tokens, first + _INDEXED_AT_ONCE)
        self.append(seq.tokens(first, last))
        return last == seq.num_tokens

    def append(self, token_ids: Seq[int]) -> None:
        """Index more tokens."""
        tokens, run, latest = self.tokens, self._run, self._latest
        first = len(tokens)
        tokens.extend(token_ids)
        for place in range(first, len(tokens)):
            run = (run << _TOKEN_BITS | tokens[place]) & self._mask
            self._earlier.append(latest.get(run, -1) if place >= self._width else -1)
            latest[run] = place
        self._run = run

    def longest_match(self, text: Seq[int], most: int) -> tuple[int, int]:
        """Return the length of the longest match of a text's last tokens, up to `most`, and the end of its occurrence.

        The text is `tokens`, of which earlier occurrences count, or another one. Of several, the latest. The length is
        0 if there is none of at least `width` tokens.
        """
        tokens, end, run, longest, found = self.tokens, len(text) - 1, 0, 0, -1
        if text is tokens:
            place = self._earlier[end] if end >= 0 else -1
        else:
            for token_id in text[-self._width :]:
                run = run << _TOKEN_BITS | token_id
            place = self._latest.get(run, -1)
        most = min(most, end + 1)
        for _ in range(_MOST_OCCURRENCES):
            if place < 0 or longest >= most:
                break
            length = 0
            while length < most and length <= place and tokens[place - length] == text[end - length]:
                length += 1
            if length > longest:
                longest, found = length, place
            place = self._earlier[place]
        return (longest, found) if longest >= self._width else (0, -1)

    def follow_copies(self) -> None:
        """Compare the output's tokens that came since with what it copies."""
        for copy in self.copies.values():
            copy.follow(self.tokens, self._num_followed)
        self._num_followed = len(self.tokens)

    def after(self, place: int, count: int) -> tuple[int, ...]:
        """Return `count` tokens after a place, up to a gap; after the last token, they repeat."""
        following = self.tokens[place + 1 : place + 1 + count].tolist()
        if GAP in following:
            return tuple(following[: following.index(GAP)])
        while following and len(following) < count:
            following += following[: count - len(following)]
        return tuple(following)

    def after_replaced(self, count: int) -> Draft | None:
        """Return the tokens after the predicted token that the last token may replace; None if there is none."""
        copy = self.copies.get("prediction")
        if copy is None or copy.num_changed != 1 or GAP in self.tokens[max(0, copy.expected - 1) : copy.expected + 1]:
            return None
        following = self.after(copy.expected, count)
        return Draft(following, "replaced", self._width + copy.num_copied // 2) if following else None


class LatestOutputs:
    """The tokens of one scope's latest outputs: two indexes, the older of which is dropped when the other is full.

    Args:
        width: see `TokenIndex`.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._indexes = [TokenIndex(width)]

    def add(self, seq: Sequence) -> None:
        """Index the end of a sequence's output, and the last tokens before it."""
        first = max(seq.num_prompt_tokens - self._width, seq.num_tokens - _INDEXED_AT_ONCE, 0)
        if len(self._indexes[0].tokens) >= _KEPT_OUTPUTS:
            self._indexes = [TokenIndex(self._width), self._indexes[0]]
        self._indexes[0].append([*seq.tokens(first, seq.num_tokens), GAP])

    def draft(self, last: Seq[int], count: int) -> tuple[int, tuple[int, ...]]:
        """Return the length of the longest match of the last tokens of a sequence, and up to `count` that followed."""
        best: tuple[int, tuple[int, ...]] = 0, ()
        for index in self._indexes:
            length, place = index.longest_match(last, len(last))
            if length > best[0]:
                best = length, index.after(place, count)
        return best


class DraftMethod:
    """Finds drafts of all sources above.

    Args:
        least, most_match: the length of matches in a sequence's own text, in tokens.
        kv: the cache whose tree of blocks is asked what followed the whole sequence; None for its own text alone.
    """

    def __init__(self, least: int, most_match: int, kv: KVCacheManager | None = None) -> None:
        self._least = least
        self._most_match = most_match
        self._kv = kv
        self._outputs: OrderedDict[str, LatestOutputs] = OrderedDict()  # by scope, the one used last at the end

    def remember(self, seq: Sequence) -> None:
        """Keep the output of a sequence that has ended, for drafts of others in its scope."""
        if self._kv is None or not seq.output_token_ids:
            return
        scope = seq.request.cache_scope
        outputs = self._outputs.setdefault(scope, LatestOutputs(self._least))
        self._outputs.move_to_end(scope)
        outputs.add(seq)
        if len(self._outputs) > _MOST_SCOPES:
            self._outputs.popitem(last=False)

    def forget(self) -> None:
        """Forget all outputs."""
        self._outputs.clear()

    def draft(self, seq: Sequence, most: int) -> Draft | None:
        """Return at most `most` tokens that may follow the tokens of a running sequence; None if nothing is known."""
        if (kv := self._kv) is not None:
            # Once in each block: what did not follow one token does not follow the next, unless it was published since.
            block = seq.num_tokens // kv.spec.block_size
            if seq.state.suffix_block != block:
                if following := kv.tokens_after(seq, most):
                    return Draft(following, "suffix", seq.num_tokens)
                seq.state.suffix_block = block
        request, index = seq.request, cast(TokenIndex | None, seq.state.token_index)
        if index is None:
            index = seq.state.token_index = TokenIndex(self._least, request.predicted_ids, request.quoted_ids)
        if not index.extend(seq):
            return None
        index.follow_copies()
        length, place = index.longest_match(index.tokens, self._most_match)
        if length < self._most_match and (outputs := self._outputs.get(seq.request.cache_scope)) is not None:
            matched, following = outputs.draft(
                seq.tokens(max(0, seq.num_tokens - self._most_match), seq.num_tokens), most
            )
            if matched > length and following:
                return Draft(following, "recent", matched)
        for source, copy in index.copies.items():
            is_longest = copy.agrees and copy.num_copied >= max(length, self._least)
            if is_longest and (following := index.after(copy.expected - 1, most)):
                return Draft(copy.with_insertions(index.tokens[-1], following)[:most], source, copy.num_copied)
        if not length:
            return index.after_replaced(most)
        if not (following := index.after(place, most)):
            return None
        if index.first_quoted <= place < index.num_before:
            return Draft(following, "quoted", length)
        if place < index.num_before:  # it goes on elsewhere, such as in the outline that is indented
            copy = index.copies["prediction"] = Copy(place + 1, length + _TRUSTED)
            return Draft(following, "prediction", copy.num_copied)
        index.copies["copy"] = Copy(place + 1, length)
        return Draft(following, "ngram", length)
