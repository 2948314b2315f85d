"""The ledger, the pool, host memory and the statistics tell the same numbers, whatever becomes of the requests."""

from __future__ import annotations

import random
from typing import Any

import pytest

from octavo.engine.core import EngineCore
from octavo.request import FinishReason, Request, RequestContext, SequenceStatus
from octavo.sampling_params import SamplingParams
from octavo.scheduler.kv_limits import KVLimits
from tests.engine.test_same_tokens import thrash  # type: ignore[attr-defined]
from tests.engine.tiny_engine import POISON, assert_drained, poison, tiny_core

TENANTS = ("", "ada", "bob")


def check(core: EngineCore, requests: list[Request]) -> dict[str, Any]:
    """Every sum that is promised, and that `/metrics` says the same; returns the report."""
    report, stats, kv = core.kv_report(), core.stats, core.scheduler.kv
    kv.audit()
    sizes, tenants, swap = report["bytes"], report["tenants"].values(), report["swap"]
    assert sum(sizes.values()) - sizes["swapped"] == report["num_blocks"] * report["block_bytes"]
    assert sizes["swapped"] + swap["free_bytes"] == swap["space_bytes"]
    assert swap["out_bytes"] == swap["in_bytes"] + swap["dropped_bytes"] + sizes["swapped"]
    for state in ("active", "cached", "pinned", "swapped"):
        assert sum(tenant["bytes"][state] for tenant in tenants) == sizes[state]
    assert sum(entry["blocks"]["swapped"] for entry in report["requests"]) * report["block_bytes"] == sizes["swapped"]
    gauges = stats.gauges()
    assert {state.value: size for state, size in gauges.kv_bytes.items()} | {"swapped": gauges.swapped_bytes} == sizes
    assert (gauges.swapped_out_bytes, gauges.swapped_in_bytes) == (swap["out_bytes"], swap["in_bytes"])
    booked, totals = [r for r in requests if r.cache_report is not None], report["prefix_cache"]
    assert totals["queried_tokens"] == stats.prefix_cache_queries == sum(len(r.prompt_token_ids) for r in booked)
    assert totals["cached_tokens"] == stats.prefix_cache_hits == sum(r.num_cached_tokens or 0 for r in booked)
    assert totals["queried_tokens"] == totals["cached_tokens"] + sum(totals["uncached_tokens"].values())
    assert sum(totals["uncached_tokens"].values()) == sum(stats.uncached_tokens.values())
    for name, tenant in report["tenants"].items():
        own = [r for r in booked if r.tenant == name]
        assert tenant["prefix_cache"]["queried_tokens"] == sum(len(r.prompt_token_ids) for r in own)
    ended = [r for r in requests if r.finished]
    assert sum(stats.finished.values()) == len(ended)
    assert stats.request_prompt_tokens.total == sum(len(r.prompt_token_ids) for r in ended)
    return report


def where(core: EngineCore, request: Request) -> str:
    """Where an unfinished request is: its only sequence runs, waits, or waits with blocks in host memory."""
    (seq,) = request.sequences
    if seq.status is SequenceStatus.RUNNING:
        return "running"
    # A swapped one may have all its blocks still on the device, in the prefix cache.
    return "swapped" if core.scheduler.kv.hierarchy.host_blocks(seq.seq_id) else "waiting"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "cache"),
    [
        ("swap", {"enable_prefix_caching": False}),
        ("swap", {"prefix_cache": "hashed"}),
        ("swap", {"prefix_cache": "radix"}),
        ("recompute", {"prefix_cache": "hashed"}),
    ],
)
def test_all_sums_are_exact_after_every_step_under_preemption_cancellation_retries_and_unusable_logits(
    mode: str, cache: dict[str, Any]
) -> None:
    chance = random.Random(7)
    requests: list[Request] = []
    cancelled = dict.fromkeys(("running", "waiting", "swapped"), 0)
    most_swapped = 0
    options = {"num_blocks": 41, "max_num_seqs": 6, "max_num_batched_tokens": 64, "swap_space": "128KiB"}
    with tiny_core(block_size=4, preemption_mode=mode, **options, **cache) as core:
        poison(core)
        thrash(core)

        def ask(tokens: list[int], tenant: str, request_id: str | None = None) -> None:
            params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
            requests.append(core.inputs.make(tokens, params, RequestContext(tenant=tenant, request_id=request_id)))
            core.add(requests[-1])

        for round_ in range(240):
            if round_ % 4 == 0 and len(core.scheduler.requests) < 10:
                prompt = [chance.randrange(POISON) for _ in range(chance.randrange(2, 40))]
                ask(prompt + [POISON] * (round_ % 12 == 0), chance.choice(TENANTS))
            if round_ % 7 == 0 and (live := [r for r in requests if not r.finished]):
                # The kind that was cancelled least so far.
                victim = min(live, key=lambda r: (cancelled[where(core, r)], chance.random()))
                cancelled[where(core, victim)] += 1
                core.abort(victim.request_id)
                assert victim.sequences[0].finish_reason is FinishReason.ABORT
                check(core, requests)
                if chance.random() < 0.5:
                    ask(list(victim.prompt_token_ids), victim.tenant, victim.request_id)
            core.step()
            most_swapped = max(most_swapped, check(core, requests)["bytes"]["swapped"])
        while core.has_work:
            core.step()
        assert_drained(core)
        report = check(core, requests)
    assert report["bytes"]["active"] == report["bytes"]["swapped"] == 0
    assert core.stats.gauges().num_preemptions > 10
    assert core.stats.finished[FinishReason.ERROR] > 3
    assert min(cancelled["running"], cancelled["waiting"]) > 5
    if mode == "swap":
        assert cancelled["swapped"] > 5
        assert most_swapped > report["block_bytes"]
    else:
        assert cancelled["swapped"] == most_swapped == 0


def test_a_step_whose_logits_are_unusable_leaves_no_host_block_behind_and_its_preemption_counted() -> None:
    """The last request of all fails in the very step that brings it back from host memory."""
    options = {"num_blocks": 11, "preemption_mode": "swap", "swap_space": "64KiB", "enable_prefix_caching": False}
    with tiny_core(block_size=4, **options) as core:
        thrash(core)
        params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
        requests = [core.inputs.make(list(range(10 * i, 10 * i + 14)), params) for i in range(2)]
        for request in requests:
            core.add(request)
        while not core.scheduler.num_swapped:
            core.step()
        (away,) = [r for r in requests if where(core, r) == "swapped"]
        assert check(core, requests)["bytes"]["swapped"] > 0
        core.abort(next(r for r in requests if r is not away).request_id)
        core.runner.model._embedding[away.sequences[0].token_ids[-1]] = float("nan")  # type: ignore[attr-defined]
        core.step()
        assert away.sequences[0].finish_reason is FinishReason.ERROR
        assert core.stats.gauges().swapped_in_bytes == core.stats.gauges().swapped_out_bytes > 0
        assert check(core, requests)["swap"]["free_bytes"] == check(core, requests)["swap"]["space_bytes"]
        assert_drained(core)


def test_floors_and_caps_are_told_in_bytes_of_tenants_that_have_asked_for_nothing_too() -> None:
    with tiny_core(block_size=4) as core:
        size = core.scheduler.kv.spec.block_bytes
        core.set_kv_limits({"ada": KVLimits(3, 5), "bob": KVLimits(2)})
        told = {name: tenant["limits"] for name, tenant in check(core, [])["tenants"].items()}
        expected = {
            "ada": {"floor_bytes": 3 * size, "cap_bytes": 5 * size},
            "bob": {"floor_bytes": 2 * size, "cap_bytes": None},
        }
        assert told == core.stats.kv_limits == expected
