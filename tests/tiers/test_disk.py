"""Slabs on disk: what is torn, flipped, swapped or another model's is a miss, and a restart finds the rest."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from octavo.config import EngineConfig
from octavo.engine.tiers import open_stores
from octavo.errors import ConfigError
from octavo.kvcache.eviction import AdaptiveEviction, FifoEviction, LruEviction, make_eviction_policy
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec, eviction_bytes
from octavo.tiers import disk as disk_module
from octavo.tiers import slabs
from octavo.tiers.base import LAYOUT_VERSION, Reason
from octavo.tiers.disk import DiskMedium
from octavo.tiers.header import HEADER_BYTES, MAGIC, make_header, tenant_digest
from octavo.tiers.slabs import ALIGNMENT, SlabLayout, most_slots
from octavo.tiers.store import Store
from tests.tiers.stores import (
    BLOCK_BYTES,
    FINGERPRINT,
    disk,
    fill,
    get,
    label,
    make_read_only,
    overwrite,
    payload,
    payload_at,
    put,
    slab,
)
from tests.traced import measured


def load(folder: Path, *numbers: int) -> list[Reason | None]:
    """After a restart; what is loaded is right."""
    store = Store(disk(folder))
    outcomes, buffers = get(store, [label(n) for n in numbers])
    for number, outcome, buffer in zip(numbers, outcomes, buffers, strict=True):
        assert outcome is not None or buffer == payload(number)
    store.close()
    return outcomes


def test_a_restart_finds_all_that_was_stored(tmp_path: Path) -> None:
    fill(tmp_path, *range(40))
    assert load(tmp_path, *range(40)) == [None] * 40


def test_slots_begin_at_multiples_of_4_kib_and_slabs_have_their_size_at_once(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    assert payload_at(tmp_path, 0) % ALIGNMENT == payload_at(tmp_path, 1) % ALIGNMENT == 0
    assert slab(tmp_path).stat().st_blocks * 512 >= slab(tmp_path).stat().st_size


@pytest.mark.parametrize("at", [0, 2500, 4999])
def test_a_flipped_bit_in_a_block_is_a_miss_and_the_slot_is_free_again(tmp_path: Path, at: int) -> None:
    fill(tmp_path, 0, 1)
    where = payload_at(tmp_path, 0) + at
    overwrite(slab(tmp_path), where, bytes([payload(0)[at] ^ 4]))
    store = Store(disk(tmp_path))
    assert get(store, [label(0), label(1)])[0] == [Reason.CHECKSUM, None]
    assert get(store, [label(0)])[0] == [Reason.ABSENT]
    assert put(store, 0) == [None]
    assert get(store, [label(0)])[1] == [payload(0)]
    store.close()


@pytest.mark.parametrize("at", range(0, HEADER_BYTES, 7))
def test_a_flipped_bit_in_a_header_is_a_miss(tmp_path: Path, at: int) -> None:
    fill(tmp_path, 0)
    with slab(tmp_path).open("rb") as file:
        file.seek(ALIGNMENT + at)
        old = file.read(1)[0]
    overwrite(slab(tmp_path), ALIGNMENT + at, bytes([old ^ 1]))
    assert load(tmp_path, 0)[0] is not None


def test_blocks_that_changed_places_are_misses(tmp_path: Path) -> None:
    fill(tmp_path, 0, 1)
    first, second = payload_at(tmp_path, 0), payload_at(tmp_path, 1)
    overwrite(slab(tmp_path), first, payload(1))
    overwrite(slab(tmp_path), second, payload(0))
    assert load(tmp_path, 0, 1) == [Reason.CHECKSUM] * 2


def test_a_header_without_its_block_is_a_miss(tmp_path: Path) -> None:
    """As a crash leaves it where the disk reorders writes."""
    fill(tmp_path, 0, 1)
    overwrite(slab(tmp_path), payload_at(tmp_path, 1) + 4096, bytes(904))
    assert load(tmp_path, 0, 1) == [None, Reason.CHECKSUM]


def test_a_slab_that_was_cut_short_is_given_up(tmp_path: Path) -> None:
    fill(tmp_path, 0, 1)
    os.truncate(slab(tmp_path), 20_000)
    assert load(tmp_path, 0, 1) == [Reason.ABSENT] * 2


def test_a_slab_cut_while_it_is_used_is_a_miss(tmp_path: Path) -> None:
    store = Store(disk(tmp_path))
    put(store, 0)
    os.truncate(slab(tmp_path), ALIGNMENT)
    assert get(store, [label(0)])[0] == [Reason.TRUNCATED]
    store.close()


def test_another_fingerprint_or_layout_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, 0)
    other = Store(disk(tmp_path, b"g" * 16))
    assert get(other, [label(0)])[0] == [Reason.ABSENT]
    other.close()
    (tmp_path / (b"f" * 16).hex()).rename(tmp_path / (b"h" * 16).hex())
    copied = Store(disk(tmp_path, b"h" * 16))
    assert get(copied, [label(0)])[0] == [Reason.ABSENT]
    copied.close()
    fill(tmp_path, 0)
    monkeypatch.setattr(slabs, "LAYOUT_VERSION", LAYOUT_VERSION + 1)
    assert load(tmp_path, 0) == [Reason.ABSENT]


def test_a_full_directory_gives_up_the_least_recently_used(tmp_path: Path) -> None:
    store = Store(disk(tmp_path, size=128 << 10), num_threads=1)
    put(store, *range(15))
    get(store, [label(0)])
    put(store, 20)
    assert get(store, [label(n) for n in (0, 1, 2, 20)])[0] == [None, Reason.ABSENT, None, None]
    assert sum(f.stat().st_size for f in tmp_path.glob("*/slab-*")) <= 128 << 10
    store.close()
    assert load(tmp_path, 0, 20) == [None, None]


def test_a_full_directory_is_not_listed_again_for_every_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(disk(tmp_path, size=128 << 10), num_threads=1)
    put(store, *range(16))
    listed: list[Path] = []

    def list_slabs(folder: Path) -> int:
        listed.append(folder)
        return 128 << 10

    monkeypatch.setattr(disk_module, "slab_bytes_in", list_slabs)
    assert put(store, *range(20, 30)) == [None] * 10
    assert not listed
    store.close()


def test_another_models_oldest_blocks_go_for_those_of_this_one(tmp_path: Path) -> None:
    fill(tmp_path, 0)
    os.utime(tmp_path / FINGERPRINT.hex(), (0, 0))
    store = Store(disk(tmp_path, b"g" * 16, size=128 << 10))
    assert put(store, 5) == [None]
    store.close()
    assert [f.name for f in tmp_path.iterdir() if f.is_dir()] == [(b"g" * 16).hex()]


def test_only_one_process_writes_to_a_directory_and_the_other_is_told_who(tmp_path: Path) -> None:
    medium = disk(tmp_path)
    with pytest.raises(ConfigError, match=rf"process {os.getpid()} of .* is already writing to .* another directory"):
        disk(tmp_path)
    medium.close()
    disk(tmp_path).close()


def test_a_disk_that_fills_up_is_a_miss_and_no_other_model_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    fill(tmp_path, 0)
    store = Store(disk(tmp_path, b"g" * 16))
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert put(store, 1, 2) == [Reason.NO_SPACE] * 2
    store.close()
    assert load(tmp_path, 0) == [None]


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "octavo-test", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("a full file system is not tested: there is no mount here")
    if mounted.returncode:
        pytest.skip(f"a full file system is not tested: only root may mount one: {mounted.stderr.strip()}")
    yield folder
    # Lazily: a test that failed may have left a file open there.
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_real_file_system_that_is_full_costs_the_oldest_blocks_and_nothing_else(small_file_system: Path) -> None:
    store = Store(disk(small_file_system, size=4 << 20))
    assert put(store, *range(200)) == [None] * 200
    outcomes, buffers = get(store, [label(n) for n in range(200)])
    store.close()
    found = [n for n, outcome in enumerate(outcomes) if outcome is None]
    assert [buffers[n] for n in found] == [payload(n) for n in found]
    assert found == [*range(200 - len(found), 200)]
    assert len(found) >= 75, "what the file system has room for"


def test_a_file_system_without_room_for_a_slab_is_used_once_it_has_some(
    small_file_system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "GROW_AGAIN_SECONDS", 0.0)
    store = Store(disk(small_file_system))
    others = small_file_system / "others"
    free = os.statvfs(small_file_system)
    others.write_bytes(bytes(free.f_bavail * free.f_frsize))
    assert put(store, 1, 2) == [Reason.NO_SPACE] * 2
    assert get(store, [label(1)])[0] == [Reason.ABSENT]
    others.unlink()
    assert put(store, 1, 2) == [None] * 2
    assert get(store, [label(1), label(2)])[1] == [payload(1), payload(2)]
    store.close()


def test_a_file_system_with_less_room_than_a_slab_gets_smaller_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay in use when larger ones are added, also after a restart."""
    reserve, room = os.posix_fallocate, 40_000

    def limited(file: int, at: int, size: int) -> None:
        if size > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(file, at, size)

    monkeypatch.setattr(os, "posix_fallocate", limited)
    store = Store(disk(tmp_path))
    assert put(store, *range(3)) == [None] * 3
    small = slab(tmp_path).stat().st_size
    assert small <= room
    room = 1 << 20
    assert put(store, *range(3, 20)) == [None] * 17
    assert {path.stat().st_size for path in tmp_path.glob("*/slab-*.kv")} == {
        small,
        SlabLayout.within(128 << 10, BLOCK_BYTES).slab_bytes,
    }
    outcomes, buffers = get(store, [label(n) for n in range(20)])
    assert (outcomes, buffers) == ([None] * 20, [payload(n) for n in range(20)])
    store.close()
    assert load(tmp_path, *range(20)) == [None] * 20


def test_a_directory_that_was_deleted_under_a_store_costs_its_oldest_blocks_and_nothing_else(tmp_path: Path) -> None:
    store = Store(disk(tmp_path / "kv"))
    assert put(store, *range(15)) == [None] * 15
    shutil.rmtree(tmp_path / "kv")
    assert put(store, 20, 21) == [None] * 2
    outcomes, buffers = get(store, [label(n) for n in (0, 1, 2, 20, 21)])
    assert outcomes == [Reason.ABSENT, Reason.ABSENT, None, None, None]
    assert buffers[2:] == [payload(n) for n in (2, 20, 21)]
    store.close()


def test_a_slab_that_cannot_be_opened_is_refused_with_what_to_do(tmp_path: Path) -> None:
    fill(tmp_path, 0)
    (path := slab(tmp_path)).unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match=r"cannot use the files in .* delete them with octavo cache purge"):
        disk(tmp_path)
    with pytest.raises(ConfigError, match="cannot use the files in"):
        disk(tmp_path)  # and nobody holds the lock


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC])
def test_a_disk_that_can_no_longer_be_written_loses_nothing_and_is_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """As after an error of the file system, which Linux then makes read-only under those who have files open."""

    def fails(*args: object) -> int:
        raise OSError(code, os.strerror(code))

    store = Store(disk(tmp_path, size=128 << 10), most_faults=3)
    assert put(store, *range(15)) == [None] * 15, "no slot is left"
    reason = Reason.READ_ONLY if code == errno.EROFS else Reason.NO_SPACE
    with monkeypatch.context() as broken:
        for call in ("pwrite", "posix_fallocate"):
            broken.setattr(os, call, fails)
        assert [put(store, n) for n in range(20, 24)] == [[reason]] * 3 + [[Reason.CLOSED]]
        outcomes, buffers = get(store, [label(n) for n in range(15)])
    assert (outcomes, buffers) == ([None] * 15, [payload(n) for n in range(15)])
    store.close()
    assert load(tmp_path, *range(15)) == [None] * 15


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_an_error_of_the_disk_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fails(*args: object) -> int:
        raise OSError(errno.EIO, "input/output error")

    store = Store(disk(tmp_path))
    put(store, 0)
    with monkeypatch.context() as broken:
        broken.setattr(os, call, fails)
        outcome = put(store, 1) if call == "pwrite" else get(store, [label(0)])[0]
        assert outcome == [Reason.IO_ERROR]
    assert get(store, [label(0)])[1] == [payload(0)]
    assert put(store, 1) == [None]
    assert get(store, [label(1)])[1] == [payload(1)]
    store.close()


def test_a_directory_that_cannot_be_written_or_a_size_below_a_block_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="kv_disk: cannot write to"):
        disk(tmp_path / "file" / "below")
    with pytest.raises(ConfigError, match="kv_disk_size is 5000 bytes, but a block on disk takes 16384"):
        DiskMedium(tmp_path, 5000, FINGERPRINT, 5000)


def test_a_size_without_a_directory_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_disk_size needs kv_disk, which is not given"):
        EngineConfig.from_options({"kv_disk_size": "1GiB"})
    assert EngineConfig().kv_disk_size == 20 << 30


@pytest.mark.slow
def test_the_disk_gives_up_slots_by_the_policy_of_the_options(tmp_path: Path) -> None:
    spec = KVCacheSpec.build([LayerKVSpec(num_kv_heads=1, key_dim=8, value_dim=8)], block_size=16, dtype="float32")
    for name, policy in (("adaptive", AdaptiveEviction), ("fifo", FifoEviction), ("lru", LruEviction)):
        config = EngineConfig(kv_disk=str(tmp_path / name), eviction_policy=name)  # type: ignore[arg-type]
        (store,) = open_stores(config, spec, bytes(16))
        try:
            assert isinstance(store.medium._pool._eviction, policy)  # type: ignore[attr-defined]
        finally:
            store.close()


def test_what_is_found_damaged_when_a_directory_is_opened_is_counted_under_its_reason(tmp_path: Path) -> None:
    fill(tmp_path, *range(20))
    first, second = sorted(tmp_path.glob("*/slab-*.kv"))
    headers = [
        b"?" * HEADER_BYTES,
        make_header(b"g" * 16, label(1), memoryview(payload(1))),
        make_header(FINGERPRINT, label(2), memoryview(payload(2))[:-1]),
        struct.pack("<8sI", MAGIC, LAYOUT_VERSION + 1).ljust(HEADER_BYTES, b"x"),
    ]
    overwrite(first, ALIGNMENT, b"".join(headers))
    os.truncate(second, 20_000)
    store = Store(disk(tmp_path))
    assert store.counters.open_misses == {
        Reason.CHECKSUM: 1,
        Reason.FINGERPRINT: 1,
        Reason.TRUNCATED: 2,  # a block, and a slab
        Reason.LAYOUT: 1,
    }
    assert get(store, [label(n) for n in range(20)])[0] == [Reason.ABSENT] * 4 + [None] * 11 + [Reason.ABSENT] * 5
    store.close()
    fill(tmp_path / "whole", *range(20))
    whole = Store(disk(tmp_path / "whole"))
    assert not whole.counters.open_misses
    whole.close()


def test_bytes_are_accounted_to_tenants_across_restarts_evictions_and_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(disk(tmp_path, size=128 << 10))
    assert put(store, *range(10), tenant="ada") == [None] * 10
    assert put(store, *range(10, 15), tenant="bob") == [None] * 5
    assert put(store, 20, 21, 22) == [None] * 3, "for ada's oldest"
    held = {"ada": 7 * BLOCK_BYTES, "bob": 5 * BLOCK_BYTES, "": 3 * BLOCK_BYTES}
    assert store.medium.bytes_by_tenant() == held
    assert store.counters.write.by_tenant == held | {"ada": 10 * BLOCK_BYTES}
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", lambda *args: 1 / 0)
        assert put(store, 30, tenant="eve") == [Reason.IO_ERROR]
    assert store.medium.bytes_by_tenant() == held
    store.close()
    again = Store(disk(tmp_path, size=128 << 10))
    assert again.medium.bytes_by_tenant() == held
    assert put(again, *range(40, 55), tenant="eve") == [None] * 15
    assert again.medium.bytes_by_tenant() == {"eve": 15 * BLOCK_BYTES}
    again.close()
    last = Store(disk(tmp_path, size=128 << 10))
    (names,) = tmp_path.glob("*/tenants.jsonl")
    assert names.read_text() == '"eve"\n', "names without blocks are forgotten"
    names.write_text("?\n3\n")
    assert get(last, [label(40)])[0] == [None], "a name is not what a block is proven by"
    last.close()
    nameless = disk(tmp_path, size=128 << 10)
    assert nameless.bytes_by_tenant() == {tenant_digest("eve").hex(): 15 * BLOCK_BYTES}
    nameless.close()


def test_a_tenants_name_that_cannot_be_written_costs_no_block(tmp_path: Path) -> None:
    store = Store(disk(tmp_path))
    (tmp_path / FINGERPRINT.hex() / "tenants.jsonl").mkdir()
    assert put(store, 1, tenant="ada") == [None]
    assert store.medium.bytes_by_tenant() == {"ada": BLOCK_BYTES}
    store.close()
    assert load(tmp_path, 1) == [None]


# Just over two thirds of a power of two, dictionaries have grown: no other number takes more for each block.
@pytest.mark.slow
@pytest.mark.parametrize(("policy", "num_slots"), [("lru", 1366), ("adaptive", 700)])
def test_the_index_of_a_full_disk_takes_no_more_memory_than_the_plan_says(
    tmp_path: Path, policy: str, num_slots: int
) -> None:
    def index(folder: str) -> DiskMedium:
        size = SlabLayout(64, num_slots).slab_bytes
        eviction = make_eviction_policy(policy)
        medium = DiskMedium(tmp_path / folder, size, FINGERPRINT, 64, eviction=eviction, slab_bytes=size)
        for number in range(num_slots * 3):
            medium.write(label(number), memoryview(bytes(64)), "ada")
        return medium

    index("first").close()
    taken, medium = measured(lambda: index("second"))
    assert medium.num_blocks == num_slots == most_slots(medium._size, 64)
    medium.close()
    assert taken <= num_slots * (slabs.INDEX_BYTES + eviction_bytes(policy)) + 24_000


def no_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_a_file_system_without_locks_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(ConfigError, match=r"no locks \(No locks available\).*a local disk"):
        disk(tmp_path)


def test_a_server_starts_on_a_full_disk_and_reads_what_lies_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, 0, 1)

    def full(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        patched.setattr(os, "pwrite", full)
        patched.setattr(os, "posix_fallocate", full)
        assert load(tmp_path, 0, 1) == [None, None]


def test_a_server_starts_on_a_read_only_disk_and_reads_what_lies_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path, *range(15), 15, 16)  # two slabs
    os.truncate(slab(tmp_path), 20_000)  # which cannot be removed
    with monkeypatch.context() as patched:
        make_read_only(patched)
        store = Store(disk(tmp_path))
        assert get(store, [label(0), label(15), label(16)])[0] == [Reason.ABSENT, None, None]
        assert put(store, 20) == [Reason.READ_ONLY]
        assert get(store, [label(15)]) == ([None], [payload(15)])
        with pytest.raises(ConfigError, match="is already writing to"):
            disk(tmp_path)
        store.close()
    assert "read-only file system: blocks are read from it" in caplog.text
    assert load(tmp_path, 15, 16) == [None, None]


def test_a_read_only_disk_without_a_store_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_read_only(monkeypatch)
    with pytest.raises(ConfigError, match=r"cannot write to .*: Read-only file system"):
        disk(tmp_path)


def test_a_file_system_that_cannot_reserve_room_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_supported(*_: object) -> NoReturn:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", not_supported)
        fill(tmp_path, 0)
    assert load(tmp_path, 0) == [None]
