"""Lengths of the cached prefixes of waiting sequences, remembered between look-ups."""

from __future__ import annotations

from octavo.kvcache.manager import KVCacheManager
from octavo.request import Sequence
from octavo.sequence_state import CachedPrefix


class CachedPrefixes:
    """Looks up and remembers lengths of cached prefixes, for ordering admissions.

    The first look-up takes time proportional to the length of the prefix. The result holds until the cache changes, and
    then two key look-ups show whether the prefix still ends at the same token.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv

    def num_tokens(self, seq: Sequence) -> int:
        """Return the number of cached tokens at the beginning of a waiting sequence."""
        version = self._kv.version
        found = seq.state.cached_prefix
        if found is None:
            found = seq.state.cached_prefix = CachedPrefix(version, self._kv.match_on_device(seq).num_tokens)
        elif found.version != version:
            if not self._kv.still_matches(seq, found.num_tokens):
                found.num_tokens = self._kv.match_on_device(seq).num_tokens
            found.version = version
        return found.num_tokens
