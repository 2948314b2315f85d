"""MkDocs hooks of the documentation site: generated pages, and links that also hold in a checkout.

- Reference pages: Python from `octavo.__all__` by mkdocstrings, the command line from its parser, HTTP from OpenAPI.
- `benchmarks/results` and the project's own papers become pages where they lie.
- A page links to files as they lie in the repository. Here such a link leads to the file's page if the site has one,
  and otherwise becomes plain text; a link to a file that does not exist is a warning, which fails a strict build.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

RESULTS = "benchmarks/results"
PAPERS = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "ROADMAP.md": "project/roadmap.md",
    "SECURITY.md": "project/security.md",
    "benchmarks/README.md": "results/index.md",
}
PYTHON_REFERENCE, HTTP_REFERENCE, CLI_REFERENCE = "reference/python.md", "reference/http.md", "reference/cli.md"
# The README's place is taken by the site's first page.
_LINKED = {"README.md": "index.md", "docs": "index.md", RESULTS: "results/index.md"}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCED = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)

log = logging.getLogger("mkdocs.hooks.docs_site")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the navigation's generated parts."""
    commands = [path for path, _ in _cli_pages()]
    filled = {
        "Reference": [PYTHON_REFERENCE, HTTP_REFERENCE, {"Command line": [CLI_REFERENCE, *commands]}],
        "Results": ["results/index.md", *_results_nav()],
    }
    for section in config.nav or []:
        ((title, pages),) = section.items()
        pages += filled.get(title, [])
        if title == "Internals":
            pages += [page for page in PAPERS.values() if page.startswith("project/")]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and the repository's own."""
    for path, text in [
        (PYTHON_REFERENCE, _python_page()),
        (HTTP_REFERENCE, _http_page()),
        (CLI_REFERENCE, _cli_index()),
        *_cli_pages(),
    ]:
        files.append(File.generated(config, path, content=text))
    for path in _repository_files():
        files.append(File.generated(config, _site_path(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where the files of the repository are on the site."""
    here = _repository_path(page.file)
    if here is None:
        return markdown
    parts = _FENCED.split(markdown)
    parts[::2] = [_LINK.sub(lambda link: _led(link, here, page.file.src_uri), part) for part in parts[::2]]
    return "".join(parts)


def _led(link: re.Match[str], here: str, page: str) -> str:
    """Return a link of the repository's file `here` as it is on the page."""
    mark, text, target = link.groups()
    path, hash_sign, anchor = target.partition("#")
    if "://" in target or not path:
        return link[0]
    wanted = os.path.normpath(os.path.join(os.path.dirname(here), path))
    if not (ROOT / wanted).exists():
        log.warning("%s: there is no %s", here, wanted)
    site = _site_path(wanted)
    if site is None:
        return text
    return f"{mark}[{text}]({os.path.relpath(site, os.path.dirname(page))}{hash_sign}{anchor})"


def _site_path(path: str) -> str | None:
    """Return where a file of the repository is on the site; None if it is not there."""
    if path in PAPERS or path in _LINKED:
        return PAPERS.get(path) or _LINKED[path]
    if path.startswith(f"{RESULTS}/") and path.endswith((".md", ".png")):
        return f"results{path.removeprefix(RESULTS)}"
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def _repository_path(file: File) -> str | None:
    """Return where a page lies in the repository; None if it is generated."""
    if file.generated_by is None:
        return f"docs/{file.src_uri}"
    return os.path.relpath(file.abs_src_path, ROOT) if file.abs_src_path else None


def _repository_files() -> list[str]:
    """Return the repository's papers, and its results with their pictures."""
    results = (path for path in (ROOT / RESULTS).rglob("*") if path.suffix in (".md", ".png"))
    return [*PAPERS, *sorted(str(path.relative_to(ROOT)) for path in results)]


def _results_nav() -> list[Any]:
    """Return the results' pages: those of no machine first, then a section for each."""
    sections: dict[str, list[str]] = {}
    for path in _repository_files():
        page = PurePosixPath(_site_path(path) or "")
        if page.suffix == ".md" and page.parts[0] == "results" and page.name != "index.md":
            sections.setdefault(page.parent.name, []).append(str(page))
    general = sections.pop("results", [])
    return [*general, *({name: pages} for name, pages in sections.items())]


def _python_page() -> str:
    """Return the page of the public names, which mkdocstrings describes from their docstrings."""
    import octavo

    names = sorted(
        set(octavo.__all__) - {"__version__"}, key=lambda name: (name not in ("LLM", "SamplingParams"), name)
    )
    modules = {name: octavo._LAZY[name] for name in names}
    entries = "\n\n".join(f"::: {module}.{name}" for name, module in modules.items())
    return f"# Python\n\nEvery name below is imported from `octavo`: `from octavo import LLM`.\n\n{entries}\n"


def _cli_parser() -> argparse.ArgumentParser:
    os.environ["COLUMNS"] = "100"
    from octavo.cli import build_parser
    from octavo.commands.base import load_commands

    parser = build_parser()
    load_commands(parser)
    return parser


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    subparsers = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return next((dict(action.choices) for action in subparsers), {})


def _cli_index() -> str:
    from octavo.commands import COMMANDS

    rows = "\n".join(f"| [`octavo {name}`](cli/{name}.md) | {summary} |" for name, summary in COMMANDS.items())
    return f"# Command line\n\n| command | what it does |\n|---|---|\n{rows}\n\nEach has `--help`.\n"


def _cli_pages() -> list[tuple[str, str]]:
    """Return path and text of each command's page, those of its own commands on it."""
    return [(f"reference/cli/{name}.md", _command(parser)) for name, parser in _commands(_cli_parser()).items()]


def _command(parser: argparse.ArgumentParser, level: int = 1) -> str:
    sections = [f"{'#' * level} {parser.prog}", _markdown(parser.description or "")]
    if (usage := parser.format_usage().removeprefix("usage: ").strip()) and not _commands(parser):
        sections.append(f"```text\n{usage}\n```")
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.help is not argparse.SUPPRESS]
        actions = [action for action in actions if not isinstance(action, argparse._SubParsersAction)]
        if [action.dest for action in actions] in ([], ["help"]):
            continue
        sections += [f"**{(group.title or 'options').capitalize()}**", _markdown(group.description or "")]
        sections.append(
            "| argument | meaning |\n|---|---|\n" + "\n".join(_argument(parser, action) for action in actions)
        )
    sections += [_command(child, level + 1) for child in _commands(parser).values()]
    return "\n\n".join(section for section in sections if section) + "\n"


def _argument(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return a row: how an argument is written, and its help."""
    formatter = parser._get_formatter()
    written = formatter._format_action_invocation(action)
    return f"| {_cell(f'`{written}`')} | {_cell(_escaped(formatter._expand_help(action)))} |"


def _http_page() -> str:
    """Return the page of all endpoints, from the description at /openapi.json."""
    description = _openapi()
    rows, sections = [], []
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            name = f"`{method.upper()} {path}`"
            rows.append(f"| {name} | {operation['summary']} |")
            if "requestBody" in operation:
                sections.append(_endpoint(name, path, operation, description["components"]["schemas"]))
    return "\n".join(
        [
            "# HTTP",
            "",
            "A running server shows this reference at `/docs`, and its source at `/openapi.json`, with its own limits;",
            "here, they are the defaults, for a model of 8,192 tokens. What differs from the APIs' originals:",
            "[Coming from vLLM, llama.cpp or Ollama](../serve/coming_from.md).",
            "",
            "| endpoint | |",
            "|---|---|",
            *rows,
            "",
            *sections,
        ]
    )


def _endpoint(name: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    content = operation["requestBody"]["content"]["application/json"]
    body = schemas[content["schema"]["$ref"].rpartition("/")[2]]
    required = set(body.get("required", ()))
    fields = "\n".join(
        f"| `{field}`{' (required)' if field in required else ''} | {_cell(_schema(schema))} | {_default(schema)} |"
        for field, schema in body["properties"].items()
    )
    example = json.dumps(content["example"], indent=2, ensure_ascii=False)
    return (
        f"## {name}\n\n{operation['summary']}.\n\n"
        f"```sh\ncurl http://127.0.0.1:8000{path} -H 'Content-Type: application/json' -d '{example}'\n```\n\n"
        f"| field | type and range | default |\n|---|---|---|\n{fields}\n"
    )


def _openapi() -> dict[str, Any]:
    """Return the description of a server with default options; no engine is started."""
    from octavo.engine.inspection import EngineInfo
    from octavo.pooling import Pooling
    from octavo.request_limits import RequestLimits
    from octavo.server.app import create_app
    from octavo.server.bodies.fields import Served
    from octavo.server.openapi import describe

    limits = RequestLimits()
    info = EngineInfo("smollm2", "llama", 0, 8192, 256, 49152, 576, Pooling.LAST, limits, {})
    app: Any = create_app(SimpleNamespace(info=info, tokenizer=None))  # type: ignore[arg-type]
    server = Served(limits, info.max_model_len, info.vocab_size, info.hidden_size)
    return describe("", server, app.state.endpoints)


def _schema(schema: dict[str, Any]) -> str:
    """Return a field's type and range in words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_schema(one) for one in schema["anyOf"]))
    if "$ref" in schema:
        return "object"
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")]))
    kind = str(schema.get("type", "any"))
    if kind == "array" and "items" in schema:
        kind = f"array of {_schema(schema['items'])}"
    return " ".join([kind, *_range(schema)])


def _range(schema: dict[str, Any]) -> Iterator[str]:
    words = {
        "minimum": "≥ {}",
        "exclusiveMinimum": "> {}",
        "maximum": "≤ {}",
        "exclusiveMaximum": "< {}",
        "minLength": "of {} or more characters",
        "maxLength": "of at most {} characters",
        "minItems": "with {} or more items",
        "maxItems": "with at most {} items",
    }
    yield from (text.format(f"{schema[name]:,}") for name, text in words.items() if name in schema)


def _default(schema: dict[str, Any]) -> str:
    default = schema.get("default")
    return "" if default is None else f"`{json.dumps(default)}`"


def _markdown(text: str) -> str:
    """Return a command's description as paragraphs."""
    return "\n\n".join(" ".join(_escaped(part).split()) for part in text.strip().split("\n\n"))


def _escaped(text: str) -> str:
    """Return plain text of a help message for Markdown: flags as code, and code between backticks as it is."""
    parts = re.split(r"(`[^`]*`)", text)
    for index in range(0, len(parts), 2):
        plain = re.sub(r"([\\*_<>\[\]#])", r"\\\1", parts[index])
        parts[index] = re.sub(r"(?<![\w-])(--[a-z](?:[a-z-]*[a-z])?)", r"`\1`", plain)
    return "".join(parts)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
