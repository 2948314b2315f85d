"""Blocks from neighbours arrive proven, or are misses; and nobody waits long for a neighbour that lies or stalls."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.kvcache.block import HostBlockId
from octavo.kvcache.eviction import make_eviction_policy
from octavo.kvcache.hashing import Label
from octavo.kvcache.host_memory import HostMemory, Lent
from octavo.tiers import neighbours
from octavo.tiers.base import Reason
from octavo.tiers.speed import LoadSpeed
from octavo.tiers.store import Store
from tests.tiers.stores import BLOCK_BYTES, FINGERPRINT, SECONDS, get, label, payload

pytest.importorskip("redis")

from octavo.tiers import lending
from octavo.tiers.lending import Lender
from octavo.tiers.neighbours import NeighbourMedium
from octavo.tiers.remote import signed

SECRET = "only our servers know"
NUM_SLOTS = 8


class Neighbour:
    """A server with blocks in its host memory, which it hands out."""

    def __init__(self, *numbers: int, fingerprint: bytes = FINGERPRINT, secret: str = SECRET) -> None:
        self.host = HostMemory(NUM_SLOTS, 0, 4, make_eviction_policy("lru"))
        self.rows = [bytearray(BLOCK_BYTES) for _ in range(NUM_SLOTS + 1)]
        for number in numbers:
            self.fill(number)
        self.lender = Lender("127.0.0.1:0", self.host, lambda slot: memoryview(self.rows[slot]), fingerprint, secret)

    def fill(self, number: int) -> HostBlockId:
        slot = self.host.reserve(label(number), "ada")
        assert slot is not None
        self.rows[slot][:] = payload(number)
        assert self.host.filled(slot, "test", hold=False)
        return slot


@pytest.fixture
def open_neighbour() -> Iterator[Callable[..., Neighbour]]:
    opened: list[Neighbour] = []

    def open_neighbour(*numbers: int, **options: Any) -> Neighbour:
        opened.append(Neighbour(*numbers, **options))
        return opened[-1]

    yield open_neighbour
    for each in opened:
        each.lender.close()


@pytest.fixture
def open_store() -> Iterator[Callable[..., Store]]:
    opened: list[Store] = []

    def open_store(**options: Any) -> Store:
        medium = NeighbourMedium(FINGERPRINT, BLOCK_BYTES, options.pop("secret", SECRET), **options)
        opened.append(Store(medium, num_threads=4))
        return opened[-1]

    yield open_store
    for store in opened:
        store.close()


def expect(store: Store, address: str, *numbers: int) -> list[Label]:
    labels = [label(number) for number in numbers]
    assert isinstance(store.medium, NeighbourMedium)
    store.medium.expect(labels, address)
    return labels


def ask(store: Store, labels: list[Label]) -> list[Reason | None]:
    question = store.ask(labels, SECONDS)
    assert question.wait(SECONDS)
    return question.outcomes


def test_only_blocks_of_a_hint_are_asked_for_and_nothing_is_written(
    open_neighbour: Callable[..., Neighbour], open_store: Callable[..., Store]
) -> None:
    neighbour, store = open_neighbour(1, 2), open_store()
    assert store.lookup(label(1).key) is False
    labels = expect(store, neighbour.lender.address, 1, 2, 3)
    assert store.lookup(label(1).key) is None
    assert not store.wants(label(1).key)
    assert not store.wants(label(9).key)
    assert ask(store, labels) == [None, None, Reason.ABSENT]
    assert get(store, labels[:2]) == ([None, None], [payload(1), payload(2)])
    assert neighbour.lender.num_lent == 2
    assert (store.counters.read.blocks, store.counters.read.bytes) == (2, 2 * BLOCK_BYTES)
    assert [store.lookup(each.key) for each in labels] == [False] * 3, "a hint is used once"
    assert list(neighbour.host.check([])) == []


@pytest.mark.parametrize(
    "other", [{"fingerprint": b"g" * 16}, {"secret": "quite another secret"}], ids=["another model", "another secret"]
)
def test_a_neighbour_with_another_model_or_secret_has_nothing(
    open_neighbour: Callable[..., Neighbour], open_store: Callable[..., Store], other: dict[str, Any]
) -> None:
    neighbour, store = open_neighbour(1, **other), open_store()
    labels = expect(store, neighbour.lender.address, 1)
    assert ask(store, labels) == [Reason.ABSENT]
    assert neighbour.lender.num_lent == 0


def test_a_slot_that_gets_another_block_is_not_handed_out_under_its_old_name(
    open_neighbour: Callable[..., Neighbour], open_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    neighbour, store = open_neighbour(1), open_store()

    def overtaken(*given: Any) -> Any:
        """Sign, while the engine gives every slot to other blocks."""
        result = signed(*given)
        for number in range(10, 10 + NUM_SLOTS):
            neighbour.fill(number)
        return result

    monkeypatch.setattr("octavo.tiers.lending.signed", overtaken)
    labels = expect(store, neighbour.lender.address, 1)
    assert get(store, labels)[0] == [Reason.ABSENT]
    monkeypatch.undo()

    def too_late(lent: Lent) -> bool:
        """Find the block unchanged, and change it just after."""
        neighbour.rows[lent.slot][:] = payload(99)
        return True

    monkeypatch.setattr(neighbour.host, "still_lends", too_late)
    labels = expect(store, neighbour.lender.address, 12)
    assert get(store, labels) == ([Reason.CHECKSUM], [bytearray(BLOCK_BYTES)])


@contextmanager
def pretender(answer: Callable[[socket.socket, bytes], None]) -> Iterator[str]:
    """The address of something that answers each bunch of bytes as it likes, and PING as it should."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while command := connection.recv(1 << 16):
                if b"PING" in command:
                    connection.sendall(b"+PONG\r\n")
                elif b"CLIENT" in command:
                    connection.sendall(b"-ERR no\r\n" * command.count(b"SETINFO"))
                else:
                    answer(connection, command)

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def lie(connection: socket.socket, command: bytes) -> None:
    """Send blocks of the right size that nobody signed."""
    size = int(command.rsplit(b"\r\n", 2)[-2]) if b"GETRANGE" in command else 1
    if b"STRLEN" in command:
        connection.sendall(b":1\r\n" * command.count(b"STRLEN"))
    else:
        connection.sendall((b"$%d\r\n" % size + b"x" * size + b"\r\n") * command.count(b"GETRANGE"))


def trickle(connection: socket.socket, command: bytes) -> None:
    """Announce a block, and send it a byte at a time."""
    connection.sendall(b"$5160\r\n")
    for _ in range(1000):
        connection.sendall(b"x")
        time.sleep(0.02)


def die(connection: socket.socket, command: bytes) -> None:
    connection.sendall(b"$5160\r\nxxx")
    connection.shutdown(socket.SHUT_RDWR)


def stall(connection: socket.socket, command: bytes) -> None:
    """Never answer."""


@pytest.mark.parametrize(("answer", "reason"), [(lie, None), (die, Reason.IO_ERROR)], ids=["lies", "dies"])
def test_a_neighbour_that_lies_or_dies_is_a_miss_and_left_alone(
    open_store: Callable[..., Store],
    open_neighbour: Callable[..., Neighbour],
    answer: Callable[[socket.socket, bytes], None],
    reason: Reason | None,
) -> None:
    now = [0.0]
    store, good = open_store(clock=lambda: now[0]), open_neighbour(1)
    with pretender(answer) as address:
        for _ in range(2):
            outcomes, buffers = get(store, expect(store, address, 1, 2))
            assert all(outcomes)
            assert reason is None or outcomes == [reason] * 2
            assert buffers == [bytearray(BLOCK_BYTES)] * 2
        assert get(store, expect(store, address, 1))[0] == [Reason.CLOSED]
        assert get(store, expect(store, good.lender.address, 1))[0] == [None], "others are asked as before"
    assert store.is_open


@pytest.mark.parametrize("answer", [stall, trickle])
def test_a_neighbour_that_stalls_or_trickles_is_a_miss_within_its_time_and_holds_up_no_other(
    open_store: Callable[..., Store],
    open_neighbour: Callable[..., Neighbour],
    answer: Callable[[socket.socket, bytes], None],
) -> None:
    store, good = open_store(call_seconds=0.5), open_neighbour(7)
    with pretender(answer) as address:
        labels = expect(store, address, 1, 2, 3, 4)
        began = time.monotonic()
        slow = [store.get([each], [memoryview(bytearray(BLOCK_BYTES))], SECONDS) for each in labels[:2]]
        assert get(store, expect(store, good.lender.address, 7)) == ([None], [payload(7)])
        assert not all(each.done for each in slow) or time.monotonic() - began > 0.4
        assert all(each.wait(SECONDS) for each in slow)
        assert {reason for each in slow for reason in each.outcomes} == {Reason.IO_ERROR}
        assert time.monotonic() - began < 10
        assert get(store, labels[2:])[0] == [Reason.CLOSED] * 2


def test_the_speed_of_each_neighbour_is_its_own_and_an_unknown_one_is_taken_to_be_as_all(
    open_neighbour: Callable[..., Neighbour], open_store: Callable[..., Store]
) -> None:
    near, far, store = open_neighbour(1, 2), open_neighbour(3, 4), open_store()
    for neighbour, number, seconds in ((near, 1, 0.01), (far, 3, 10.0)):
        labels = expect(store, neighbour.lender.address, number)
        assert ask(store, labels) == [None]
        assert get(store, labels)[0] == [None]
        peer = store.medium._peers[neighbour.lender.address]  # type: ignore[attr-defined]
        assert peer.speed.expected(BLOCK_BYTES) is not None, "its load was measured"
        peer.speed = LoadSpeed()
        peer.speed.measure(seconds, BLOCK_BYTES)
    for neighbour, number, expected in ((near, 2, 0.01), (far, 4, 10.0)):
        assert store.expected_seconds(expect(store, neighbour.lender.address, number), BLOCK_BYTES) == expected
    overall = store.speed.expected(BLOCK_BYTES)
    assert overall is not None
    assert store.expected_seconds(expect(store, "127.0.0.1:9", 5), BLOCK_BYTES) == overall


def test_nobody_there_is_a_miss(open_store: Callable[..., Store]) -> None:
    store = open_store()
    with socket.socket() as taken:  # bound, and not listening
        taken.bind(("127.0.0.1", 0))
        labels = expect(store, f"127.0.0.1:{taken.getsockname()[1]}", 1)
        assert ask(store, labels) == [Reason.IO_ERROR]
    assert ask(store, expect(store, "no such address", 2)) == [Reason.IO_ERROR]


def test_hints_and_neighbours_are_bounded(monkeypatch: pytest.MonkeyPatch, open_store: Callable[..., Store]) -> None:
    monkeypatch.setattr(neighbours, "MOST_HINTS", 3)
    monkeypatch.setattr(neighbours, "MOST_PEERS", 2)
    store = open_store()
    labels = expect(store, "127.0.0.1:1", 1, 2, 3, 4)
    assert [store.lookup(each.key) is False for each in labels] == [True, False, False, False]
    for port in (1, 2, 3):
        ask(store, expect(store, f"127.0.0.1:{port}", 10 + port))
    assert isinstance(store.medium, NeighbourMedium)
    assert list(store.medium._peers) == ["127.0.0.1:2", "127.0.0.1:3"]


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=SECONDS)


def test_connections_are_bounded_for_each_peer_and_a_broken_command_ends_one(
    open_neighbour: Callable[..., Neighbour],
) -> None:
    lender = open_neighbour(1).lender
    for garbage in (b"GET /\r\n", b"*9\r\n", b"*1\r\n$999\r\n", b"*x\r\n", b"*1\r\n$-5\r\n", b"*" + b"1" * 300):
        with connected(lender.address) as connection:
            connection.sendall(garbage)
            assert connection.recv(100) == b""
    with connected(lender.address) as connection:
        for command in (b"*2\r\n$3\r\nDEL\r\n$1\r\nx\r\n", b"*0\r\n"):
            connection.sendall(command)
            assert connection.recv(100).startswith(b"-ERR only PING")
        name = lender._prefix + label(1).key.hex().encode()
        named = b"$%d\r\n%s\r\n" % (len(name), name)
        connection.sendall(b"*2\r\n$6\r\nSTRLEN\r\n" + named)
        length = int(connection.recv(100)[1:])
        connection.sendall(b"*4\r\n$8\r\nGETRANGE\r\n" + named + b"$1\r\n0\r\n$2\r\n-1\r\n")
        assert connection.makefile("rb").readline() == b"$%d\r\n" % length
    held = []
    ends = time.monotonic() + SECONDS
    while lender._connections and time.monotonic() < ends:
        time.sleep(0.01)
    for _ in range(lending.MOST_OF_A_PEER):
        held.append(connected(lender.address))
        held[-1].sendall(b"*1\r\n$4\r\nPING\r\n")
        assert held[-1].recv(100) == b"+PONG\r\n"
    with connected(lender.address) as one_more, suppress(ConnectionResetError):
        assert one_more.recv(100) == b""
    for connection in held:
        connection.close()


def test_a_neighbour_that_does_not_take_what_it_asked_for_is_left(
    open_neighbour: Callable[..., Neighbour], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "SEND_SECONDS", 0.2)
    lender = open_neighbour(1).lender
    name = lender._prefix + label(1).key.hex().encode()
    command = b"*4\r\n$8\r\nGETRANGE\r\n$%d\r\n%b\r\n$1\r\n0\r\n$2\r\n-1\r\n" % (len(name), name)
    with connected(lender.address) as connection:
        with suppress(OSError):
            connection.sendall(command * 5000)  # 25 MB of answers, which are not read
        ends = time.monotonic() + SECONDS
        while lender._connections:
            assert time.monotonic() < ends
            time.sleep(0.01)


def test_options_that_make_no_sense_are_refused() -> None:
    given: dict[str, Any] = {"kv_neighbours": "0.0.0.0:9400", "kv_remote_secret": SECRET, "kv_demotion": "all"}
    EngineConfig(**given)
    for changes, message in (
        ({"kv_remote_secret": None}, "needs kv_remote_secret, which is not given"),
        ({"kv_demotion": "on_evict"}, "needs kv_demotion 'all' .* got 'on_evict'"),
        ({"kv_neighbours": "9400"}, "must be HOST:PORT, such as 10.0.0.7:8000, got '9400'"),
        ({"kv_neighbours": "h:99999"}, "must be HOST:PORT"),
        ({"tensor_parallel_size": 2}, "kv_neighbours would store one rank's share"),
    ):
        with pytest.raises(ConfigError, match=message):
            EngineConfig(**{**given, **changes})


def test_an_address_in_use_is_an_error(open_neighbour: Callable[..., Neighbour]) -> None:
    address = open_neighbour().lender.address
    with pytest.raises(ConfigError, match=f"kv_neighbours: cannot listen at {address}: .*in use"):
        Lender(address, open_neighbour().host, lambda slot: memoryview(b""), FINGERPRINT, SECRET)
