"""Everything at once, for a second: who stays gets what the same request gets alone. For longer:
tests/campaigns/fuzz_bodies.py, with `--faults`."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from octavo.engine.core import EngineCore
from tests.engine.faults import InjectedError
from tests.engine.preempting import thrash
from tests.engine.tiny_engine import slow_down
from tests.server.real_engine import RealServer, real_server

pytestmark = pytest.mark.integration

NUM_CLIENTS = 60
CRAMPED: dict[str, Any] = {"num_blocks": 24, "max_num_seqs": 16, "max_num_batched_tokens": 64, "deterministic": True}
ENGINES: dict[str, dict[str, Any]] = {
    "swapping": {"preemption_mode": "swap", "swap_space": "256KiB"},
    "recomputing": {"preemption_mode": "recompute", "prefix_cache": "radix"},
}


def bodies(rng: random.Random) -> list[dict[str, Any]]:
    """Questions that begin alike, greedy and sampled."""
    shared = [rng.randrange(3, 300) for _ in range(30)]
    found = []
    for i in range(20):
        own = [rng.randrange(3, 300) for _ in range(rng.randint(1, 30))]
        body = {"prompt": shared[: 10 * (i % 4)] + own, "max_tokens": rng.randint(4, 40), "ignore_eos": True}
        how = {"temperature": 0.9, "seed": i, "n": 1 + i % 3} if i % 2 else {"temperature": 0}
        found.append({**body, **how, "return_token_ids": True})
    return found


@contextmanager
def faults(core: EngineCore, rng: random.Random) -> Iterator[list[str]]:
    """Steps raise now and then, before and after their work; yields where they did."""
    struck: list[str] = []
    owners = {"schedule": core.scheduler, "execute": core.runner, "update": core.scheduler}
    originals = {name: getattr(owner, name) for name, owner in owners.items()}

    def strike(place: str) -> None:
        if rng.random() < 0.003:
            struck.append(place)
            raise InjectedError(place)

    def faulty(name: str) -> Any:
        def replaced(*args: Any) -> Any:
            strike(f"before {name}")
            result = originals[name](*args)
            # Half-way through an update tokens are lost, and whose they are ends: that is no survivor.
            if name != "update":
                strike(f"after {name}")
            return result

        return replaced

    for name, owner in owners.items():
        setattr(owner, name, faulty(name))
    try:
        yield struck
    finally:
        for name, owner in owners.items():
            setattr(owner, name, originals[name])


class Reply:
    """What came of a stream: the tokens of each choice, and how it ended."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ended = self.failed = False

    def add(self, line: bytes) -> None:
        self.ended |= line == b"data: [DONE]\n"
        if not line.startswith(b"data: {"):
            return
        event = json.loads(line[6:])
        if "error" in event:
            assert event["error"]["code"] == "step_failed"
            self.failed = True
        for choice in event.get("choices", ()):
            self.tokens.setdefault(choice["index"], []).extend(choice["token_ids"])


async def ask(server: RealServer, body: dict[str, Any], leaves_after: int, pause: float) -> Reply:
    """Ask for a stream, and leave after so many events (-1: stay)."""
    raw = json.dumps({**body, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n")
    writer.write(b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
    reply, events = Reply(), 0
    try:
        while events != leaves_after and (line := await reader.readline()):
            reply.add(line)
            if line.startswith(b"data: {"):
                events += 1
                await asyncio.sleep(pause)
    finally:
        writer.transport.abort()
    return reply


@contextmanager
def cyclic_garbage() -> Iterator[list[Any]]:
    """What only the garbage collector would have freed of what was made meanwhile; it is there at the end."""
    found: list[Any] = []
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("leaves_after", [-1, 2])
def test_requests_leave_no_garbage_that_a_busy_server_would_keep(leaves_after: int) -> None:
    """All garbage is collected only when a server is idle: under a load that never ends it was 23 KiB a request."""
    asked = bodies(random.Random(1))
    with real_server(**CRAMPED) as server:

        async def run() -> None:
            await asyncio.gather(*(ask(server, body, leaves_after, 0) for body in asked))

        asyncio.run(run())
        with cyclic_garbage() as found:
            asyncio.run(run())
            server.assert_nothing_runs()
        kept = Counter(type(one).__name__ for one in found)
    # Who was planned last is known until the next step.
    ours = ("Request", "Sequence", "CompletionAnswer", "Job", "RequestOutput", "CompletionBody")
    assert {name: kept[name] for name in ours if kept[name] > 2} == {}
    assert kept["_SelectorSocketTransport"] <= len(asked), "the clients' own"


@pytest.mark.parametrize("engine", ENGINES)
def test_who_stays_gets_what_the_same_request_gets_alone(engine: str) -> None:
    rng = random.Random(1)
    asked = bodies(rng)
    with real_server(**CRAMPED, **ENGINES[engine]) as server:
        alone = []
        for body in asked:
            response = server.post("/v1/completions", body)
            assert response.status_code == 200, response.text
            alone.append({choice["index"]: choice["token_ids"] for choice in response.json()["choices"]})
        thrash(server.core)
        server.core.scheduler._composer._admission._reserve = lambda *_: 0
        # So that they are there together.
        slow_down(server.core, 0.002)
        leavers = set(rng.sample(range(NUM_CLIENTS), NUM_CLIENTS // 3))

        async def run() -> list[Reply]:
            clients = (
                ask(
                    server,
                    asked[i % len(asked)],
                    rng.randint(0, 10) if i in leavers else -1,
                    0.01 if i % 7 == 0 else 0,
                )
                for i in range(NUM_CLIENTS)
            )
            return await asyncio.gather(*clients)

        with faults(server.core, rng) as struck:
            answers = asyncio.run(run())
            server.assert_nothing_runs()
        for i, reply in enumerate(answers):
            whole = alone[i % len(asked)]
            # Of who left, or met the same fault alone twice, what had come.
            assert all(ids == whole[index][: len(ids)] for index, ids in reply.tokens.items())
            assert i in leavers or reply.ended
            assert i in leavers or reply.failed or reply.tokens == whole
        assert sum(reply.failed for reply in answers) < NUM_CLIENTS / 4
        assert struck
        assert server.core.stats.gauges().num_preemptions > 0
        if engine == "swapping":
            assert server.core.scheduler.kv.hierarchy.swapped.sequences_in > 0
