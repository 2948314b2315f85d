"""What every store promises, whatever it lies on."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from octavo.kvcache.hashing import Label
from octavo.tiers.base import Medium, Reason, Work
from octavo.tiers.store import Store
from tests.tiers.stores import BLOCK_BYTES, MEDIA, SECONDS, get, label, payload, put, remote


@pytest.fixture(params=[*sorted(MEDIA), "remote", "remote_signed"])
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Medium:
    if request.param not in MEDIA:
        secret = "a secret of the tests" if request.param == "remote_signed" else None
        return remote(request.getfixturevalue("redis_server").url, secret=secret)
    return MEDIA[request.param](tmp_path)


@pytest.fixture
def store(medium: Medium) -> Iterator[Store]:
    store = Store(medium)
    yield store
    store.close()


def test_what_was_stored_is_loaded_to_the_last_byte(store: Store) -> None:
    assert put(store, 1, 2, 3) == [None] * 3
    outcomes, buffers = get(store, [label(n) for n in (3, 1, 2)])
    assert outcomes == [None] * 3
    assert buffers == [payload(3), payload(1), payload(2)]
    assert (store.counters.read.blocks, store.counters.write.blocks) == (3, 3)
    assert store.counters.read.bytes == 3 * BLOCK_BYTES
    assert store.counters.read.by_tenant == store.counters.write.by_tenant == {"": 3 * BLOCK_BYTES}
    assert sum(store.counters.read.latency) == 1


def test_what_is_not_there_is_a_miss_and_counted(store: Store) -> None:
    assert store.lookup(label(1).key) is not True
    assert get(store, [label(1)])[0] == [Reason.ABSENT]
    assert store.counters.read.misses == {Reason.ABSENT: 1}


def test_a_stored_key_is_looked_up(store: Store) -> None:
    put(store, 1)
    assert store.lookup(label(1).key) is not False


def test_a_block_under_its_key_but_after_another_prefix_is_a_miss(store: Store) -> None:
    put(store, 1)
    assert get(store, [label(1, parent=9)])[0] == [Reason.LABEL]
    assert get(store, [label(1)._replace(tokens=b"other")])[0] == [Reason.LABEL]


def test_storing_a_key_twice_changes_nothing(store: Store) -> None:
    assert put(store, 1, 1) == [None, None]
    assert get(store, [label(1)])[1] == [payload(1)]


def test_a_closed_store_misses_and_may_be_closed_again(store: Store) -> None:
    put(store, 1)
    store.close()
    store.close()
    assert store.lookup(label(1).key) is False
    assert get(store, [label(1)])[0] == [Reason.CLOSED]
    assert put(store, 2) == [Reason.CLOSED]


class Held(Medium):
    """A medium that does nothing until it is let, then what it is told to."""

    name = "held"

    def __init__(self) -> None:
        self.go = threading.Event()
        self.error: BaseException | None = None
        self.num_reads = 0

    def contains(self, key: bytes) -> bool | None:
        return True

    def read(self, labels: Sequence[Label], buffers: Sequence[memoryview]) -> list[Reason | None]:
        assert self.go.wait(SECONDS)
        self.num_reads += len(buffers)
        if self.error is not None:
            raise self.error
        return [None] * len(buffers)

    def write(self, label: Label, payload: memoryview, tenant: str) -> Reason | None:
        self.read([label], [payload])
        return None

    def close(self) -> None:
        return


def test_what_is_cancelled_or_late_before_it_begins_is_not_read() -> None:
    medium, now = Held(), [0.0]
    store = Store(medium, num_threads=1, clock=lambda: now[0])
    first = store.get([label(0)], [memoryview(bytearray(8))], 10.0)
    cancelled = store.get([label(1)], [memoryview(bytearray(8))], 10.0)
    late = store.get([label(2)], [memoryview(bytearray(8))], 10.0)
    cancelled.cancel()
    assert not late.done
    now[0] = 11.0
    medium.go.set()
    assert late.wait(SECONDS)
    assert first.outcomes[0] in (None, Reason.LATE)
    assert (cancelled.outcomes, late.outcomes) == ([Reason.CANCELLED], [Reason.LATE])
    assert medium.num_reads <= 1
    store.close()


def test_a_key_that_is_being_written_is_pending() -> None:
    medium = Held()
    store = Store(medium)
    transfer = store.put(label(1), memoryview(b"x"))
    assert store.lookup(label(1).key) is None
    medium.go.set()
    assert transfer.wait(SECONDS)
    assert store.lookup(label(1).key) is True
    store.close()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.EIO, "bad sector"), Reason.IO_ERROR),
        (OSError(errno.ENOSPC, "full"), Reason.NO_SPACE),
        (RuntimeError("whatever"), Reason.IO_ERROR),
        (SystemExit(3), Reason.IO_ERROR),
    ],
)
def test_whatever_a_medium_raises_is_a_miss_and_after_some_it_is_left_alone(
    error: BaseException, reason: Reason, caplog: pytest.LogCaptureFixture
) -> None:
    medium, now = Held(), [0.0]
    medium.error = error
    medium.go.set()
    store = Store(medium, num_threads=1, most_faults=3, retry_seconds=30.0, clock=lambda: now[0])
    for _ in range(3):
        assert store.is_open
        assert get(store, [label(1)])[0] == [reason]
    assert not store.is_open
    assert "reads failed 3 times in a row" in caplog.text
    assert store.lookup(label(1).key) is False
    assert get(store, [label(1)])[0] == [Reason.CLOSED]
    assert store.num_closings == {Work.READ: 1, Work.WRITE: 0}
    now[0] = 31.0
    medium.error = None
    assert get(store, [label(1)])[0] == [None]
    store.close()


def test_faults_of_writes_stop_writes_alone() -> None:
    medium, now = Held(), [0.0]
    medium.go.set()
    store = Store(medium, num_threads=1, most_faults=3, retry_seconds=30.0, clock=lambda: now[0])
    medium.error = OSError(errno.EROFS, "read-only file system")
    for n in range(3):
        assert put(store, n) == [Reason.READ_ONLY]
        medium.error = None
        assert get(store, [label(7)])[0] == [None], "it does not count as a write that succeeds"
        medium.error = OSError(errno.EROFS, "read-only file system")
    assert (store.is_open, store.is_writable) == (True, False)
    medium.error = None
    assert (put(store, 1), get(store, [label(7)])[0]) == ([Reason.CLOSED], [None])
    assert not store.wants(label(1).key)
    assert store.lookup(label(1).key) is True
    assert store.num_closings == {Work.READ: 0, Work.WRITE: 1}
    now[0] = 31.0
    assert put(store, 1) == [None]
    store.close()


def buffer(num_bytes: int = 1) -> memoryview:
    return memoryview(bytearray(num_bytes))


def test_more_reads_than_may_wait_are_refused_at_once() -> None:
    medium = Busy()
    store = Store(medium, num_threads=1, most_waiting=2)
    store.put(label(0), buffer())
    assert medium.begun.acquire(timeout=SECONDS), "else the thread may take a read first"
    transfers = [store.get([label(n)], [buffer()], SECONDS) for n in range(3)]
    assert transfers[2].done
    assert transfers[2].outcomes == [Reason.BUSY]
    medium.go.set()
    assert transfers[1].wait(SECONDS)
    store.close()


class Busy(Medium):
    """A medium where writing takes until it is let; it notes what it did, in order."""

    name = "busy"
    must_ask = True

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = threading.Semaphore(0)
        self.closed = threading.Event()
        self.done: list[str] = []

    def contains(self, key: bytes) -> bool | None:
        return None

    def read(self, labels: Sequence[Label], buffers: Sequence[memoryview]) -> list[Reason | None]:
        self.done.append("read")
        return [None] * len(buffers)

    def ask(self, labels: Sequence[Label]) -> list[Reason | None]:
        self.done.append("ask")
        return [None] * len(labels)

    def write(self, label: Label, payload: memoryview, tenant: str) -> Reason | None:
        self.begun.release()
        assert self.go.wait(SECONDS)
        self.done.append("write")
        return None

    def close(self) -> None:
        self.done.append("close")
        self.closed.set()


def test_a_store_closed_during_a_write_closes_its_medium_after_it_and_begins_no_other() -> None:
    medium = Busy()
    store = Store(medium, num_threads=1)
    first, second = (store.put(label(number), memoryview(b"x")) for number in (1, 2))
    assert medium.begun.acquire(timeout=SECONDS)
    store.close(seconds=0)
    assert medium.done == []
    medium.go.set()
    assert medium.closed.wait(SECONDS)
    assert medium.done == ["write", "close"]
    assert (first.outcomes, second.outcomes) == ([None], [Reason.CLOSED])


def test_questions_and_reads_go_before_the_writes_that_wait() -> None:
    medium = Busy()
    store = Store(medium, num_threads=1)
    writes = [store.put(label(n), buffer()) for n in range(3)]
    assert medium.begun.acquire(timeout=SECONDS)
    read, question = store.get([label(7)], [buffer()], SECONDS), store.ask([label(8)], SECONDS)
    medium.go.set()
    assert all(transfer.wait(SECONDS) for transfer in (*writes, read, question))
    assert medium.done == ["write", "ask", "read", "write", "write"]
    store.close()


def test_however_much_is_being_written_a_thread_is_left_for_questions() -> None:
    medium = Busy()
    store = Store(medium, num_threads=2)
    writes = [store.put(label(n), buffer()) for n in range(3)]
    assert medium.begun.acquire(timeout=SECONDS)
    assert store.ask([label(8)], SECONDS).wait(SECONDS), "while a write takes its time"
    assert not any(transfer.done for transfer in writes)
    medium.go.set()
    store.close(SECONDS)
    assert all(transfer.wait(SECONDS) for transfer in writes), "closing finishes what was asked for"


def test_writes_beyond_the_bytes_that_may_wait_are_dropped_and_counted() -> None:
    medium = Busy()
    store = Store(medium, num_threads=1, most_write_bytes=100)
    first = store.put(label(0), buffer(60))
    assert medium.begun.acquire(timeout=SECONDS)
    waiting = [store.put(label(n), buffer(60)) for n in (1, 2)]
    assert store.num_write_bytes == 60
    assert waiting[1].outcomes == [Reason.BUSY]
    assert store.counters.write.misses == {Reason.BUSY: 1}
    assert store.wants(label(2).key), "it may be tried again"
    medium.go.set()
    assert all(transfer.wait(SECONDS) for transfer in (first, *waiting))
    assert store.put(label(3), buffer(500)).wait(SECONDS), "one block may always wait, however large"
    store.close()
    assert (store.counters.write.blocks, store.num_write_bytes) == (3, 0)
