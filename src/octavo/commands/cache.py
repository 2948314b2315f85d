"""`octavo cache`: inspect, verify or delete the directory of `--kv-disk`."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

DESCRIPTION = "Inspect, verify or delete the prefixes that `octavo serve --kv-disk DIR` has stored."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=["info", "verify", "purge"],
        help="info: list the models, their blocks and whose they are; verify: also read every block; "
        "exit code 1 if one is damaged; purge: delete all",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory of `octavo serve --kv-disk`")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")


def run(args: argparse.Namespace) -> int:
    from octavo.tiers.base import Reason
    from octavo.tiers.slabs import lock_holder, model_folders

    if not args.directory.is_dir():
        raise ConfigError(f"{args.directory} is not a directory")
    try:
        holder = lock_holder(args.directory)
        if args.action == "purge":
            return _purge(args.directory, holder)
        models = [_look(folder, prove=args.action == "verify") for folder in model_folders(args.directory)]
    except OSError as error:
        raise ConfigError(f"cannot use {args.directory}: {error.strerror} ({error.filename})") from error
    for model in models:
        named = model["model"] or "a model of unknown name"
        print(f"{model['fingerprint']}  {named}: {model['blocks']} blocks, {model['bytes'] / 2**20:.1f} MiB of slabs")
        for tenant, size in sorted(model["bytes_by_tenant"].items(), key=lambda entry: -entry[1]):
            print(f"  of {tenant or 'no tenant'}: {size / 2**20:.1f} MiB")
        if model["damaged"]:
            print("  misses: " + ", ".join(f"{count} {reason}" for reason, count in sorted(model["damaged"].items())))
            if Reason.LAYOUT in model["damaged"]:
                print("  layout: written by another version of Octavo; given up when room is needed")
    if not models:
        print(f"{args.directory} has no blocks")
    if holder is not None:
        print(f"in use by {holder}: blocks that it is writing now count as misses")
    if args.json:
        print(json.dumps({"directory": str(args.directory), "in_use_by": holder, "models": models}))
    return int(args.action == "verify" and any(model["damaged"] for model in models))


def _look(folder: Path, *, prove: bool) -> dict[str, Any]:
    from octavo.tiers.base import Reason
    from octavo.tiers.slabs import read_tenant_names, stored_blocks

    blocks, damaged, by_tenant = 0, dict[str, int](), dict[str, int]()
    names = read_tenant_names(folder)
    for header, whole in stored_blocks(folder, prove=prove):
        if isinstance(header, Reason) or not whole:
            reason = header if isinstance(header, Reason) else Reason.CHECKSUM
            damaged[reason.value] = damaged.get(reason.value, 0) + 1
            continue
        blocks += 1
        tenant = names.get(header.tenant, header.tenant.hex())
        by_tenant[tenant] = by_tenant.get(tenant, 0) + header.length
    try:
        described = json.loads((folder / "model.json").read_text())
    except (OSError, ValueError):
        described = {}
    name = described.get("model") if isinstance(described, dict) else None
    size = sum(path.stat().st_size for path in folder.glob("slab-*.kv"))
    return {
        "fingerprint": folder.name,
        "model": name,
        "blocks": blocks,
        "bytes": size,
        "bytes_by_tenant": by_tenant,
        "damaged": damaged,
    }


def _purge(directory: Path, holder: str | None) -> int:
    from octavo.tiers.slabs import model_folders

    if holder is not None:
        raise ConfigError(f"{directory} is in use by {holder}: stop it first")
    for folder in model_folders(directory):
        shutil.rmtree(folder)
        print(f"removed {folder}")
    return 0
