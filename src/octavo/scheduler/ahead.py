"""Plans a step while the previous one is being computed.

    device    │ step t ……………………… │ step t+1 ………………… │ step t+2 …
    host      │ plan t+1 │ wait for t │ take in t, plan t+2 │ wait for t+1 │ …

Only a step that consists of decodes can be followed this way: each of its sequences continues with the token that it
draws in that step. The token itself stays on the device. Whether it ends its sequence is not known yet: a sequence that
turns out to have ended, by a stop token or a stop string or because its client has left, has computed one extra token,
which is discarded. A sequence that reaches its maximum length is known in advance and left out.

Everything else waits for the result: admissions, chunks of prompts, preemption, transfers to and from the host, and
draws that depend on earlier tokens. So a plan made ahead never takes a block from another sequence. The blocks of a
sequence that ends in the meantime may be reused at once: its extra token is written before the next plan begins.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from octavo.kvcache.manager import KVCacheManager
from octavo.request import Sequence
from octavo.scheduler.admission import Admission
from octavo.scheduler.kv_limits import TenantLimits
from octavo.scheduler.running import RunningSet


class LookAhead:
    """Finds the sequences of the next step before the result of the current one is known.

    Args:
        max_model_len: maximum sequence length in tokens.
        takes_places: whether a waiting sequence may take the place of a running one.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        running: RunningSet,
        tenants: TenantLimits,
        admission: Admission,
        *,
        max_model_len: int,
        takes_places: bool,
    ) -> None:
        self._kv = kv
        self._running = running
        self._tenants = tenants
        self._admission = admission
        self._max_model_len = max_model_len
        self._takes_places = takes_places

    def streams(self, computing: Seq[Sequence], *, is_awaited: bool) -> list[Sequence]:
        """Return the sequences of the next step, each with a block for its token; none if this step must be awaited.

        Args:
            computing: sequences of the step in flight, each of which computes and draws one token.
            is_awaited: whether a sequence waits for a place.
        """
        running = self._running
        if running.num_following or self._moves_blocks():
            return []
        if is_awaited and (self._takes_places or self._admission.may_admit):
            return []
        going = [(seq, place) for seq in computing if (place := seq.state.place) is not None]
        if len(going) != len(running):
            return []
        streams = []
        for seq, place in going:
            computed = seq.num_computed + 1
            if computed >= place.slow_path_at and self._ends(seq):
                if is_awaited:
                    return []  # the next step can give its place away
            elif computed < place.capacity or self._extend(seq):
                streams.append(seq)
            else:
                return []
        # Allocating a block may have evicted another, which must be stored on the host.
        if self._moves_blocks():
            return []
        if streams:
            self._admission.begin_step()
        return streams

    def _moves_blocks(self) -> bool:
        """Whether the next step must move blocks to or from the host."""
        return self._kv.hierarchy.host.has_transfers

    def _ends(self, seq: Sequence) -> bool:
        """Whether the token being drawn is the sequence's last, whichever it is."""
        return seq.num_tokens + 1 >= seq.max_num_tokens(self._max_model_len)

    def _extend(self, seq: Sequence) -> bool:
        """Make room for the token after the one being computed."""
        copies = self._kv.extend(seq, 2, self._tenants.room)
        if copies is None:
            return False
        assert not copies, "what is written now is nobody else's any more"
        self._running.grew(seq)
        return True
