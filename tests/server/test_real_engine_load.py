"""Many clients at once, of which some leave: the others get all of theirs, and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from octavo.request import FinishReason
from tests.engine.preempting import thrash
from tests.engine.tiny_engine import is_drained, slow_down, step_for_news
from tests.server.conftest import wait_until
from tests.server.http.test_disconnect import leave, send
from tests.server.real_engine import RealServer, real_server

pytestmark = pytest.mark.integration

NUM_CLIENTS = 64
STEP = 0.03


class Client:
    """A streaming request over a plain socket; `tokens` counts what has arrived."""

    def __init__(self, server: RealServer, prompt: list[int], max_tokens: int) -> None:
        self._port = server.port
        self._body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        self.wanted = max_tokens
        self.tokens = 0
        self.finished = False

    async def run(self, leave_after: int | None = None, linger: bool = False) -> None:
        """Ask and read to the end, or close the connection once `leave_after` tokens have come."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        body = json.dumps({**self._body, "return_token_ids": True}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n")
        writer.write(b"Content-Type: application/json\r\n")
        writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        if leave_after == 0:
            await asyncio.sleep(random.Random(self.wanted).random() * 0.05)
        while self.tokens != leave_after and (line := await reader.readline()):
            if line.startswith(b"data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                self.tokens += len(choice["token_ids"])
            self.finished |= line == b"data: [DONE]\n"
        if linger:
            await asyncio.sleep(0.01)
        writer.close()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_blocks": 80, "max_num_seqs": 16, "max_num_batched_tokens": 64},  # preempted, queued and chunked as well
    ],
    ids=["ample", "cramped"],
)
def test_of_64_streaming_clients_some_leave_and_all_others_get_every_token(options: dict[str, Any]) -> None:
    rng = random.Random(3)
    with real_server(**options) as server:
        thrash(server.core)
        clients = [
            Client(server, [rng.randrange(3, 300) for _ in range(rng.randint(1, 200))], rng.randint(1, 80))
            for _ in range(NUM_CLIENTS)
        ]
        leavers = rng.sample(clients, 24)
        before_first, midway, after_done = set(leavers[:8]), set(leavers[8:16]), set(leavers[16:])

        async def run(client: Client) -> None:
            if client in before_first:
                await client.run(leave_after=0)
            elif client in midway:
                await client.run(leave_after=1 + client.wanted // 2)
            else:
                await client.run(linger=client in after_done)

        # Most are there before any goes on, whenever they come.
        go_on = step_for_news(server.engine)
        outputs = server.engine.core.outputs
        opened = outputs.add = Mock(wraps=outputs.add)

        async def begin() -> None:
            while opened.call_count < NUM_CLIENTS - len(before_first):
                await asyncio.sleep(0.005)
            go_on()

        async def run_all() -> None:
            await asyncio.gather(begin(), *(run(client) for client in clients))

        asyncio.run(run_all())
        for client in clients:
            if client not in before_first | midway:
                assert (client.tokens, client.finished) == (client.wanted, True)
        server.assert_nothing_runs()
        finished = server.core.stats.finished
        assert finished[FinishReason.LENGTH] + finished[FinishReason.ABORT] <= NUM_CLIENTS
        assert finished[FinishReason.LENGTH] >= NUM_CLIENTS - 16
        if options:
            assert server.core.stats.gauges().num_preemptions > 0
        assert server.complete([5, 6], max_tokens=3)["usage"]["completion_tokens"] == 3


@pytest.fixture(scope="module")
def shared() -> Iterator[RealServer]:
    with real_server() as server:
        slow_down(server.core, STEP)
        yield server


class TestOneThatLeaves:
    """How many steps go on after its client has closed the connection."""

    @pytest.fixture
    def slow(self, shared: RealServer) -> Iterator[RealServer]:
        yield shared
        shared.assert_nothing_runs()

    @pytest.mark.parametrize("polite", [True, False])
    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    @pytest.mark.parametrize("stream", [True, False])
    def test_frees_its_blocks_within_a_step(self, slow: RealServer, path: str, stream: bool, polite: bool) -> None:
        chat = {"messages": [{"role": "user", "content": "the blocks " * 9}]}
        asked = chat if "chat" in path else {"prompt": ["the blocks " * 9] * 2}
        num_prompts = 1 if "chat" in path else 2
        go_on = step_for_news(slow.engine)
        connection = send(slow, path, {**asked, "max_tokens": 400, "stream": stream, "n": 2, "ignore_eos": True})
        wait_until(lambda: slow.core.scheduler.num_running == 2 * num_prompts and go_on.is_waiting)
        steps = slow.core.stats.num_steps
        connection.close() if polite else leave(connection)
        wait_until(lambda: is_drained(slow.core))
        go_on()
        # The step it left in, and for two prompts another, if the news of the second came after it.
        assert slow.core.stats.num_steps - steps <= num_prompts

    def test_while_it_waits_is_never_computed(self) -> None:
        with real_server(max_num_seqs=1) as server:
            step_for_news(server.engine)
            first = send(
                server, "/v1/completions", {"prompt": [5], "max_tokens": 20, "stream": True, "ignore_eos": True}
            )
            wait_until(lambda: server.core.scheduler.num_running == 1)
            waiting = send(server, "/v1/completions", {"prompt": [6] * 500, "max_tokens": 400})
            wait_until(lambda: server.core.scheduler.num_waiting == 1)
            queried = server.core.stats.prefix_cache_queries
            waiting.close()
            wait_until(lambda: server.core.scheduler.num_waiting == 0)
            assert server.core.stats.prefix_cache_queries == queried
            assert server.core.scheduler.num_running == 1
            first.close()
            server.assert_nothing_runs()

    def test_and_does_not_read_holds_up_nobody(self, slow: RealServer) -> None:
        connection = send(slow, "/v1/completions", {"prompt": [5], "max_tokens": 900, "stream": True, "n": 4})
        wait_until(lambda: slow.core.stats.gauges().num_running == 4)
        slow.complete([6], max_tokens=5)
        wait_until(lambda: slow.core.stats.gauges().num_running == 4)  # its samples have not ended
        connection.close()
