"""The form of the C++ sources; what they do is tested through `octavo.kernels` and by `make test-native`."""

from __future__ import annotations

from pathlib import Path

SOURCES = sorted(
    path for path in (Path(__file__).parents[1] / "csrc").rglob("*") if path.suffix in {".h", ".cpp", ".inl"}
)


def test_no_line_is_longer_than_120_columns() -> None:
    long = [
        f"{path.name}:{number}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 120
    ]
    assert SOURCES
    assert long == []


def test_every_header_is_included_once_and_none_inside_a_namespace() -> None:
    for path in SOURCES:
        lines = path.read_text().splitlines()
        assert path.suffix != ".h" or "#pragma once" in lines, path
        spaces = [number for number, line in enumerate(lines) if line.startswith("namespace ")]
        includes = [number for number, line in enumerate(lines) if line.startswith("#include") and ".inc" not in line]
        assert not spaces or not includes or max(includes) < min(spaces), path
