"""GuideLLM as a load client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import MODEL, URL, check, run_all

REQUESTS = 12


@check("guidellm benchmark, four streams at once")
def load() -> str:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(str(Path(sys.executable).with_name("guidellm")), "run"),
            *("--backend", f"kind=openai_http,target={URL},model={MODEL}"),
            *("--profile", "kind=concurrent,streams=4"),
            *("--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--tokenizer", f"kind=huggingface_auto,model={os.environ['OCTAVO_TOKENIZER']}"),
            *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
            *("--output", f"kind=json,path={folder}/report.json", "--disable-console"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, (done.stderr or done.stdout)[-1500:]
        report = json.loads(Path(folder, "report.json").read_text())
    totals = report["benchmarks"][0]["metrics"]["request_totals"]
    assert totals["successful"] == REQUESTS, totals
    assert totals["errored"] == 0, totals
    return f"{totals['successful']} requests, none failed"


run_all()
