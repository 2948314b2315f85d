"""A client that leaves ends its request within a step. Of many of which some leave: test_endurance.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.tiny_engine import is_drained, slow_down, step_for_news
from tests.server.conftest import wait_until
from tests.server.http.test_disconnect import leave, send
from tests.server.real_engine import RealServer, real_server

pytestmark = pytest.mark.integration

STEP = 0.03


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
