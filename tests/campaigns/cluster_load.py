"""The users of `cluster_faults.py`, and the answers that they must get."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter

from tests.campaigns.cluster import PORT, Cluster, Server
from tests.campaigns.cluster_clients import Client, Question, Reply, questions

TENANTS = ("ada", "ben")
# Time after which a request is without an end, while the router runs: as long as no fault, with all that TCP waits for
# after one.
END_SECONDS = 45.0
# Share of the clients that leave at a random moment.
LEAVE = 0.1
# What clients may see: an answer cut by an error event, and one refused for now.
ERRORS = {
    "502 worker_lost",
    "200 worker_lost",
    "503 no_worker",
    "503 shutting_down",
    *("200 rank_lost", "500 rank_lost", "503 rank_lost"),
    "200 step_failed",
    "500 step_failed",
}


class Load:
    """Users who send one request after the other, unless they are paused."""

    def __init__(self, router: Server, known: list[tuple[Question, Reply]], rng: random.Random) -> None:
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []
        self.unreachable_until = -math.inf
        self._router = router
        self._client = Client(PORT, router.host.address)
        self._known = known
        self._rng = rng
        self._running = 0
        self._is_open = asyncio.Event()

    def resume(self) -> None:
        self._is_open.set()

    def close(self) -> None:
        """Let users begin no more requests."""
        self._is_open.clear()

    async def drained(self) -> None:
        """Wait until every request has ended."""
        while self._running:
            await asyncio.sleep(0.01)

    async def user(self) -> None:
        while True:
            await self._is_open.wait()
            question, whole = self._rng.choice(self._known)
            self._running += 1
            try:
                outcome = await self._ask(question, whole)
            finally:
                self._running -= 1
            self.outcomes[outcome] += 1
            if outcome != "whole":
                await asyncio.sleep(0.1)

    async def _ask(self, question: Question, whole: Reply) -> str:
        stream = question.streams and self._rng.random() < 0.8
        client, began, frozen = self._client, time.monotonic(), self._router.frozen_s
        if self._rng.random() < LEAVE:
            # It leaves; whatever it has received is compared too.
            leaves_after = self._rng.random()
            reply = await client.ask(question, self._rng.choice(TENANTS), leaves_after, stream=stream)
            self._compare(question, reply, whole)
            return "whole" if reply.is_whole and not reply.error else "left"
        reply = await client.ask(question, self._rng.choice(TENANTS), END_SECONDS, stream=stream)
        took = time.monotonic() - began
        self._compare(question, reply, whole)
        if took >= END_SECONDS and took - (self._router.frozen_s - frozen) < END_SECONDS - 1:
            return "left a frozen router"
        if took >= END_SECONDS:
            self.faults.append(f"a request had no end: {str(reply)[:300]}")
            return "without an end"
        if reply.error:
            outcome = f"{reply.status} {reply.error}"
            if outcome not in ERRORS:
                self.faults.append(f"an answer was {outcome}")
            return outcome
        if reply.is_whole:
            if reply.choices != whole.choices:
                self.faults.append(
                    f"a whole answer is not the whole: {question.body}: {reply} instead of {whole}"[:900]
                )
            return "whole"
        outcome = "closed" if reply.status else "no answer"
        # A server's answer that is no stream can only be closed when its server is lost.
        if self.unreachable_until < began and (stream or not reply.status):
            self.faults.append(f"{outcome} after {took:.1f} s though the router can be reached: {str(reply)[:300]}")
        return outcome

    def _compare(self, question: Question, reply: Reply, whole: Reply) -> None:
        if not reply.is_part_of(whole):
            self.faults.append(f"WRONG TOKENS: {question.body}: {reply} instead of {whole}"[:900])


def alone(server: Server, question: Question) -> Reply:
    """The answer of a server that keeps no prefixes, to one request at a time."""
    reply = asyncio.run(Client(PORT, server.host.address).ask(question, TENANTS[0], stream=False))
    if reply.status != 200:
        raise SystemExit(f"alone, {question} is answered {reply}")
    return reply


def references(cluster: Cluster, count: int) -> list[tuple[Question, Reply]]:
    """Questions of all kinds and their answers, of which most must depend on all of the prompt."""
    words = ["block", "table", "the", "scheduler", "waits", "for", "its", "turn", "ünï", "日本", "😀", "queue"]
    cluster.reference.start()
    cluster.reference.wait_ready()
    known = [(each, alone(cluster.reference, each)) for each in questions(random.Random(7), count, words)]
    body = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    prompts = [[first, *range(20, 120)] for first in range(3, 23)]
    answers = {str(alone(cluster.reference, Question("/v1/completions", {**body, "prompt": each}))) for each in prompts}
    cluster.reference.kill()
    if len(answers) < 0.9 * len(prompts):
        raise SystemExit(f"answers do not depend on the beginning of a prompt: {len(answers)} of {len(prompts)}")
    return known
