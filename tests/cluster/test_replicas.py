"""Two servers of the packaged model in processes of their own: a conversation stays, and one may be killed."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from octavo.workloads.server_process import RunningServer, running_server
from tests.cluster.test_router import KEY, Routed, router
from tests.ports import free_port

pytest.importorskip("dynamo.llm")
pytestmark = [pytest.mark.integration, pytest.mark.slow]


@contextmanager
def replica() -> Iterator[RunningServer]:
    events = f'"endpoint": "tcp://127.0.0.1:{free_port()}", "replay_endpoint": "tcp://127.0.0.1:{free_port()}"'
    arguments = ("--num-threads", "1", "--kv-cache-memory", "64MiB", "--max-model-len", "2048", "--router-key", KEY)
    events = f'{{"enable_kv_cache_events": true, {events}}}'
    command = (sys.executable, "-m", "octavo", "serve")
    with running_server((*arguments, "--kv-events-config", events), command) as server:
        yield server


@pytest.fixture(scope="module")
def servers() -> Iterator[list[RunningServer]]:
    """Two servers for all tests; the last test kills one."""
    with ExitStack() as stack:
        yield [stack.enter_context(replica()) for _ in range(2)]


@pytest.fixture
def routed(servers: list[RunningServer]) -> Iterator[Routed]:
    with router(*(argument for server in servers for argument in ("--worker", server.base_url))) as routed:
        yield routed


class Conversation:
    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._messages = [{"role": "system", "content": f"You know all about {topic}. " * 12}]

    def turn(self, routed: Routed) -> int:
        """Ask the next question; returns how many tokens of the prompt were not cached."""
        number = len(self._messages) // 2
        self._messages.append({"role": "user", "content": f"Tell me the fact number {number} about {self._topic}."})
        body = {"messages": self._messages, "max_tokens": 8, "temperature": 0}
        answer = routed.client.post("/v1/chat/completions", json=body).json()
        self._messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        usage = answer["usage"]
        return int(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])


def test_conversations_of_eight_turns_stay_with_their_blocks(routed: Routed) -> None:
    conversations = {topic: Conversation(topic) for topic in ("books", "ships", "birds")}
    with ThreadPoolExecutor(len(conversations)) as threads:  # at once, so that one server does not get them all
        list(threads.map(lambda conversation: conversation.turn(routed), conversations.values()))
    time.sleep(0.1)
    for turn in range(1, 8):
        for topic, conversation in conversations.items():
            num_computed = conversation.turn(routed)
            # All but the last question and answer, the template around them, and a block that is not full.
            assert num_computed < 64, (topic, turn, num_computed)
            time.sleep(0.1)  # a person reads; the event of the blocks arrives
    routed.until(lambda counters: counters["reservations"] == 0)
    counters = routed.counters()
    assert not any(name.startswith(("retries", "fallbacks")) for name in counters)
    assert sum(name.startswith("requests_total") for name in counters) == 2, "both servers have conversations"


@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL])
def test_streams_of_a_server_that_dies_or_hangs_end_with_an_error_and_other_requests_go_elsewhere(
    servers: list[RunningServer], routed: Routed, fault: signal.Signals
) -> None:
    ended: dict[int, list[str]] = {}

    def stream(number: int) -> None:
        body = {"prompt": f"Story {number}: once", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", routed.url + "/v1/completions", json=body, timeout=300) as answer:
            ended[number] = [line for line in answer.iter_lines() if line]

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    routed.until(lambda counters: sum(v for n, v in counters.items() if n.startswith("requests_total")) == 4)
    counters = routed.counters()
    victim = next(server for server in servers if counters[f"worker_requests/{server.base_url}"])
    num_lost = int(counters[f"worker_requests/{victim.base_url}"])
    assert victim.pid is not None
    os.kill(victim.pid, fault)
    later = [routed.complete(f"Another {number}") for number in range(4)]
    assert [answer.status_code for answer in later] == [200] * 4
    routed.until(lambda counters: counters[f"worker_up/{victim.base_url}"] == 0)
    for thread in threads:
        thread.join()
    os.kill(victim.pid, signal.SIGCONT)
    broken = [lines for lines in ended.values() if any("worker_lost" in line for line in lines)]
    assert len(broken) == num_lost
    for lines in ended.values():
        assert lines[-1] == "data: [DONE]"
    assert routed.counters()["broken_streams_total"] == num_lost
    routed.until(lambda counters: counters["reservations"] == counters["in_flight"] == 0)
