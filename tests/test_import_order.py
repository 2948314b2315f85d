"""The house: what may import what, read off the syntax tree of every module, imports inside functions included."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import octavo

SOURCE = Path(octavo.__file__).parent

# Rooms line by line: each may import only what stands below it, and itself; rooms side by side do not know each other.
HOUSE = """
    __main__
    cli
    commands
    cluster
    bench
    llm server
    engine
    runner
    models sampling
    planner observe attention
    kernels
    scheduler tiers storage
    kvcache
    text
    checkpoint
    request
    config sampling_params
    errors
"""
LINES = [line.split() for line in HOUSE.strip().splitlines()]
LINE_OF = {room: number for number, rooms in enumerate(LINES) for room in rooms}

WITHOUT_TORCH = ("errors", "config", "sampling_params", "checkpoint", "request", "kvcache", "scheduler", "planner")
HEAVY = {"torch", "transformers"}
WEB = {"starlette", "uvicorn", "pydantic", "prometheus_client", "fastapi"}
# The one module below the server that speaks Prometheus' format; who keeps the figures (observe.stats) does not.
EXPORTERS = {"octavo.observe.metrics"}


class Import(NamedTuple):
    """`target` is a module of octavo's where it is one, else the top-level package."""

    module: str
    line: int
    target: str
    at_runtime: bool  # False under TYPE_CHECKING
    eager: bool  # at module level


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
    return tuple(_walk(module, ast.parse(modules()[module].read_text()), at_runtime=True, eager=True))


def _walk(module: str, node: ast.AST, *, at_runtime: bool, eager: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            for target in _targets(child):
                yield Import(module, child.lineno, target, at_runtime, eager)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for statement in child.body:
                yield from _walk(module, ast.Module([statement], []), at_runtime=False, eager=False)
            for statement in child.orelse:
                yield from _walk(module, ast.Module([statement], []), at_runtime=at_runtime, eager=eager)
        else:
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _walk(module, child, at_runtime=at_runtime, eager=eager and not inside)


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


def test_every_module_has_a_place_in_the_house() -> None:
    assert {room(module) for module in modules()} - {""} <= set(LINE_OF)


@pytest.mark.parametrize("name", sorted({room(module) for module in modules()} - {""}))
def test_a_room_imports_only_what_stands_below_it(name: str) -> None:
    upward = [
        f"{i.module}:{i.line} imports {i.target}"
        for module in modules()
        if room(module) == name
        for i in imports(module)
        if room(i.target) not in ("", name) and LINE_OF[room(i.target)] <= LINE_OF[name]
    ]
    assert not upward


def reached(module: str, *, lazily_too: bool) -> dict[str, Import]:
    """Every module and outer package that running `module` imports, each with one import that does so."""
    found: dict[str, Import] = {}
    pending = [module]
    while pending:
        for i in imports(pending.pop()):
            if i.at_runtime and (i.eager or lazily_too) and i.target not in found:
                found[i.target] = i
                if i.target in modules():
                    pending.append(i.target)
    return found


@pytest.mark.parametrize("module", [m for m in modules() if room(m) in WITHOUT_TORCH])
def test_bookkeeping_reaches_no_torch(module: str) -> None:
    assert not HEAVY & set(found := reached(module, lazily_too=True)), found


@pytest.mark.parametrize("module", [m for m in modules() if room(m) and LINE_OF[room(m)] >= LINE_OF["engine"]])
def test_the_engine_and_what_is_below_reach_no_web_framework(module: str) -> None:
    if module not in EXPORTERS:
        found = reached(module, lazily_too=True)
        assert not (WEB | EXPORTERS) & set(found), found


def modules_loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(ran.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import octavo",
        "import octavo.cli",
        "import octavo.scheduler.scheduler, octavo.kvcache.manager, octavo.planner.calculator",
    ],
)
def test_what_needs_no_model_starts_without_torch(statement: str) -> None:
    assert not (HEAVY | WEB | {"numpy"}) & modules_loaded_by(statement)


def test_a_native_model_is_loaded_without_transformers_and_without_a_web_framework() -> None:
    loaded = modules_loaded_by("import octavo.llm, octavo.engine.builder")
    assert not (WEB | {"transformers"}) & loaded
    assert "torch" in loaded
