"""Kill, slow down, damage, plant, load: a store in Redis must never give a wrong byte, whatever happened to it.

    python benchmarks/redis_faults.py [--cycles 10000] [--seed 0] [--out benchmarks/results]

Each cycle forks a server of a model that stores blocks in a Redis of the benchmark's own until it is killed with
SIGKILL, at a moment drawn at random. Then perhaps a value is damaged, exchanged for another, half overwritten, or
planted by somebody without the secret; or Redis is out of memory, dies or stands still while blocks are loaded. Another
server loads every block that was ever stored: each is right to the last byte, or a miss with a reason.
"""

from __future__ import annotations

import random
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import redis

from fault_cycles import count_faults, kill_while_storing
from octavo.kvcache.label import Label
from octavo.tiers.base import LAYOUT_VERSION
from octavo.tiers.header import HEADER_BYTES, make_header
from octavo.tiers.remote import RemoteMedium
from octavo.tiers.store import Store
from redis_process import RedisProcess, redis_process

BLOCK_BYTES = 4_000
NUM_BLOCKS = 60
FINGERPRINTS = [b"model-one-------", b"model-two-------"]
SECRET = "only the servers know it"
DAMAGE = ["bit", "cut", "longer", "swap", "half a value", "unsigned", "another secret", "list", "fingerprint", "layout"]
FAULTS = ["none", "none", *DAMAGE, "out of memory", "evicts", "dies", "stands still"]
SECONDS = 10.0


def label(number: int) -> Label:
    return Label(digest(number), digest(number - 1), number.to_bytes(4, "little") * 16)


def digest(number: int) -> bytes:
    return blake2b(struct.pack("<q", number), digest_size=16).digest()


def payload(fingerprint: bytes, number: int) -> bytes:
    """Of its own for each model: one model's block would be wrong for the other."""
    return random.Random(fingerprint + struct.pack("<q", number)).randbytes(BLOCK_BYTES)


def open_remote(server: RedisProcess, fingerprint: bytes, secret: str = SECRET) -> RemoteMedium:
    url = f"{server.url}&socket_timeout=0.05&socket_connect_timeout=0.05"
    return RemoteMedium(url, fingerprint, BLOCK_BYTES, secret=secret)


def damage(client: Any, fault: str, media: dict[bytes, RemoteMedium], rng: random.Random) -> None:
    """Change values as anybody can who may write to Redis."""
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
        plant(client, fault, media, rng)


def plant(client: Any, fault: str, media: dict[bytes, RemoteMedium], rng: random.Random) -> None:
    """A whole block with a right header where one of the servers looks for it."""
    number, fingerprint = rng.randrange(NUM_BLOCKS), rng.choice(FINGERPRINTS)
    name = media[fingerprint]._name(label(number).key)
    if fault == "fingerprint":
        (theirs,) = set(FINGERPRINTS) - {fingerprint}
        client.copy(media[theirs]._name(label(number).key), name, replace=True)
        return
    wrong = rng.randbytes(BLOCK_BYTES)
    header = make_header(fingerprint, label(number), memoryview(wrong))
    key = blake2b(b"a secret of somebody else", person=b"octavo-kv-sign").digest()
    signature = b"" if fault == "unsigned" else blake2b(header + wrong, key=key, digest_size=32).digest()
    client.set(name, header + wrong + signature)


@contextmanager
def trouble(server: RedisProcess, client: Any, fault: str, rng: random.Random) -> Iterator[None]:
    """While blocks are loaded."""
    if fault == "dies":
        timer = threading.Timer(rng.uniform(0, 0.003), server.kill)
    elif fault == "stands still":
        server.stand_still()
        # Sometimes so soon that an answer comes after its time has run out.
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
    server: RedisProcess, client: Any, contents: dict[bytes, list[bytes]], rng: random.Random, totals: Counter[str]
) -> None:
    fingerprint = rng.choice(FINGERPRINTS)
    fault = rng.choice(FAULTS)
    totals[f"fault: {fault}"] += 1
    if fault in ("out of memory", "evicts"):
        client.config_set("maxmemory-policy", "noeviction" if fault == "out of memory" else "allkeys-lru")
        client.config_set("maxmemory", client.info("memory")["used_memory"] + rng.randrange(10 * BLOCK_BYTES))
    blocks = [(label(number), content) for number, content in enumerate(contents[fingerprint])]
    totals[kill_while_storing(lambda: Store(open_remote(server, fingerprint)), blocks, rng)] += 1
    client.config_set("maxmemory", 0)
    media = {each: open_remote(server, each) for each in FINGERPRINTS}
    if fault in DAMAGE:
        damage(client, fault, media, rng)
    fingerprint = rng.choice(FINGERPRINTS)
    store = Store(media[fingerprint], num_threads=1, most_faults=2)
    buffers = [bytearray(BLOCK_BYTES) for _ in range(NUM_BLOCKS)]
    with trouble(server, client, fault, rng):
        loads = [
            store.get([label(n) for n in part], [memoryview(buffers[n]) for n in part], SECONDS)
            for part in (range(first, first + 10) for first in range(0, NUM_BLOCKS, 10))
        ]
        if not all(load.wait(SECONDS) for load in loads):
            raise SystemExit(f"a load neither came nor failed (fault: {fault})")
    outcomes = [reason for load in loads for reason in load.outcomes]
    for number, (reason, buffer) in enumerate(zip(outcomes, buffers, strict=True)):
        if reason is None:
            totals["right" if buffer == contents[fingerprint][number] else "WRONG"] += 1
        else:
            totals[f"miss: {reason.value}"] += 1
    totals["closed by the breaker"] += store.num_closings
    store.close()
    for medium in media.values():
        medium.close()


def run(cycles: int, seed: int) -> Counter[str]:
    """Counts of what happened over so many cycles."""
    contents = {f: [payload(f, number) for number in range(NUM_BLOCKS)] for f in FINGERPRINTS}
    rng, totals = random.Random(seed), Counter[str]()
    with redis_process() as server, redis.Redis.from_url(server.url) as client:
        for _ in range(cycles):
            cycle(server, client, contents, rng, totals)
            if rng.random() < 0.02:
                client.flushall()
    return totals


if __name__ == "__main__":
    count_faults("Kills and damage to the store in Redis", __doc__, run)
