"""`make install` is a no-op until something that it installs has changed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parents[1] / "Makefile"

pytestmark = [pytest.mark.integration, pytest.mark.skipif(shutil.which("make") is None, reason="needs make")]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with the real Makefile and a `.venv/bin/python` that installs nothing."""
    shutil.copy(MAKEFILE, tmp_path)
    for name in ("pyproject.toml", "constraints.txt", "src/octavo/bench.py", "csrc/module.cpp"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    return tmp_path


def installs(project: Path) -> bool:
    ran = subprocess.run(["make", "install"], cwd=project, capture_output=True, text=True, check=True, timeout=600)
    return "pip install" in ran.stdout


def test_a_second_make_installs_nothing(project: Path) -> None:
    assert installs(project)
    assert not installs(project)


def test_a_module_that_becomes_a_package_is_installed_again(project: Path) -> None:
    installs(project)
    module = project / "src" / "octavo" / "bench.py"
    module.unlink()
    package = project / "src" / "octavo" / "bench"
    package.mkdir()
    (package / "__init__.py").touch()
    assert installs(project)
    assert not installs(project)


def test_an_edited_module_needs_no_reinstall(project: Path) -> None:
    installs(project)
    (project / "src" / "octavo" / "bench.py").write_text("changed = True\n")
    assert not installs(project)


def test_a_build_whose_compiler_is_gone_begins_anew(project: Path) -> None:
    compiler = project / "c++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    caches = {}
    for name, path in {"kept": compiler, "lost": project / "gone"}.items():
        caches[name] = project / "build" / name / "CMakeCache.txt"
        caches[name].parent.mkdir(parents=True)
        caches[name].write_text(f"CMAKE_BUILD_TYPE:STRING=Release\nCMAKE_CXX_COMPILER:FILEPATH={path}\n")
    assert installs(project)
    assert caches["kept"].exists()
    assert not caches["lost"].parent.exists()


def test_extras_that_include_others_are_written_out() -> None:
    script = MAKEFILE.parent / "scripts" / "requirements.py"
    ran = subprocess.run([sys.executable, script, "dev"], capture_output=True, text=True, check=True)
    names = [re.split(r"[>\[;]", line)[0] for line in ran.stdout.splitlines()]
    assert {"torch", "pytest", "matplotlib", "redis", "opentelemetry-sdk"} <= set(names)
    assert "octavo" not in names
    assert len(set(names)) == len(names)
