"""Schemathesis: valid and invalid requests generated from /openapi.json, whose answers must conform to it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import URL, check, run_all

# 400 is a correct answer to fields that are wrong only in combination, and to an invalid grammar: a JSON Schema cannot
# express these. Everything else that the schema calls valid must be accepted.
CONFIG = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "3xx", "400", "401", "403", "404", "409", "429"]
"""
ADMIN = "^/(metrics|debug|reset)"
OPENAI, OLLAMA = "^/v1/", "^/api/"
SECONDS = 3600


def run(key: str, *paths: str) -> str:
    """Test the operations of some paths; return what the report says. Ends after `SECONDS` on any machine."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "schemathesis.toml")
        config.write_text(CONFIG)
        command = [
            *(str(Path(sys.executable).with_name("st")), "--config-file", str(config), "run", f"{URL}/openapi.json"),
            *("--mode", "all", "--max-examples", "15", "--phases", "examples,coverage,fuzzing", "--no-color"),
            *("--header", f"Authorization: Bearer {key}", "--request-timeout", "30", "--warnings", "off"),
            *("--continue-on-failure", *paths),
        ]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=SECONDS)
    sys.stderr.write(done.stdout)
    assert done.returncode == 0, done.stdout[-1500:]
    requests = re.search(r"(\d+) generated", done.stdout)
    operations = re.search(r"(\d+) selected", done.stdout)
    return f"{operations and operations[1]} operations, {requests and requests[1]} requests, nothing found"


@check("schemathesis, OpenAI's and Anthropic's API, valid and invalid requests")
def openai() -> str:
    return run(os.environ["OCTAVO_KEY"], "--include-path-regex", OPENAI)


@check("schemathesis, Ollama's API, valid and invalid requests")
def ollama() -> str:
    return run(os.environ["OCTAVO_KEY"], "--include-path-regex", OLLAMA)


@check("schemathesis, what else clients use, valid and invalid requests")
def others() -> str:
    return run(os.environ["OCTAVO_KEY"], "--exclude-path-regex", f"{OPENAI}|{OLLAMA}|{ADMIN}")


@check("schemathesis, what only an admin may use")
def admin() -> str:
    return run(os.environ["OCTAVO_ADMIN"], "--include-path-regex", ADMIN)


run_all()
