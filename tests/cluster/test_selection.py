"""Who gets a request: Dynamo's index over events of real caches, and what happens where it cannot choose."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from octavo.cluster.config import RouterConfig
from octavo.cluster.connections import Connections
from octavo.cluster.selection import PrefixSelection, RoundRobin, Selection, Ticket
from octavo.cluster.workers import RoutedPrompt, Worker
from octavo.engine.kv_events import KVEventPublisher
from octavo.kvcache.manager import KVCacheManager
from octavo.request import cache_scope
from octavo.simulator.fleet import LongestPrefix, Replica
from octavo.simulator.traffic import Shape, SimulatedRequest
from tests.engine.test_kv_events import SIZE, published, work
from tests.kvcache.caches import admit_and_compute, make_manager, make_sequence
from tests.simulator.test_simulation import plan

pytest.importorskip("dynamo.llm")

CONFIG = RouterConfig(worker=["http://a:1"], selection_timeout=30)
PROMPT = list(range(1000, 1033))


class Server:
    """A cache that publishes its events, and what a router knows of it."""

    def __init__(self, url: str, manager: KVCacheManager, publisher: KVEventPublisher, config: Any) -> None:
        self.manager = manager
        self.publisher = publisher
        events = {"endpoint": config.endpoint, "replay_endpoint": config.replay_endpoint}
        facts = {"names": ["m"], "fingerprint": "f", "block_size": SIZE, "num_blocks": 100}
        self.worker = Worker(url, Connections(url), {**facts, "max_num_batched_tokens": 512, "kv_events": events}, True)

    def compute(self, tokens: list[int], tenant: str = "") -> None:
        seq = make_sequence(tokens, tenant=tenant)
        admit_and_compute(self.manager, seq)
        self.manager.forget(seq)
        self.publisher.publish()


@contextmanager
def servers(count: int = 2, **options: Any) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        found = []
        for number in range(count):
            manager = make_manager(num_blocks=64, logs_events=True)
            publisher, config = stack.enter_context(published(manager, **options))
            found.append(Server(f"http://127.0.0.1:{number + 1}", manager, publisher, config))
        yield found


async def indexed(each: list[Server]) -> PrefixSelection:
    """A selection that hears all servers' events."""
    selection = PrefixSelection(CONFIG)
    for server in each:
        await selection.add(server.worker)
    for number, server in enumerate(each):
        own = [5000 * (number + 1) + place for place in range(SIZE * 2 + 1)]
        server.compute(own)
        await until(partial(overlap, selection, server.worker, own), SIZE * 2)
    return selection


async def until(ask: Callable[[], Awaitable[int]], expected: int) -> None:
    async with asyncio.timeout(30):
        while await ask() != expected:
            await asyncio.sleep(0.01)


async def overlap(selection: PrefixSelection, worker: Worker, tokens: list[int], scope: str = "") -> int:
    """How many tokens the index believes that a server has."""
    asked = {"model_name": worker.group, "token_ids": tokens, "cache_salt": scope or None}
    scores = await selection._service.overlap_scores(asked)
    blocks = {score["worker_id"]: score["device_blocks"] for score in scores["workers"]}
    return int(blocks.get(worker.worker_id, 0)) * SIZE


@pytest.mark.parametrize("form", ["array", "map"])
def test_a_prompt_goes_where_its_blocks_are_and_two_tenants_with_equal_prompts_have_no_overlap(form: str) -> None:
    async def run(each: list[Server]) -> None:
        selection, (first, second) = await indexed(each), each
        ada, bob = (cache_scope(tenant, None, "") for tenant in ("ada", "bob"))
        second.compute(PROMPT, tenant="ada")
        await until(lambda: overlap(selection, second.worker, PROMPT, ada), SIZE * 8)
        for scope in (bob, "", cache_scope("ada", None, "salt")):
            assert await overlap(selection, second.worker, PROMPT, scope) == 0
            assert await overlap(selection, first.worker, PROMPT, scope) == 0
        workers = [first.worker, second.worker]
        for _ in range(3):
            ticket = await selection.choose(workers, RoutedPrompt(PROMPT, ada))
            assert (ticket.worker, ticket.cached_tokens) == (second.worker, SIZE * 8)
            selection.done(ticket)
            await selection.settled()
        others = [await selection.choose(workers, RoutedPrompt(PROMPT, bob)) for _ in range(2)]
        assert {ticket.worker for ticket in others} == set(workers), "it has no blocks anywhere: load decides"
        assert selection.num_reserved() == 2
        for ticket in others:
            selection.first_token(ticket)
            selection.done(ticket)
        await selection.settled()
        assert selection.num_reserved() == 0
        assert [worker.in_flight for worker in workers] == [0, 0]
        assert not selection.fallbacks
        await selection.close()

    with servers(format=form) as each:
        asyncio.run(run(each))


@pytest.mark.soak
def test_a_choice_takes_no_longer_or_shorter_for_another_tenants_prompt_than_for_one_that_nobody_sent() -> None:
    async def run(each: list[Server]) -> None:
        selection, (_, second) = await indexed(each), each
        ada, bob = (cache_scope(tenant, None, "") for tenant in ("ada", "bob"))
        rng, workers = random.Random(1), [server.worker for server in each]
        secret, unsent = list[float](), list[float]()
        for _ in range(500):
            sent, other = ([rng.randrange(1 << 20) for _ in range(SIZE * 24 + 1)] for _ in range(2))
            second.compute(sent, tenant="ada")
            await until(partial(overlap, selection, second.worker, sent, ada), SIZE * 24)
            for prompt, times in rng.sample([(sent, secret), (other, unsent)], 2):
                began = time.perf_counter()
                ticket = await selection.choose(workers, RoutedPrompt(prompt, bob))
                times.append(time.perf_counter() - began)
                assert ticket.cached_tokens == 0
                selection.done(ticket)
        # The share of pairs in which the secret took less: half of them, if an observer learns nothing.
        auc = sum(each < late for each in secret for late in unsent) / len(secret) / len(unsent)
        print(f"AUC {auc:.3f} of {len(secret)} pairs")
        assert abs(auc - 0.5) < 0.08  # four standard deviations
        await selection.close()

    with servers() as each:
        asyncio.run(run(each))


def test_the_index_follows_evictions_and_forgets_a_server_that_goes() -> None:
    async def run(each: list[Server]) -> None:
        selection, (first, second) = await indexed(each), each
        first.compute(PROMPT)
        await until(lambda: overlap(selection, first.worker, PROMPT), SIZE * 8)
        work(first.manager, first.publisher, start=50, count=40)  # evicts it
        await until(lambda: overlap(selection, first.worker, PROMPT), 0)
        second.compute(PROMPT)
        await until(lambda: overlap(selection, second.worker, PROMPT), SIZE * 8)
        await selection.remove(second.worker)
        ticket = await selection.choose([first.worker], RoutedPrompt(PROMPT, ""))
        assert ticket.worker is first.worker
        await selection.add(second.worker)  # it asks for what it missed
        second.compute(list(range(7000, 7010)))
        await until(lambda: overlap(selection, second.worker, PROMPT), SIZE * 8)
        await selection.close()

    with servers() as each:
        asyncio.run(run(each))


def test_a_server_with_less_of_a_prompt_gets_the_address_of_the_one_that_has_most() -> None:
    async def run(each: list[Server]) -> None:
        for number, server in enumerate(each):
            server.worker.facts = {**server.worker.facts, "kv_neighbours": f"0.0.0.0:{9400 + number}"}
        selection, (first, second) = await indexed(each), each
        first.compute(PROMPT[: SIZE * 2])
        second.compute(PROMPT, tenant="")
        await until(lambda: overlap(selection, first.worker, PROMPT), SIZE * 2)
        await until(lambda: overlap(selection, second.worker, PROMPT), SIZE * 8)
        asked = {"model_name": first.worker.group, "token_ids": PROMPT, "cache_salt": None}
        assert await selection._hint(asked, first.worker.worker_id) == "127.0.0.1:9401"
        assert await selection._hint(asked, second.worker.worker_id) is None
        assert await selection._hint({**asked, "cache_salt": "bob"}, first.worker.worker_id) is None
        assert (await selection.choose([first.worker, second.worker], RoutedPrompt(PROMPT, ""))).kv_hint is None
        second.worker.is_healthy = False
        assert await selection._hint(asked, first.worker.worker_id) is None
        second.worker.is_healthy, second.worker.facts = True, {**second.worker.facts, "kv_neighbours": None}
        assert await selection._hint(asked, first.worker.worker_id) is None
        # While it computes many prompts, the other one is chosen, and learns where the blocks are.
        second.worker.facts = {**second.worker.facts, "kv_neighbours": "10.0.0.7:9400"}
        tickets = [await selection.choose([first.worker, second.worker], RoutedPrompt(PROMPT, "")) for _ in range(40)]
        hints = {(ticket.worker.url, ticket.kv_hint) for ticket in tickets}
        assert hints <= {(first.worker.url, "10.0.0.7:9400"), (second.worker.url, None)}
        for ticket in tickets:
            selection.done(ticket)
        await selection.close()

    with servers() as each:
        asyncio.run(run(each))


def test_what_the_index_cannot_answer_goes_to_the_least_loaded_and_leaks_no_reservation() -> None:
    async def run(each: list[Server]) -> None:
        selection, workers = await indexed(each), [server.worker for server in each]
        workers[0].in_flight = 1
        for prompt, reason in ((RoutedPrompt((), ""), "no_tokens"), (RoutedPrompt([2**40], ""), "index_error")):
            ticket = await selection.choose(workers, prompt)
            assert (ticket.worker, selection.fallbacks[reason]) == (workers[1], 1)
            selection.done(ticket)
        each[0].compute(PROMPT)
        await until(lambda: overlap(selection, workers[0], PROMPT), SIZE * 8)
        # A server that failed is not among those to choose from, though its blocks are still in the index.
        ticket = await selection.choose(workers[1:], RoutedPrompt(PROMPT, ""))
        assert (ticket.worker, ticket.cached_tokens) == (workers[1], 0)
        selection.done(ticket)
        selection._seconds = 0.0
        ticket = await selection.choose(workers, RoutedPrompt(PROMPT, ""))
        assert selection.fallbacks["timeout"] == 1
        selection.done(ticket)
        asking = asyncio.ensure_future(selection.choose(workers, RoutedPrompt(PROMPT, "")))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])

        async def reserved() -> int:
            return selection.num_reserved()

        await until(reserved, 0)
        for worker in workers:
            await selection.remove(worker)
        await selection.choose(workers, RoutedPrompt(PROMPT, ""))
        assert selection.fallbacks["no_events"] == 1
        await selection.close()

    with servers() as each:
        asyncio.run(run(each))


def test_others_choose_by_load_or_in_turn() -> None:
    workers = [
        Worker(url, Connections(url)) for url in ("http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3")
    ]

    async def chosen(selection: Selection, count: int) -> list[Ticket]:
        return [await selection.choose(workers, RoutedPrompt(PROMPT, "")) for _ in range(count)]

    least = Selection()
    first = asyncio.run(chosen(least, 4))
    assert [worker.in_flight for worker in workers] == [2, 1, 1]
    least.done(first[1])
    assert asyncio.run(chosen(least, 1))[0].worker is workers[1]
    in_turn = asyncio.run(chosen(RoundRobin(), 6))
    assert [ticket.worker for ticket in in_turn] == workers * 2


def test_the_simulated_router_weighs_blocks_against_load_as_the_index_does() -> None:
    # Blocks of another request at the server that has 8 of the prompt. With 8 both servers cost the same, and the index
    # takes either.
    loads = (6, 7, 9, 10)

    async def stays(each: list[Server]) -> list[bool]:
        selection, (first, second) = await indexed(each), each
        second.compute(PROMPT)
        await until(partial(overlap, selection, second.worker, PROMPT), SIZE * 8)
        found = []
        for blocks in loads:
            other = await selection.choose([second.worker], RoutedPrompt(range(9000, 9000 + blocks * SIZE), ""))
            selection.first_token(other)
            await selection.settled()
            ticket = await selection.choose([first.worker, second.worker], RoutedPrompt(PROMPT, ""))
            found.append(ticket.worker is second.worker)
            selection.done(ticket)
            selection.done(other)
            await selection.settled()
        await selection.close()
        return found

    with servers() as each:
        real = asyncio.run(stays(each))
    holder, idle = (Replica(place, plan().server(), lambda *_: None) for place in range(2))
    size, router = holder.server.kv.spec.block_size, LongestPrefix()
    prompt, other = (SimulatedRequest(0.0, Shape(((token, 8 * size + 1),), 8 * size + 1, 1)) for token in (1, 2))
    admit_and_compute(holder.server.kv, seq := make_sequence(prompt.prompt_token_ids()))
    holder.server.kv.forget(seq)
    router.choose(prompt, [holder])
    found = []
    for blocks in loads:
        request = replace(other, shape=Shape(((2, blocks * size),), blocks * size, 1))
        holder.send(request, 0, 0, 0.0)
        holder.seen(request, has_ended=False)
        found.append(router.choose(prompt, [holder, idle]).replica is holder)
        holder.seen(request, has_ended=True)
    assert found == real == [True, True, False, False]


def test_of_servers_that_cost_the_same_the_simulated_router_takes_either_as_the_index_does() -> None:
    prompts = [range(20_000 + 100 * number, 20_000 + 100 * number + 5 * SIZE) for number in range(40)]

    async def places(each: list[Server]) -> set[int]:
        selection, workers = await indexed(each), [server.worker for server in each]
        found = set()
        for prompt in prompts:
            ticket = await selection.choose(workers, RoutedPrompt(prompt, ""))
            found.add(workers.index(ticket.worker))
            selection.done(ticket)
            await selection.settled()
        await selection.close()
        return found

    with servers() as each:
        real = asyncio.run(places(each))
    replicas, router = [Replica(place, plan().server(), lambda *_: None) for place in range(2)], LongestPrefix()
    requests = [SimulatedRequest(0.0, Shape(((number, 40),), 40, 1)) for number in range(len(prompts))]
    assert {router.choose(request, replicas).replica.place for request in requests} == real == {0, 1}
