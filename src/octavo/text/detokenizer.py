"""Incremental detokenization: decode a growing sequence without decoding all of it again for each token."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from octavo.sampling_params import SamplingParams
from octavo.text.byte_pieces import MAX_LOOK_BACK, ByteTokenDecoder
from octavo.text.stop_strings import StopStringMatcher
from octavo.text.tokenizer import Tokenizer

# The character to which tokenizers decode bytes that are not (yet) valid UTF-8.
REPLACEMENT = "\ufffd"

# Number of earlier tokens that are decoded with new ones; they determine whether a leading space is part of the text.
_CONTEXT = 6
_MAX_CONTEXT = 24
# A UTF-8 character has at most 4 bytes, so an incomplete one takes at most 3 tokens at the end.
_MAX_PARTIAL = 3
# Number of undecodable tokens that are held back before those that cannot become a character are emitted.
_MAX_PENDING = 8


class TokenDecoder:
    """Decodes tokens that continue a prompt, with any tokenizer; never returns half a character.

        context (its text was emitted)        pending (some of it may have been)
        ┌────────────────────────────────┐┌──────────────────┐
          … ▁it  ▁is  ▁done  .             ▁  <0xF0> <0x9F>        decode(context + pending) = "…it is done. �"
                                                                                               └─ given ──┘└─ waits

    Each `append` decodes context and pending once. When the decoded text ends in a whole character, pending joins the
    context, and the context is cut back once it is long: O(1) per token. Undecodable bytes are emitted as U+FFFD when
    a following token shows that they do not begin a character, or at `flush`.

    The deltas add up to the decoded whole, with one exception: if tokens stand for single bytes (SentencePiece's byte
    fallback), decoders turn a whole run of them into U+FFFD when any byte of it is invalid. The part of such a run that
    was already emitted does not change.
    """

    def __init__(
        self, decoder: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._pending: list[int] = []
        self._context: list[int] = []
        self._context_text = ""
        # Number of characters of the window's text that were emitted.
        self._given = 0
        self._max_pending = _MAX_PENDING
        length = _CONTEXT
        self._set_context(list(prompt_token_ids[-length:]))
        # Special tokens have no text: go back to tokens that do, or the first word would lose its space.
        while not self._context_text and length < min(len(prompt_token_ids), MAX_LOOK_BACK):
            length *= 4
            self._set_context(list(prompt_token_ids[-length:]))

    def copy(self) -> TokenDecoder:
        """Return a copy, for another output that continues from here."""
        other = copy(self)
        other._pending, other._context = self._pending.copy(), self._context.copy()
        return other

    def append(self, token_ids: Sequence[int]) -> str:
        """Add tokens, and return the new text that no further token can change."""
        self._pending += token_ids
        window = self._decode(self._context + self._pending)
        if window.endswith(REPLACEMENT):
            return self._partial(window)
        return self._commit(window)

    def flush(self) -> str:
        """Return the remaining text when no token follows."""
        if not self._pending:
            return ""
        return self._commit(self._decode(self._context + self._pending))

    def _partial(self, window: str) -> str:
        """Emit what precedes the undecodable end, and as much of that end as can no longer become a character."""
        if len(self._pending) > self._max_pending:
            if (cut := self._cut(window)) is not None:
                place, text = cut
                rest = self._pending[place:]
                del self._pending[place:]
                delta = self._commit(text)
                self._pending = rest
                return delta
            # No token begins with a character. Try again when there are twice as many, to stay O(1) per token.
            self._max_pending = 2 * len(self._pending)
        stable = window.rstrip(REPLACEMENT)
        if not stable.startswith(self._context_text) or len(stable) <= self._given:
            return ""
        delta = stable[self._given :]
        self._given = len(stable)
        return delta

    def _cut(self, window: str) -> tuple[int, str] | None:
        """Find where pending can be cut between two characters near its end; return the place and the text up to it.

        The best cut is after a whole character, because with byte fallback an incomplete character at the end hides
        whole ones before it. Otherwise cut between invalid bytes, if both parts decode to the same text as the whole.
        """
        places = range(len(self._pending) - 1, len(self._pending) - 1 - _MAX_PARTIAL, -1)
        texts = [(place, self._decode(self._context + self._pending[:place])) for place in places]
        # A token may be text followed by half a character, with its text already emitted: do not cut before it.
        texts = [(place, text) for place, text in texts if len(text) >= self._given]
        for place, text in texts:
            if not text.endswith(REPLACEMENT):
                return place, text
        for place, text in texts:
            rest = self._decode(self._pending[place:])
            # A rest without text does not show where a character ends.
            if rest and text + rest == window:
                return place, text
        return None

    def _commit(self, window: str) -> str:
        """Emit the whole window, and move the pending tokens to the context."""
        if window.startswith(self._context_text):
            delta = window[self._given :]
        elif self._context_text.endswith(REPLACEMENT):
            # The prompt ended within a character that is now complete.
            delta = window[_common_length(window, self._context_text) :]
        else:
            # Byte fallback: invalid bytes turned the ones before them, which were already emitted, into U+FFFD.
            delta = self._decode(self._pending)
        # Tokens without text (special ones) are dropped, because they would be useless as context. But at the very
        # beginning a lone "▁" has no text either, and must be kept, because it makes the next "▁" a space.
        if not delta and not self._context_text:
            self._context += [t for t in self._pending if not self._decoder.decode([t], skip_special_tokens=False)]
        elif delta or self._given > len(self._context_text):
            self._context += self._pending
            self._context_text, self._given = window, len(window)
            if len(self._context) > _MAX_CONTEXT:
                self._set_context(self._pending[-_MAX_CONTEXT:])
        self._pending = []
        self._max_pending = _MAX_PENDING
        return delta

    def _set_context(self, token_ids: list[int]) -> None:
        self._context = token_ids
        self._context_text = self._decode(token_ids)
        self._given = len(self._context_text)

    def _decode(self, token_ids: list[int]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def _common_length(first: str, second: str) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def make_token_decoder(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
) -> TokenDecoder | ByteTokenDecoder:
    """Return the fastest exact decoder: a lookup of bytes if every token has its own, otherwise a `TokenDecoder`."""
    if isinstance(tokenizer, Tokenizer) and (pieces := tokenizer.byte_pieces(skip_special_tokens)) is not None:
        return ByteTokenDecoder(pieces, prompt_token_ids)
    return TokenDecoder(tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens)


class IncrementalDetokenizer:
    """The text of a sequence that a client may see: whole characters, and no part of a stop string that ends it.

    Attributes:
        num_tokens: number of output tokens added; after a match, up to and including the one that completed it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self.num_tokens = 0
        self._text: list[str] = []
        self._min_tokens = params.min_tokens
        self._tokens = (
            make_token_decoder(tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens)
            if params.detokenize
            else None
        )
        self._matcher = (
            StopStringMatcher(tuple(params.stop), keep=params.include_stop_str_in_output) if params.stop else None
        )

    def copy(self) -> IncrementalDetokenizer:
        """Return a copy, for another output of the same prompt. No token may have been appended."""
        # Not `copy.copy`, which takes five times as long, and a request may have 64 outputs.
        other = IncrementalDetokenizer.__new__(IncrementalDetokenizer)
        other.num_tokens, other._min_tokens, other._text = self.num_tokens, self._min_tokens, []
        other._tokens = self._tokens.copy() if self._tokens is not None else None
        other._matcher = copy(self._matcher)
        return other

    @property
    def text(self) -> str:
        """All text emitted so far."""
        return "".join(self._text)

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found, or None; tokens appended after it are ignored."""
        return self._matcher.matched if self._matcher else None

    def append(self, token_ids: Sequence[int]) -> str:
        """Add tokens, and return the new text that is safe to send.

        Stop strings only count if they end after `min_tokens` tokens, as in vLLM.
        """
        if self._tokens is None:
            self.num_tokens += len(token_ids)
            return ""
        if self._matcher is None:
            self.num_tokens += len(token_ids)
            if text := self._tokens.append(token_ids):
                self._text.append(text)
            return text
        if len(token_ids) == 1 and self._matcher.matched is None:
            self.num_tokens += 1
            new_text = self._tokens.append(token_ids)
            return self._give(self._matcher.feed(new_text, may_match=self.num_tokens > self._min_tokens))
        pieces = []
        for token_id in token_ids:
            if self._matcher.matched is not None:
                break
            self.num_tokens += 1
            new_text = self._tokens.append((token_id,))
            pieces.append(self._matcher.feed(new_text, may_match=self.num_tokens > self._min_tokens))
        return self._give("".join(pieces))

    def flush(self) -> str:
        """Return the rest of the text when no token follows: undecodable bytes, and beginnings of stop strings."""
        if self._tokens is None or self.stop_string is not None:
            return ""
        rest = self._tokens.flush()
        if self._matcher is not None:
            rest = self._matcher.feed(rest, may_match=self.num_tokens > self._min_tokens)
            rest += self._matcher.flush()
        return self._give(rest)

    def _give(self, text: str) -> str:
        if text:
            self._text.append(text)
        return text
