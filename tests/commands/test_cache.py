"""`octavo cache` says what lies on disk, whether it is whole, and removes it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from pathlib import Path
from typing import NoReturn

import pytest

from octavo.tiers.base import LAYOUT_VERSION
from octavo.tiers.store import Store
from tests.commands.conftest import OctavoCommand
from tests.tiers.stores import BLOCK_BYTES, FINGERPRINT, disk, fill, make_read_only, overwrite, put, slab


def test_blocks_are_counted_proven_and_removed(octavo_command: OctavoCommand, tmp_path: Path) -> None:
    store = Store(disk(tmp_path))
    put(store, 1, 2)
    put(store, 3, tenant="ada")
    code, _, err = octavo_command("cache", "purge", str(tmp_path))
    assert code != 0
    assert "in use by process" in err
    store.close()
    code, out, _ = octavo_command("cache", "info", str(tmp_path), "--json")
    (model,) = json.loads(out.splitlines()[-1])["models"]
    assert (code, model["fingerprint"], model["blocks"], model["damaged"]) == (0, FINGERPRINT.hex(), 3, {})
    assert model["bytes_by_tenant"] == {"": 2 * BLOCK_BYTES, "ada": BLOCK_BYTES}
    assert "of ada: 0.0 MiB" in out
    medium = disk(tmp_path)
    _, at, _ = medium._place(1)
    medium.close()
    slab = next(tmp_path.glob("*/slab-*.kv"))
    with slab.open("r+b") as file:
        file.seek(at)
        file.write(b"torn")
    assert octavo_command("cache", "info", str(tmp_path))[0] == 0
    code, out, _ = octavo_command("cache", "verify", str(tmp_path))
    assert code == 1
    assert "2 blocks" in out
    assert "1 checksum" in out
    assert octavo_command("cache", "purge", str(tmp_path))[0] == 0
    assert "has no blocks" in octavo_command("cache", "info", str(tmp_path))[1]


def test_what_is_no_directory_is_refused_and_what_is_not_the_caches_is_left_alone(
    octavo_command: OctavoCommand, tmp_path: Path
) -> None:
    code, _, err = octavo_command("cache", "info", str(tmp_path / "none"))
    assert code != 0
    assert "is not a directory" in err
    (tmp_path / "photos").mkdir()
    assert octavo_command("cache", "purge", str(tmp_path))[0] == 0
    assert (tmp_path / "photos").is_dir()


def test_a_directory_on_a_read_only_disk_is_read_and_not_purged(
    octavo_command: OctavoCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, 0, 1)
    make_read_only(monkeypatch)
    code, out, _ = octavo_command("cache", "verify", str(tmp_path))
    assert code == 0
    assert "2 blocks" in out
    monkeypatch.setattr(shutil, "rmtree", os.unlink)
    code, _, err = octavo_command("cache", "purge", str(tmp_path))
    assert code == 1
    assert "cannot use" in err
    assert "Read-only file system" in err


def test_a_directory_of_somebody_else_is_an_error_of_one_line(
    octavo_command: OctavoCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, 0)

    def refuse(path: Path, *_: object) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "open", refuse)
    code, _, err = octavo_command("cache", "info", str(tmp_path))
    assert code == 1
    assert f"cannot use {tmp_path}: Permission denied ({tmp_path / 'LOCK'})" in err


def test_blocks_of_another_version_are_named_and_only_verify_counts_them_as_damage(
    octavo_command: OctavoCommand, tmp_path: Path
) -> None:
    fill(tmp_path, 0)
    overwrite(slab(tmp_path), 8, struct.pack("<I", LAYOUT_VERSION + 1))
    code, out, _ = octavo_command("cache", "info", str(tmp_path))
    assert code == 0
    assert "1 layout" in out
    assert "another version of Octavo" in out
    assert octavo_command("cache", "verify", str(tmp_path))[0] == 1
