"""Who takes part in a step that is planned while the one before it is being computed.

    device    │ step t ……………………… │ step t+1 ………………… │ step t+2 …
    host      │ plan t+1 │ wait for t │ take in t, plan t+2 │ wait for t+1 │ …

Only a step of decodes alone can be followed so: its sequences go on, each with the token that it draws in it. Which
token that is stays on the device. Whether it ends its sequence is not known: who turns out to have ended, by a stop
token or a stop string, or because its client has left, has computed one token for nobody, which is thrown away. Whoever
reaches its longest length is known, and left out.

Everything else waits for the step: admissions, chunks of prompts, preemption, transfers to and from the host, and draws
that depend on which tokens came before. So no plan ahead takes a block from anybody. The blocks of a sequence that ends
meanwhile may be given to others at once: what is written there for nobody is written before the next plan begins.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from octavo.kvcache.manager import KVCacheManager
from octavo.request import Sequence
from octavo.scheduler.admission import Admission
from octavo.scheduler.running import RunningSet
from octavo.scheduler.tenant_shares import TenantShares


class LookAhead:
    """Finds the sequences of the next step before the result of the present one is there.

    Args:
        max_model_len: longest sequence in tokens.
        takes_places: whether somebody who waits may take the place of somebody who runs.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        running: RunningSet,
        tenants: TenantShares,
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
        """The sequences of the next step, each with a block for its token; none where this step must be awaited.

        Args:
            computing: of the step in flight, in which each computes one token and draws one.
            is_awaited: whether somebody waits for a place.
        """
        running = self._running
        if running.num_following or self._moves_blocks():
            return []
        if is_awaited and (self._takes_places or self._admission.may_admit):
            return []
        places = running.places
        going = [(seq, place) for seq in computing if (place := places.get(seq.seq_id)) is not None]
        if len(going) != len(running):
            return []
        streams = []
        for seq, place in going:
            computed = seq.num_computed + 1
            if computed >= place.attend_at and self._ends(seq):
                if is_awaited:
                    return []  # its place is free in the very next step
            elif computed < place.capacity or self._extend(seq):
                streams.append(seq)
            else:
                return []
        # To give somebody a block another may have been evicted, which is to be kept on the host.
        if self._moves_blocks():
            return []
        if streams:
            self._admission.begin_step()
        return streams

    def _moves_blocks(self) -> bool:
        """Whether the next step has blocks to bring to the host, or from there."""
        return self._kv.hierarchy.host.has_transfers

    def _ends(self, seq: Sequence) -> bool:
        """Whether the token that is drawn now is a sequence's last, whatever it is."""
        longest = min(seq.num_prompt_tokens + (seq.request.params.max_tokens or 1), self._max_model_len)
        return seq.num_tokens + 1 >= longest

    def _extend(self, seq: Sequence) -> bool:
        """Room for the token after the one that is computed now."""
        copies = self._kv.extend(seq, 2, self._tenants.room)
        if copies is None:
            return False
        assert not copies, "what is written now is nobody else's any more"
        self._running.grew(seq)
        return True
