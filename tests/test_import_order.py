"""Every import follows the rules of docs/internals/architecture.md, section "Layers".

The rules are read from that document; the imports, those inside functions too, from the syntax tree of every module. So
are the names of classes and types, of which no two modules have the same.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import octavo

SOURCE = Path(octavo.__file__).parent

DRAWING = Path(__file__).parents[1] / "docs" / "internals" / "architecture.md"
HEAVY = {"torch", "transformers"}
WEB = {"starlette", "uvicorn", "pydantic", "prometheus_client", "fastapi"}


class Rules(NamedTuple):
    """A room is named as in an import: `kvcache` for `kvcache/`, `errors` for `errors.py`."""

    lines: list[list[str]]  # rooms side by side, each line above those it may import
    without_torch: set[str]
    highest_without_web: str
    web_exceptions: set[str]  # modules

    @property
    def line_of(self) -> dict[str, int]:
        return {room: number for number, rooms in enumerate(self.lines) for room in rooms}


def read_rules(document: str) -> Rules:
    section = document.split("\n## Layers\n")[1].split("\n## ")[0]
    drawing = [re.split(r" {2,}", line[4:])[0] for line in section.splitlines() if line.startswith("    ")]
    bullets = [" ".join(bullet.split()) for bullet in section.split("\n- ")[1:]]
    no_torch = next(bullet for bullet in bullets if bullet.startswith("No torch, directly or indirectly: "))
    no_web = next(bullet for bullet in bullets if bullet.startswith("No web framework: "))
    highest, *exceptions = _names(no_web)
    return Rules(
        lines=[[_name(path) for path in line.split(" | ")] for line in drawing],
        without_torch=set(_names(no_torch)),
        highest_without_web=highest,
        web_exceptions={f"octavo.{name}" for name in exceptions},
    )


def _names(text: str) -> list[str]:
    return [_name(path) for path in re.findall(r"`([^`]+)`", text)]


def _name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/").replace("/", ".")


RULES = read_rules(DRAWING.read_text())
LINE_OF = RULES.line_of


class Import(NamedTuple):
    """`target` is a module of octavo's where it is one, else the top-level package."""

    module: str
    line: int
    target: str
    at_runtime: bool  # False under TYPE_CHECKING


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    paths = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@cache
def imports(module: str) -> tuple[Import, ...]:
    return tuple(_walk(module, ast.parse(modules()[module].read_text()), at_runtime=True))


def _walk(module: str, node: ast.AST, *, at_runtime: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            for target in _targets(child):
                yield Import(module, child.lineno, target, at_runtime)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for statement in child.body:
                yield from _walk(module, ast.Module([statement], []), at_runtime=False)
            for statement in child.orelse:
                yield from _walk(module, ast.Module([statement], []), at_runtime=at_runtime)
        else:
            yield from _walk(module, child, at_runtime=at_runtime)


def _targets(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [_module(alias.name) for alias in node.names]
    assert node.level == 0, "relative imports are banned"
    return [_module(f"{node.module}.{alias.name}") for alias in node.names]


def _module(name: str) -> str:
    """The module that importing `name` reaches: `octavo.llm` for `octavo.LLM`, "torch" for `torch.nn`."""
    if not name.startswith("octavo"):
        return name.split(".")[0]
    while name not in modules():
        parent, _, last = name.rpartition(".")
        name = octavo._LAZY.get(last, parent) if parent == "octavo" else parent
    return name


def test_the_drawing_has_every_room_and_no_other() -> None:
    assert {room(module) for module in modules()} - {""} == set(LINE_OF)


def test_a_room_imports_only_what_stands_below_it() -> None:
    upward = [
        f"{i.module}:{i.line} imports {i.target}"
        for module in modules()
        if (name := room(module))
        for i in imports(module)
        if room(i.target) not in ("", name) and LINE_OF[room(i.target)] <= LINE_OF[name]
    ]
    assert not upward


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {m: {i.target for i in imports(m) if i.target in modules()} - {m, "octavo"} for m in modules()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_no_folders_of_a_room_import_each_other_in_a_circle() -> None:
    folders = {".".join(module.split(".")[:-1]) for module in modules()}

    def place(module: str, room: str) -> str:
        """The folder directly inside the room that holds the module, or the module itself."""
        inside = ".".join(module.split(".")[: room.count(".") + 2])
        return inside if inside in folders else module

    for folder in folders - {"", "octavo"}:
        graph: dict[str, set[str]] = {}
        for module in modules():
            if module.startswith(f"{folder}."):
                targets = {place(i.target, folder) for i in imports(module) if i.target.startswith(f"{folder}.")}
                own = place(module, folder)
                graph.setdefault(own, set()).update(targets - {own})
        TopologicalSorter(graph).prepare()


DRAWN = [m for m, path in modules().items() if path.name == "__init__.py" and "this drawing" in path.read_text()]


def test_some_folders_are_drawn() -> None:
    assert {"octavo.scheduler", "octavo.tiers"} <= set(DRAWN)


@pytest.mark.parametrize("folder", DRAWN)
def test_a_folders_drawing_has_every_module_above_those_it_imports(folder: str) -> None:
    inside = {m.removeprefix(f"{folder}."): m for m in modules() if m.startswith(f"{folder}.")}
    docstring = ast.get_docstring(ast.parse(modules()[folder].read_text())) or ""
    drawn = re.findall(r"^([a-z_]+(?: \| [a-z_]+)*)(?: {2}.*)?$", docstring, re.MULTILINE)
    lines = [line.split(" | ") for line in drawn]
    line_of = {name: number for number, line in enumerate(lines) for name in line}
    assert sorted(name for line in lines for name in line) == sorted(inside)
    upward = [
        f"{i.module}:{i.line} imports {i.target}"
        for name, module in inside.items()
        for i in imports(module)
        if (target := i.target.removeprefix(f"{folder}.")) in inside and line_of[target] <= line_of[name]
    ]
    assert not upward


def reached(running: set[str]) -> dict[str, Import]:
    """Every module and outer package that running these modules imports, each with one import that does so."""
    found: dict[str, Import] = {}
    pending = [*running]
    while pending:
        for i in imports(pending.pop()):
            if i.at_runtime and i.target not in found:
                found[i.target] = i
                if i.target in modules():
                    pending.append(i.target)
    return found


def test_bookkeeping_reaches_no_torch() -> None:
    found = reached({module for module in modules() if room(module) in RULES.without_torch})
    assert not [found[name] for name in HEAVY & set(found)]


def test_the_engine_and_what_is_below_reach_no_web_framework() -> None:
    highest = LINE_OF[RULES.highest_without_web]
    found = reached({m for m in modules() if room(m) and LINE_OF[room(m)] >= highest} - RULES.web_exceptions)
    assert not [found[name] for name in (WEB | RULES.web_exceptions) & set(found)]


def modules_loaded_by(statement: str, depth: int = 1) -> set[str]:
    """Return the modules that a statement loads, each by its first `depth` names."""
    code = f"import sys\n{statement}\nprint(*sorted({{'.'.join(name.split('.')[:{depth}]) for name in sys.modules}}))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    return set(ran.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import octavo",
        "import octavo.cli",
        "import octavo.planner.calculator, octavo.planner.deployment",
    ],
)
def test_what_needs_no_model_starts_without_torch_and_numpy(statement: str) -> None:
    assert not (HEAVY | WEB | {"numpy"}) & modules_loaded_by(statement)


def test_bookkeeping_starts_without_torch() -> None:
    assert not (HEAVY | WEB) & modules_loaded_by("import octavo.scheduler.scheduler, octavo.kvcache.manager")


@pytest.mark.slow
def test_a_process_that_reads_bodies_starts_without_the_engine_and_torch() -> None:
    loaded = modules_loaded_by("import octavo.server.bodies.reader_pool", depth=3)
    assert not (HEAVY | {"octavo.engine.core", "octavo.scheduler.scheduler", "octavo.kvcache.manager"}) & loaded


@pytest.mark.slow
def test_a_native_model_is_loaded_without_transformers_and_without_a_web_framework() -> None:
    loaded = modules_loaded_by("import octavo.llm, octavo.engine.builder")
    assert not (WEB | {"transformers"}) & loaded
    assert "torch" in loaded


def type_names(tree: ast.Module) -> Iterator[str]:
    """The classes of a module, and names that it gives to types: `Pair = tuple[int, int]`."""
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript()) if name.lstrip("_")[:2].istitle():
                yield name


@pytest.mark.slow
def test_no_two_types_have_one_name() -> None:
    where = defaultdict(list)
    for module, path in modules().items():
        for name in type_names(ast.parse(path.read_text())):
            where[name].append(module)
    assert {name: found for name, found in where.items() if len(found) > 1} == {}
