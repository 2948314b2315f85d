"""Incremental detokenization for byte-level vocabularies: each token stands for bytes of its own, wherever it is."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

# Maximum length in bytes of an incomplete UTF-8 character.
_MAX_UNFINISHED = 3
# Maximum number of tokens at the end of a prompt that are searched for its last bytes; a prompt may end in any number
# of special tokens, which have no bytes.
MAX_LOOK_BACK = 1024


class BytePieces(dict[int, str | bytes]):
    """The bytes each token adds to a text: a string if its bytes are whole characters, otherwise the bytes themselves.

    Filled on demand, so that a vocabulary costs nothing at start-up. Unknown ids add nothing.

    Args:
        bytes_of: returns the bytes of a token, or b"" for a token that is left out of the text.
    """

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        super().__init__()
        self._bytes_of = bytes_of

    def __missing__(self, token_id: int) -> str | bytes:
        data = self._bytes_of(token_id)
        piece: str | bytes
        try:
            piece = data.decode()
        except UnicodeDecodeError:
            piece = data
        self[token_id] = piece
        return piece

    def join(self, token_ids: Sequence[int]) -> bytes:
        """Return the concatenated bytes of several tokens."""
        pieces = [self[token_id] for token_id in token_ids]
        return b"".join([piece.encode() if isinstance(piece, str) else piece for piece in pieces])


class ByteTokenDecoder:
    """Decodes tokens that continue a prompt; never returns half a character.

    Bytes that may still become a character are held back; invalid bytes become U+FFFD at once. The deltas add up to
    what the output adds to the decoded prompt; a character that was only begun in the prompt counts as added.
    """

    __slots__ = ("_begun_in_prompt", "_pieces", "_unfinished")

    def __init__(self, pieces: BytePieces, prompt_token_ids: Sequence[int]) -> None:
        self._pieces = pieces
        self._unfinished = b""
        tail = b""
        for piece in map(pieces.__getitem__, reversed(prompt_token_ids[-MAX_LOOK_BACK:])):
            if piece:
                tail = (piece.encode() if isinstance(piece, str) else piece) + tail
                # Whatever precedes these bytes cannot change how they decode: a first byte never continues a character.
                if len(tail) >= _MAX_UNFINISHED:
                    break
        self._take_in(tail)
        # If so, the prompt's own text ends in a U+FFFD.
        self._begun_in_prompt = bool(self._unfinished)

    def copy(self) -> ByteTokenDecoder:
        """Return a copy, for another output that continues from here."""
        # Not `copy.copy`, which takes five times as long, and a request may have 64 outputs.
        other = ByteTokenDecoder.__new__(ByteTokenDecoder)
        other._pieces, other._unfinished, other._begun_in_prompt = self._pieces, self._unfinished, self._begun_in_prompt
        return other

    def append(self, token_ids: Sequence[int]) -> str:
        """Add tokens, and return the new text that no further token can change."""
        pieces = self._pieces
        if not self._unfinished:
            if len(token_ids) == 1:
                piece = pieces[token_ids[0]]
                if piece.__class__ is str:
                    return piece
            return self._take_in(pieces.join(token_ids))
        return self._finish(self._take_in(pieces.join(token_ids)))

    def flush(self) -> str:
        """Return the remaining text when no token follows."""
        text = self._unfinished.decode(errors="replace")
        self._unfinished = b""
        return self._finish(text)

    def _take_in(self, data: bytes) -> str:
        data = self._unfinished + data
        text, num_decoded = codecs.utf_8_decode(data, "replace", False)
        self._unfinished = data[num_decoded:]
        return text

    def _finish(self, text: str) -> str:
        """Leave out the first U+FFFD if it was already the end of the prompt's text."""
        if text and self._begun_in_prompt:
            self._begun_in_prompt = False
            return text.removeprefix("\ufffd")
        return text
