"""Documents lead to files that exist, and name every command."""

from __future__ import annotations

import re
from pathlib import Path

from octavo.commands import COMMANDS

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path
    for place in (ROOT, ROOT / "docs", ROOT / "deploy", ROOT / "examples", ROOT / "benchmarks")
    for path in (place.glob("*.md") if place == ROOT else place.rglob("*.md"))
)
_LINK = re.compile(r"\]\(([^)\s#]+)")
_RESULT = re.compile(r"benchmarks/results/[\w/.-]+\.(?:md|json|png)\b")


def test_links_lead_to_files_that_exist() -> None:
    missing = [
        f"{document.relative_to(ROOT)}: {target}"
        for document in DOCUMENTS
        for target in _LINK.findall(document.read_text())
        if "://" not in target and not (document.parent / target).exists()
    ]
    assert not missing


def test_results_that_the_code_refers_to_exist() -> None:
    sources = [path for place in ("src", "csrc", "docs", "tests") for path in (ROOT / place).rglob("*.*")]
    missing = [
        f"{path.relative_to(ROOT)}: {result}"
        for path in sources
        if path.suffix in (".py", ".h", ".cpp", ".md")
        for result in _RESULT.findall(path.read_text())
        if not (ROOT / result).exists()
    ]
    assert not missing


def test_the_readme_names_every_command() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [command for command in COMMANDS if f"| `octavo {command}" not in readme] == []
