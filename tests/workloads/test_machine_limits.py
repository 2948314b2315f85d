from __future__ import annotations

import json
from typing import Any

import pytest

from tests.commands.conftest import OctavoCommand

SMALL = ["--seconds", 0, "--dram-mib", 2, "--cache-mib", 1, "--product", 64, "--num-threads", 1]


def test_limits_are_reported_with_their_units_and_what_reached_them(octavo_command: OctavoCommand) -> None:
    code, out, _ = octavo_command("bench", "limits", *SMALL, "--json")
    assert code == 0
    result = json.loads(out.splitlines()[-1])
    units = {limit["name"]: limit["unit"] for limit in result["limits"]}
    assert units == {
        "read from DRAM": "GB/s",
        "read from cache": "GB/s",
        "bfloat16 product": "GFLOP/s",
        "float32 product": "GFLOP/s",
        "a call": "µs",
    }
    for limit in result["limits"]:
        assert limit["value"] > 0
        assert limit["how"]
        faster = limit["best"] <= limit["value"] if limit["unit"] == "µs" else limit["best"] >= limit["value"]
        assert faster


def test_without_json_there_is_a_table(octavo_command: OctavoCommand) -> None:
    code, out, _ = octavo_command("bench", "limits", *SMALL)
    assert code == 0
    assert "read from DRAM" in out


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--num-threads", 0], "must be at least 1"),
        (["--num-threads", 1025], "must be at most 1024"),
        (["--product", "x"], "must be at least 1"),
    ],
)
def test_bad_settings_are_usage_errors(octavo_command: OctavoCommand, argv: list[Any], error: str) -> None:
    code, _, err = octavo_command("bench", "limits", *argv)
    assert code == 2
    assert error in err
