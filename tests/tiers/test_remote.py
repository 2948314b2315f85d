"""What lies in Redis is shared by those who may, proven, and no one waits for it long."""

from __future__ import annotations

import gc
import logging
import shutil
import socket
import subprocess
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from octavo.commands.settings import Settings
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.planner.calculator import REMOTE_BLOCKS
from octavo.tiers.base import Reason
from octavo.tiers.header import HEADER_BYTES, make_header
from octavo.tiers.remote import RemoteMedium, without_password
from octavo.tiers.store import PIECE, Store
from tests.ports import free_port
from tests.redis_server import PROGRAM, RedisServer
from tests.tiers.stores import BLOCK_BYTES, FINGERPRINT, SECONDS, get, label, payload, put, remote

pytestmark = pytest.mark.integration

SECRET = "only our servers know"


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Any]:
    with redis.Redis.from_url(redis_server.url) as client:
        yield client


Open = Callable[..., Store]


@pytest.fixture
def open_store(redis_server: RedisServer) -> Iterator[Open]:
    """Opens stores over the session's server; `fingerprint` and `secret` as of `RemoteMedium`."""
    opened: list[Store] = []

    def open_store(url: str = redis_server.url, most_faults: int = 8, clock: Any = None, **options: Any) -> Store:
        more = {} if clock is None else {"clock": clock}
        opened.append(Store(remote(url, **options), most_faults=most_faults, **more))
        return opened[-1]

    yield open_store
    for store in opened:
        store.close()


def ask(store: Store, *numbers: int) -> list[Reason | None]:
    question = store.ask([label(number) for number in numbers], SECONDS)
    assert question.wait(SECONDS)
    return question.outcomes


def test_another_server_finds_what_one_has_stored(open_store: Open) -> None:
    first, second = open_store(secret=SECRET), open_store(secret=SECRET)
    assert put(first, 1, 2) == [None, None]
    assert ask(second, 1, 2, 3) == [None, None, Reason.ABSENT]
    assert get(second, [label(2), label(1)]) == ([None, None], [payload(2), payload(1)])
    assert second.counters.read.misses == {Reason.ABSENT: 1}
    assert (second.counters.read.blocks, second.counters.read.bytes) == (2, 2 * BLOCK_BYTES)


def test_a_prompt_that_redis_does_not_know_costs_one_command(open_store: Open, client: Any) -> None:
    store = open_store()
    put(store, 2)
    client.config_resetstat()
    assert ask(store, 1, 2, 3) == [Reason.ABSENT] * 3
    assert client.info("commandstats")["cmdstat_strlen"]["calls"] == 1


@pytest.mark.parametrize(
    "other",
    [{"fingerprint": b"g" * 16}, {"secret": "quite another secret"}, {"secret": None}],
    ids=["another model", "another secret", "no secret"],
)
def test_servers_that_do_not_share_never_meet_nor_disturb_each_other(
    open_store: Open, other: dict[str, Any], client: Any
) -> None:
    first, second = open_store(secret=SECRET), open_store(**{"secret": SECRET, **other})
    put(first, 1)
    assert ask(second, 1) == [Reason.ABSENT]
    assert get(second, [label(1)])[0] == [Reason.ABSENT]
    put(second, 1)
    assert len(client.keys("octavo:*")) == 2
    assert get(first, [label(1)])[0] == get(second, [label(1)])[0] == [None]


def flipped(value: bytes, at: int) -> bytes:
    changed = bytearray(value)
    changed[at] ^= 1
    return bytes(changed)


def forged(value: bytes) -> bytes:
    """A block with a right header and checksum, by somebody without the secret."""
    planted = memoryview(bytes(BLOCK_BYTES))
    return make_header(FINGERPRINT, label(1), planted) + planted + value[HEADER_BYTES + BLOCK_BYTES :]


DAMAGE: list[tuple[str, Callable[[bytes], bytes], Reason]] = [
    ("half of it", lambda value: value[: len(value) // 2], Reason.TRUNCATED),
    ("more than it", lambda value: value * 2, Reason.TRUNCATED),
    ("a few bytes", lambda value: value[:9], Reason.TRUNCATED),
    ("a bit of the payload", lambda value: flipped(value, 4000), Reason.CHECKSUM),
    ("a bit of the length", lambda value: flipped(value, 80), Reason.TRUNCATED),
    ("a bit of the version", lambda value: flipped(value, 8), Reason.LAYOUT),
    ("a bit of the magic", lambda value: flipped(value, 0), Reason.CHECKSUM),
    ("a bit of the fingerprint", lambda value: flipped(value, 16), Reason.FINGERPRINT),
]


@pytest.mark.parametrize("secret", [None, SECRET], ids=["unsigned", "signed"])
@pytest.mark.parametrize(("damage", "reason"), [d[1:] for d in DAMAGE], ids=[d[0] for d in DAMAGE])
def test_a_damaged_value_is_a_miss_and_makes_room_for_a_good_one(
    open_store: Open, client: Any, damage: Callable[[bytes], bytes], reason: Reason, secret: str | None
) -> None:
    store = open_store(secret=secret)
    put(store, 1)
    (name,) = client.keys()
    client.set(name, damage(client.get(name)))
    outcomes, buffers = get(store, [label(1)])
    assert (outcomes, buffers) == ([reason], [bytearray(BLOCK_BYTES)])
    assert store.counters.read.misses == {reason: 1}
    put(store, 1)
    assert get(store, [label(1)]) == ([None], [payload(1)])


@pytest.mark.parametrize(
    "plant",
    [forged, lambda value: forged(value)[: HEADER_BYTES + BLOCK_BYTES], lambda value: flipped(value, len(value) - 1)],
    ids=["another's signature", "no signature", "a bit of the signature"],
)
def test_a_block_planted_without_the_secret_is_forged(
    open_store: Open, client: Any, plant: Callable[[bytes], bytes]
) -> None:
    store = open_store(secret=SECRET)
    put(store, 1)
    (name,) = client.keys()
    client.set(name, plant(client.get(name)))
    assert get(store, [label(1)]) == ([Reason.FORGED], [bytearray(BLOCK_BYTES)])
    assert not client.exists(name)


def test_a_block_under_the_name_of_another_is_a_miss_and_goes(open_store: Open, client: Any) -> None:
    store = open_store(secret=SECRET)
    put(store, 1)
    (first,) = client.keys()
    put(store, 2)
    (second,) = set(client.keys()) - {first}
    client.copy(first, second, replace=True)
    assert get(store, [label(1), label(2)])[0] == [None, Reason.LABEL]
    assert client.keys() == [first]


def test_a_value_that_is_not_a_string_is_a_miss_and_is_removed(open_store: Open, client: Any) -> None:
    store = open_store()
    put(store, 1)
    (name,) = client.keys()
    client.delete(name)
    client.rpush(name, b"a list")
    assert ask(store, 1) == [None]
    assert get(store, [label(1)])[0] == [Reason.LAYOUT]
    assert not client.exists(name)


def test_a_time_to_live_runs_from_the_last_use(open_store: Open, client: Any, redis_server: RedisServer) -> None:
    store = open_store(f"{redis_server.url}&ttl=1000")
    put(store, 1)
    (name,) = client.keys()
    assert 0 < client.ttl(name) <= 1000
    for use in (lambda: get(store, [label(1)]), lambda: put(store, 1)):
        client.expire(name, 500)
        use()
        assert client.ttl(name) > 500
    forever = open_store(fingerprint=b"g" * 16)
    put(forever, 1)
    (other,) = set(client.keys()) - {name}
    assert client.ttl(other) == -1


@pytest.fixture
def tls_server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of a Redis that speaks TLS alone, and the file of the authority that its certificate is of."""
    if PROGRAM is None or (openssl := shutil.which("openssl")) is None:
        pytest.skip("Redis over TLS is not tested: it needs redis-server and openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([openssl, "req", "-x509", "-nodes", *curve, *files, *name], check=True, capture_output=True)
    port = str(free_port())
    tls = ["--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-auth-clients", "no"]
    options = ["--port", "0", "--tls-port", port, "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    server = subprocess.Popen([PROGRAM, *options, *tls], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    said = ""
    for line in server.stdout:
        said += line
        if "Ready to accept connections" in line:
            break
    else:
        pytest.skip(f"Redis over TLS is not tested: this redis-server was built without it: {said}")
    yield f"rediss://127.0.0.1:{port}/0?socket_timeout=60&socket_connect_timeout=60", certificate
    server.kill()
    server.communicate()


def test_blocks_travel_over_tls_and_only_to_a_server_with_the_right_certificate(
    open_store: Open, tls_server: tuple[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    url, authority = tls_server
    store = open_store(f"{url}&ssl_ca_certs={authority}", secret=SECRET)
    assert put(store, 1) == [None]
    assert ask(store, 1, 2) == [None, Reason.ABSENT]
    assert get(store, [label(1)]) == ([None], [payload(1)])
    stranger = open_store(url, secret=SECRET)
    assert "certificate verify failed" in caplog.text
    assert get(stranger, [label(1)])[0] == [Reason.IO_ERROR]


def test_a_full_redis_refuses_and_goes_on_serving(open_store: Open, client: Any) -> None:
    store = open_store()
    put(store, 1)
    client.config_set("maxmemory", 1)
    try:
        assert put(store, 2) == [Reason.NO_SPACE]
        assert get(store, [label(1)])[0] == [None]
    finally:
        client.config_set("maxmemory", 0)


def test_a_redis_that_dies_is_left_alone_and_used_again_once_it_lives(
    open_store: Open, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    store = open_store(most_faults=3, clock=lambda: now[0])
    put(store, 1)
    redis_server.kill()
    try:
        assert ask(store, 1) == [Reason.IO_ERROR]
        assert get(store, [label(1)])[0] == [Reason.IO_ERROR]
        assert put(store, 2) == [Reason.IO_ERROR]
        assert ask(store, 1) == [Reason.IO_ERROR]
        assert not store.is_open
        assert get(store, [label(1)])[0] == [Reason.CLOSED]
        assert not store.wants(label(2).key)
        assert "failed 3 times in a row" in caplog.text
        late = open_store()  # a server starts without it too
        assert "does not answer" in caplog.text
        assert get(late, [label(1)])[0] == [Reason.IO_ERROR]
    finally:
        redis_server.start()
    now[0] = 31.0
    assert ask(store, 1) == [Reason.ABSENT]
    assert put(store, 1) == [None]
    assert get(store, [label(1)]) == ([None], [payload(1)])


def test_a_redis_that_answers_too_slowly_is_a_miss(open_store: Open, redis_server: RedisServer, client: Any) -> None:
    put(open_store(), 1)
    url = redis_server.url.replace("socket_timeout=60", "socket_timeout=0.05")
    store = open_store(url, most_faults=10**6)
    redis_server.stand_still()
    try:
        assert ask(store, 1) == [Reason.IO_ERROR]
        assert get(store, [label(1)]) == ([Reason.IO_ERROR], [bytearray(BLOCK_BYTES)])
        assert put(store, 2) == [Reason.IO_ERROR]
    finally:
        redis_server.go_on()
    client.ping()
    # On a busy machine it may go on answering too slowly for a while.
    ends = time.monotonic() + SECONDS
    while (found := get(store, [label(1)])) != ([None], [payload(1)]):
        assert found == ([Reason.IO_ERROR], [bytearray(BLOCK_BYTES)])
        assert time.monotonic() < ends, "it is used no more"


def test_an_address_that_cannot_be_used_is_refused_without_its_password(redis_server: RedisServer) -> None:
    with pytest.raises(ConfigError, match="kv_remote: cannot use http://here: Redis URL must specify"):
        RemoteMedium("http://here", FINGERPRINT, BLOCK_BYTES)
    with pytest.raises(ConfigError, match=r"kv_remote: cannot use unix://.*colour"):
        RemoteMedium(redis_server.url + "&colour=blue", FINGERPRINT, BLOCK_BYTES)
    for ttl in ("0", "-5", "1.5", "", "315360001", "9" * 5000):
        with pytest.raises(ConfigError, match=r"ttl must be 1 to 315360000 seconds, got"):
            RemoteMedium(f"{redis_server.url}&ttl={ttl}&socket_timeout=1", FINGERPRINT, BLOCK_BYTES)
    with pytest.raises(ConfigError, match="rejects the password") as refused:
        RemoteMedium(redis_server.url + "&username=eve&password=letmein", FINGERPRINT, BLOCK_BYTES)
    assert "letmein" not in str(refused.value)
    with redis.Redis.from_url(redis_server.url) as client:
        client.config_set("requirepass", "new")
        try:
            with pytest.raises(ConfigError, match="rejects the password, or requires one"):
                RemoteMedium(redis_server.url, FINGERPRINT, BLOCK_BYTES)
        finally:
            client.config_set("requirepass", "")
    for password in ("letmein", "let/me@in"):
        assert without_password(f"redis://ada:{password}@host:1/2") == "redis://***@host:1/2"


def test_what_answers_but_is_no_redis_is_refused() -> None:
    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b"+OK\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ConfigError, match="cannot use redis://"):
            remote(f"redis://{address}/0?socket_timeout=60&socket_connect_timeout=60")
        thread.join(SECONDS)


def test_the_secret_and_the_address_come_from_the_environment_and_are_in_no_printed_options(
    caplog: pytest.LogCaptureFixture,
) -> None:
    variables = {"OCTAVO_KV_REMOTE": "redis://:letmein@host", "OCTAVO_KV_REMOTE_SECRET": SECRET}
    settings = Settings([EngineConfig], {}, variables)
    config = EngineConfig(**settings.given(EngineConfig))
    assert (config.kv_remote, config.kv_remote_secret) == ("redis://:letmein@host", SECRET)
    with caplog.at_level(logging.DEBUG):
        settings.log()
    assert "kv_remote_secret=(hidden)" in caplog.text
    for text in (caplog.text, repr(config), str(settings.by_source())):
        assert SECRET not in text
        assert "letmein" not in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_remote_secret": SECRET}, "needs kv_remote or kv_neighbours, which are not given"),
        ({"kv_remote": "redis://h", "kv_remote_secret": "tooth"}, "has 5 characters, but needs 16"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        EngineConfig(**options)
    assert "tooth" not in str(refused.value)


def test_nobody_there_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:  # bound, and not listening
        taken.bind(("127.0.0.1", 0))
        RemoteMedium(f"redis://127.0.0.1:{taken.getsockname()[1]}", FINGERPRINT, BLOCK_BYTES).close()
    assert "does not answer" in caplog.text


def test_a_read_has_no_more_blocks_in_memory_than_the_plan_says(redis_server: RedisServer) -> None:
    size = 256 << 10
    medium = RemoteMedium(redis_server.url, FINGERPRINT, size)
    labels, buffers = [label(n) for n in range(PIECE)], [memoryview(bytearray(size)) for _ in range(PIECE)]

    def work() -> None:
        for each, buffer in zip(labels, buffers, strict=True):
            assert medium.write(each, buffer, "ada") is None
        assert medium.read(labels, buffers) == [None] * PIECE

    work()  # what is made once
    gc.collect()
    tracemalloc.start()
    try:
        work()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    medium.close()
    assert peak <= REMOTE_BLOCKS * size
