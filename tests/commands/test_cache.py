"""`octavo cache` says what lies on disk, whether it is whole, and removes it."""

from __future__ import annotations

import json
from pathlib import Path

from octavo.tiers.store import Store
from tests.commands.conftest import OctavoCommand
from tests.tiers.stores import BLOCK_BYTES, FINGERPRINT, disk, put


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
    at = medium._payload_at(1)
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
    assert "holds no blocks" in octavo_command("cache", "info", str(tmp_path))[1]


def test_what_is_no_directory_is_refused_and_what_is_not_the_caches_is_left_alone(
    octavo_command: OctavoCommand, tmp_path: Path
) -> None:
    code, _, err = octavo_command("cache", "info", str(tmp_path / "none"))
    assert code != 0
    assert "is not a directory" in err
    (tmp_path / "photos").mkdir()
    assert octavo_command("cache", "purge", str(tmp_path))[0] == 0
    assert (tmp_path / "photos").is_dir()
