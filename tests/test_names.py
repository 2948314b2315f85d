"""Classes and named types of the package have names of their own, so that a name says what is meant."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import octavo

SOURCE = Path(octavo.__file__).parent


def type_names(tree: ast.Module) -> Iterator[str]:
    """The classes of a module, and names that it gives to types: `Pair = tuple[int, int]`."""
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript()) if name.lstrip("_")[:2].istitle():
                yield name


def test_names_of_types_are_found() -> None:
    code = "class A: ...\nPair = tuple[int, int]\n_Own = list[int]\nLIMITS = x[1]\nfirst = x[0]\nOther = A()"
    assert list(type_names(ast.parse(code))) == ["A", "Pair", "_Own"]


def test_no_two_types_have_one_name() -> None:
    modules = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for name in type_names(ast.parse(path.read_text())):
            modules[name].append(str(path.relative_to(SOURCE)))
    assert {name: where for name, where in modules.items() if len(where) > 1} == {}
