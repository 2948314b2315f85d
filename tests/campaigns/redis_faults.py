"""Kill, slow down, damage, plant, load: a store in Redis must never lead to a wrong token, whatever happens to it.

    python -m tests.campaigns.redis_faults [--cycles 10000] [--seed 0] [--out benchmarks/results]

Each cycle forks a process that stores blocks in a private Redis, or an engine that serves and stores, and kills it with
SIGKILL at a random moment. Then a value may be damaged, swapped with another, half overwritten, or planted by someone
without the secret; or Redis is out of memory, dies or hangs while blocks are loaded. Every block that was ever stored
is loaded: each must be right to the last byte, or a miss with a reason. In half of the cycles an engine meets that
fault first, and must answer requests as it would without a cache.
"""

from __future__ import annotations

import random
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import redis
from blake3 import blake3

from octavo import LLM
from octavo.tiers.base import LAYOUT_VERSION
from octavo.tiers.header import HEADER_BYTES, make_header
from octavo.tiers.remote import RemoteMedium, signing_key
from octavo.tiers.store import Store
from tests.campaigns.fault_cycles import (
    count_blocks,
    count_faults,
    count_misses,
    kill_one,
    tiny_models,
)
from tests.campaigns.tiny_models import BLOCK_BYTES, TinyModel
from tests.redis_server import RedisServer, redis_server

SECRET = "only the servers know it"
DAMAGE = ["bit", "cut", "longer", "swap", "half a value", "unsigned", "another secret", "list", "fingerprint", "layout"]
FAULTS = ["none", "none", *DAMAGE, "out of memory", "evicts", "dies", "stands still"]
SECONDS = 10.0
# A load that is not over then never will be; generous, so that this program may be suspended meanwhile.
MOST_SECONDS = 1800.0


def address(server: RedisServer) -> str:
    return f"{server.url}&socket_timeout=0.05&socket_connect_timeout=0.05"


def open_remote(server: RedisServer, model: TinyModel) -> RemoteMedium:
    return RemoteMedium(address(server), model.fingerprint, BLOCK_BYTES, secret=SECRET)


def open_engine(server: RedisServer, model: TinyModel) -> LLM:
    return model.engine(kv_remote=address(server), kv_remote_secret=SECRET)


def damage(client: Any, fault: str, server: RedisServer, models: list[TinyModel], rng: random.Random) -> None:
    """Change values as anyone can who may write to Redis."""
    names = sorted(client.scan_iter("octavo:*", _type="string"))
    if not names:
        return
    name, other = rng.choice(names), rng.choice(names)
    value = bytearray(client.get(name) or b"\0")
    if fault == "bit":
        value[rng.randrange(len(value))] ^= 1 << rng.randrange(8)
        client.set(name, bytes(value))
    elif fault == "cut":
        client.set(name, bytes(value[: rng.randrange(len(value))]))
    elif fault == "longer":
        client.append(name, rng.randbytes(rng.randrange(1, 2 * BLOCK_BYTES)))
    elif fault == "swap":
        client.set(name, client.getset(other, bytes(value)) or b"")
    elif fault == "half a value":
        client.setrange(name, HEADER_BYTES + BLOCK_BYTES // 2, rng.randbytes(BLOCK_BYTES // 2))
    elif fault == "list":
        client.delete(name)
        client.rpush(name, b"no block")
    elif fault == "layout":
        client.setrange(name, 8, struct.pack("<I", LAYOUT_VERSION + 1))
    else:
        plant(client, fault, server, models, rng)


def plant(client: Any, fault: str, server: RedisServer, models: list[TinyModel], rng: random.Random) -> None:
    """Plant a whole block with a correct header where one of the servers looks for it."""
    model, other = rng.sample(models, 2)
    label, _ = rng.choice(model.blocks)
    with closing(open_remote(server, model)) as ours, closing(open_remote(server, other)) as theirs:
        name, foreign = ours._name(label.key), theirs._name(rng.choice(other.blocks)[0].key)
    if fault == "fingerprint":
        client.copy(foreign, name, replace=True)
        return
    wrong = rng.randbytes(BLOCK_BYTES)
    header = make_header(model.fingerprint, label, memoryview(wrong))
    key = signing_key("a secret of somebody else")
    signature = b"" if fault == "unsigned" else blake3(header + wrong, key=key).digest()
    client.set(name, header + wrong + signature)


@contextmanager
def trouble(server: RedisServer, client: Any, fault: str, rng: random.Random) -> Iterator[None]:
    """Let the fault happen while blocks are loaded."""
    if fault == "dies":
        timer = threading.Timer(rng.uniform(0, 0.003), server.kill)
    elif fault == "stands still":
        server.stand_still()
        # Sometimes it resumes early enough for an answer to arrive, but after its timeout.
        timer = threading.Timer(rng.uniform(0, 0.15), server.go_on)
    else:
        yield
        return
    timer.start()
    try:
        yield
    finally:
        timer.join()
        if fault == "dies":
            server.start()


def cycle(
    server: RedisServer, client: Any, models: list[TinyModel], rng: random.Random, served: float, totals: Counter[str]
) -> None:
    model, fault = rng.choice(models), rng.choice(FAULTS)
    totals[f"fault: {fault}"] += 1
    if fault in ("out of memory", "evicts"):
        client.config_set("maxmemory-policy", "noeviction" if fault == "out of memory" else "allkeys-lru")
        client.config_set("maxmemory", client.info("memory")["used_memory"] + rng.randrange(10 * BLOCK_BYTES))
    kill_one(models, lambda m: Store(open_remote(server, m)), partial(open_engine, server), rng, totals)
    client.config_set("maxmemory", 0)
    if fault in DAMAGE:
        damage(client, fault, server, models, rng)
    store = Store(open_remote(server, model), num_threads=1, most_faults=2)
    if rng.random() > served:
        with trouble(server, client, fault, rng):
            read_all(store, model, fault, totals)
    else:
        with open_engine(server, model) as llm:
            with trouble(server, client, fault, rng):
                model.serve(llm, rng, totals)
            count_misses(llm, totals)
        read_all(store, model, fault, totals)
    totals["closed by the breaker"] += sum(store.num_closings.values())
    store.close()


def read_all(store: Store, model: TinyModel, fault: str, totals: Counter[str]) -> None:
    """Load and check every block that was ever stored."""
    buffers = [bytearray(BLOCK_BYTES) for _ in model.blocks]
    loads = []
    for first in range(0, len(buffers), 10):
        labels = [label for label, _ in model.blocks[first : first + 10]]
        views = [memoryview(buffer) for buffer in buffers[first : first + 10]]
        loads.append(store.get(labels, views, SECONDS))
    if not all(load.wait(MOST_SECONDS) for load in loads):
        raise SystemExit(f"a load neither came nor failed (fault: {fault})")
    count_blocks(model, [reason for load in loads for reason in load.outcomes], buffers, totals)


def run(cycles: int, seed: int, served: float) -> Counter[str]:
    """Run the cycles; returns counts of what happened."""
    rng, totals = random.Random(seed), Counter[str]()
    with tiny_models(0, 1) as models, redis_server() as server, redis.Redis.from_url(server.url) as client:
        for _ in range(cycles):
            cycle(server, client, models, rng, served, totals)
            if rng.random() < 0.02:
                client.flushall()
    return totals


if __name__ == "__main__":
    count_faults("Kills and damage to the store in Redis", __doc__, run)
