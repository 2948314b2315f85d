"""The data of the live page: the state of every block and request, as changes since the last look.

It must be collected between two steps. A look at 100,000 blocks is a few array operations; running requests cost a few
microseconds each, and of the waiting ones only `MOST_WAITING` are looked at.

    code    0 free   1 cached   2 pinned   3 active, with one holder   4 … 10: with 2 … 8 or more
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.engine.inspection import budget_fields, report_fields
from octavo.kvcache.block import NULL_BLOCK, BlockId, as_array
from octavo.kvcache.blocks import UNPUBLISHED
from octavo.kvcache.manager import KVCacheManager
from octavo.observe.stats import Gauges
from octavo.request import Request, RequestId, Sequence, SequenceStatus
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.speculation import SpeculationCounters

FREE, CACHED, PINNED, ACTIVE = 0, 1, 2, 3
MOST_HOLDERS = 8
MOST_WAITING = 200
WAITING, RUNNING, SWAPPED = 0, 1, 2

# If a larger share of the blocks has changed, sending all of them takes fewer bytes.
_MOST_CHANGES = 0.3
# The number of tokens in a block's details; more would disclose a prompt.
_SHOWN_TOKENS = 64

Codes = npt.NDArray[np.uint8]


def block_codes(kv: KVCacheManager) -> Codes:
    """Return a code for each block, the null block first. O(blocks), a few array operations."""
    blocks = kv.blocks
    codes = np.minimum(blocks.references_array, MOST_HOLDERS).astype(np.uint8)
    idle = codes == 0
    codes += ACTIVE - 1
    codes[idle] = np.where(blocks.groups_array[idle] != UNPUBLISHED, CACHED, FREE)
    codes[idle & (blocks.pins_array != 0)] = PINNED
    codes[NULL_BLOCK] = FREE
    return codes


class LiveView:
    """The state last sent to one page."""

    def __init__(self) -> None:
        self._codes: Codes | None = None
        self._owners: npt.NDArray[np.uint16] | None = None
        self._tenants: dict[str, int] = {}
        self._requests: dict[str, list[int]] = {}
        self._num_evicted = self._num_copied = 0

    def look(self, scheduler: Scheduler) -> dict[str, Any]:
        """Return the changes since the last look, ready for JSON; the first look returns everything.

        `blocks` is a flat list of (block, code, tenant's number) triples. If that would be longer, `all` holds two
        strings instead, with one character per block for its code and for its tenant. `evicted` lists the blocks whose
        contents were evicted, and `copied` the copies on a write, as [request, source, destination]; of both, the
        latest. `unlisted` is the number of waiting requests beyond `MOST_WAITING`.
        """
        shown: dict[str, Any] = {}
        kv, known = scheduler.kv, len(self._tenants)
        codes = block_codes(kv)
        owners = self._owners_of(scheduler, codes)
        if self._codes is None or self._owners is None:
            shown["spec"] = _spec(kv)
            changed = None
        else:
            changed = np.flatnonzero((codes != self._codes) | (owners != self._owners))
        if changed is None or len(changed) > _MOST_CHANGES * len(codes):
            shown["all"] = [(codes + 48).tobytes().decode(), "".join(map(chr, (owners + 48).tolist()))]
        elif len(changed):
            table = np.column_stack([changed, codes[changed], owners[changed]])
            shown["blocks"] = table.ravel().tolist()
        if self._codes is None or known < len(self._tenants) or changed is None:
            shown["tenants"] = list(self._tenants)
        if self._codes is not None:
            found = {"evicted": kv.evicted.since(self._num_evicted), "copied": kv.copied.since(self._num_copied)}
            shown |= {name: value for name, value in found.items() if value}
        self._num_evicted, self._num_copied = kv.evicted.count, kv.copied.count
        self._codes, self._owners = codes, owners
        return shown | self._requests_of(scheduler) | {"counters": _counters(scheduler)}

    def _owners_of(self, scheduler: Scheduler, codes: Codes) -> npt.NDArray[np.uint16]:
        """Return the number of the tenant last seen to hold each block."""
        kv = scheduler.kv
        if self._owners is None:
            owners = np.zeros(kv.pool.num_blocks, np.uint16)
            self._tenants.setdefault("", 0)
            for block_id in kv.blocks.published().tolist():
                owners[block_id] = self._number(kv.blocks.sources[block_id].tenant)
        else:
            owners = self._owners.copy()
        for seq in scheduler.running:
            number = self._number(seq.request.tenant)
            for table in kv.tables(seq):
                owners[as_array(table)] = number
        if self._codes is not None:
            # Requests that came and went since the last look have left cached blocks.
            changed = np.flatnonzero(codes != self._codes)
            for index in changed[(codes[changed] == CACHED) | (codes[changed] == PINNED)].tolist():
                owners[index] = self._number(kv.blocks.sources[index].tenant)
        owners[NULL_BLOCK] = 0
        return owners

    def _number(self, tenant: str) -> int:
        return self._tenants.setdefault(tenant, len(self._tenants))

    def _requests_of(self, scheduler: Scheduler) -> dict[str, Any]:
        """Return new requests, the progress of updated ones, the ids of removed ones, and how many are not listed."""
        added, updated, now = [], [], dict[str, list[int]]()
        running = {seq.request.request_id: seq.request for seq in scheduler.running}
        requests = scheduler.requests
        waiting = (request for request in requests if request.request_id not in running)
        for request in (*running.values(), *islice(waiting, MOST_WAITING)):
            progress = _progress(request, scheduler.kv, runs=request.request_id in running)
            now[request.request_id] = progress
            if (before := self._requests.get(request.request_id)) is None:
                added.append({"id": request.request_id, **_facts(request), "progress": progress})
            elif before != progress:
                fields: list[Any] = [request.request_id, *progress]
                if before[0] != RUNNING and progress[0] == RUNNING:
                    fields.append(_cache(request))
                updated.append(fields)
        removed = [request_id for request_id in self._requests if request_id not in now]
        self._requests = now
        shown = {"added": added, "updated": updated, "removed": removed, "unlisted": len(requests) - len(now)}
        return {name: value for name, value in shown.items() if value}


def describe_request(scheduler: Scheduler, request_id: str) -> dict[str, Any] | None:
    """Describe a request and the block tables of its sequences; None if it has ended.

    `reused` has the blocks that other requests computed, by request: once this one has ended, a block holds its tokens
    as long as `computed_by` returns the same request.
    """
    request = scheduler.live.get(RequestId(request_id))
    if request is None:
        return None
    reused: dict[str, list[int]] = {}
    for seq in request.sequences:
        for block in chain.from_iterable(scheduler.kv.tables(seq)) if _holds(seq) else ():
            owner = scheduler.kv.blocks.sources[block].request_id
            if owner and owner != request_id:
                reused.setdefault(owner, []).append(block)
    return {
        "id": request_id,
        "reused": reused,
        **_facts(request),
        "cache": _cache(request),
        "budget": budget_fields(request, scheduler.kv.holdings),
        "sequences": [
            {
                "seq_id": seq.seq_id,
                "status": seq.status.value,
                "tokens": seq.num_tokens,
                "computed": seq.num_computed,
                "preemptions": seq.num_preemptions,
                "tables": [list(table) for table in scheduler.kv.tables(seq)] if _holds(seq) else [],
            }
            for seq in request.sequences
        ],
    }


def computed_by(scheduler: Scheduler, block_ids: Iterable[int]) -> list[tuple[int, str | None]]:
    """Return blocks with the request that computed each; None for one that is not published, or does not exist."""
    kv = scheduler.kv
    return [
        (block_id, kv.blocks.sources[block_id].request_id or None if 0 < block_id < kv.pool.num_blocks else None)
        for block_id in block_ids
    ]


def describe_block(scheduler: Scheduler, block_id: int) -> dict[str, Any] | None:
    """Describe a block and its holders; None if there is no such block. `token_ids` is null if it is not published."""
    kv = scheduler.kv
    if not 0 < block_id < kv.pool.num_blocks:
        return None
    block = BlockId(block_id)
    holders = [
        {
            "id": seq.request.request_id,
            "seq_id": seq.seq_id,
            "tenant": seq.request.tenant,
            "index": list(table).index(block),
        }
        for seq in scheduler.running
        for table in kv.tables(seq)
        if block in table
    ]
    published = kv.blocks.is_published(block)
    token_ids = np.frombuffer(kv.blocks.token_bytes(block), np.int32).tolist() if published else None
    return {
        "block": block_id,
        "state": kv.blocks.state(block).value,
        "references": kv.blocks.references[block],
        "published": published,
        "computed_by": kv.blocks.sources[block].request_id or None,
        "holders": holders,
        "token_ids": token_ids and token_ids[:_SHOWN_TOKENS],
    }


def _holds(seq: Sequence) -> bool:
    return seq.status is SequenceStatus.RUNNING


def _facts(request: Request) -> dict[str, Any]:
    return {
        "tenant": request.tenant,
        "prompt": len(request.prompt_token_ids),
        "max": (request.params.max_tokens or 1) * len(request.sequences),
        "n": len(request.sequences),
        "cache": _cache(request),
    }


def _cache(request: Request) -> dict[str, Any] | None:
    return None if request.cache_report is None else report_fields(request.cache_report)


def _progress(request: Request, kv: KVCacheManager, *, runs: bool) -> list[int]:
    """Return [state, most computed tokens, output tokens, preemptions] of a request."""
    computed = output = preemptions = 0
    for seq in request.sequences:
        computed = max(computed, seq.num_computed)
        output += seq.num_output_tokens
        preemptions += seq.num_preemptions
    state = RUNNING if runs else WAITING
    if preemptions and not runs and any(kv.can_resume(seq) for seq in request.sequences):
        state = SWAPPED
    return [state, computed, output, preemptions]


def _spec(kv: KVCacheManager) -> dict[str, Any]:
    return {
        "num_blocks": kv.pool.num_blocks,
        "block_size": kv.spec.block_size,
        "block_bytes": kv.spec.block_bytes,
        "host_blocks": kv.hierarchy.host.num_slots,
    }


def _counters(scheduler: Scheduler) -> list[float]:
    """Return totals for the page.

    [running, waiting, swapped, blocks in host memory, evictions, preemptions, copies on a write,
    verified draft tokens, accepted draft tokens, seconds saved by drafts]
    """
    gauges, kv, host = Gauges.of(scheduler), scheduler.kv, scheduler.kv.hierarchy.host
    queues = [gauges.num_running, gauges.num_waiting, gauges.num_swapped]
    changes = [host.num_slots - host.pool.num_free, kv.evicted.count, gauges.num_preemptions, kv.copied.count]
    drafts = gauges.speculation or SpeculationCounters()
    return [
        *queues,
        *changes,
        drafts.num_draft_tokens,
        drafts.num_accepted_tokens,
        round(drafts.saved_seconds, 1),
    ]
