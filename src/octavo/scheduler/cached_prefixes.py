"""How much of the beginning of waiting sequences is cached, remembered from one look-up to the next."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kvcache.manager import KVCacheManager
from octavo.request import Sequence, SequenceId


@dataclass(slots=True)
class _Found:
    version: int
    num_tokens: int


class CachedPrefixes:
    """The lengths of cached prefixes, for an order of admission.

    A length is looked up in full once, which costs as much as the prefix is long. It is known to hold as long as the
    cache has not changed, and after a change it takes two look-ups to see whether this prefix still ends where it did.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._found: dict[SequenceId, _Found] = {}

    def __len__(self) -> int:
        """Sequences of which a length is remembered."""
        return len(self._found)

    def num_tokens(self, seq: Sequence) -> int:
        """How many tokens at the beginning of a waiting sequence are cached."""
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
        """A sequence waits no more."""
        self._found.pop(seq.seq_id, None)
