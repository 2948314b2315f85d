"""Lengths of the cached prefixes of waiting sequences, remembered between look-ups."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kvcache.manager import KVCacheManager
from octavo.request import Sequence, SequenceId


@dataclass(slots=True)
class _Found:
    version: int
    num_tokens: int


class CachedPrefixes:
    """Looks up and remembers lengths of cached prefixes, for ordering admissions.

    The first look-up takes time proportional to the length of the prefix. The result holds until the cache changes, and
    then two key look-ups show whether the prefix still ends at the same token.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._found: dict[SequenceId, _Found] = {}

    def __len__(self) -> int:
        """The number of sequences whose length is remembered."""
        return len(self._found)

    def num_tokens(self, seq: Sequence) -> int:
        """Return the number of cached tokens at the beginning of a waiting sequence."""
        version = self._kv.version
        found = self._found.get(seq.seq_id)
        if found is None:
            found = self._found[seq.seq_id] = _Found(version, self._kv.match_on_device(seq).num_tokens)
        elif found.version != version:
            if not self._kv.still_matches(seq, found.num_tokens):
                found.num_tokens = self._kv.match_on_device(seq).num_tokens
            found.version = version
        return found.num_tokens

    def forget(self, seq: Sequence) -> None:
        """Forget a sequence that no longer waits."""
        self._found.pop(seq.seq_id, None)
