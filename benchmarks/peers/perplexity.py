"""Perplexity of a GGUF file: as Octavo multiplies it, dequantised to float32, and in llama.cpp, on the same tokens.

    PEERS_HOME=… .venv/bin/python benchmarks/peers/perplexity.py FILE.gguf … [--tokens 1024] [--peer-tokens 128]

llama.cpp's server has no perplexity: it is asked for the logprobs of all tokens after each prefix in turn, which takes
long, so its perplexity is of the first `--peer-tokens`, and Octavo's of these is beside it.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import time
from pathlib import Path

import httpx

from octavo import LLM, SamplingParams
from octavo.workloads.quality import english

SERVER = Path(os.environ.get("PEERS_HOME", Path.home() / ".cache" / "peers")) / "llamacpp" / "bin" / "llama-server"


def octavo_logprobs(path: str, num_tokens: int, **options: str) -> tuple[list[int], list[float]]:
    """Return the first tokens of the text, and the logprob of each but the first."""
    with LLM(path, device="cpu", kv_cache_memory="512MiB", max_model_len=num_tokens + 1, **options) as llm:
        ids = llm.tokenizer.encode(english()[: num_tokens * 8])[:num_tokens]
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        (output,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        return ids, [step.logprob for step in output.prompt_logprobs if step]


def llamacpp_logprobs(path: str, ids: list[int], port: int) -> list[float]:
    """Return the logprob of each token but the first; a server is started for it."""
    argv = [str(SERVER), "-m", path, "--port", str(port), "-t", "2", "-np", "1", "-c", str(len(ids) + 8)]
    server = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
            for _ in range(600):
                try:
                    if client.get("/health").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.2)
            found = []
            for end in range(1, len(ids)):
                body = {"prompt": ids[:end], "n_predict": 1, "temperature": 1.0, "n_probs": 1 << 20}
                (step,) = client.post("/completion", json=body).json()["completion_probabilities"]
                found.append(next(x["logprob"] for x in step["top_logprobs"] if x["id"] == ids[end]))
            return found
    finally:
        server.terminate()
        server.wait()


def perplexity(logprobs: list[float]) -> float:
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--peer-tokens", type=int, default=128, help="0: without llama.cpp")
    parser.add_argument("--port", type=int, default=8098)
    args = parser.parse_args()
    print("| file | Octavo | dequantised | ratio | of the first: Octavo | llama.cpp | ratio |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for path in args.files:
        ids, ours = octavo_logprobs(path, args.tokens)
        _, exact = octavo_logprobs(path, args.tokens, quantization="none", dtype="float32")
        row = [perplexity(ours), perplexity(exact)]
        cells = [f"{row[0]:.4f}", f"{row[1]:.4f}", f"{row[0] / row[1]:.4f}"]
        if args.peer_tokens:
            first = perplexity(ours[: args.peer_tokens - 1])
            peer = perplexity(llamacpp_logprobs(path, ids[: args.peer_tokens], args.port))
            cells += [f"{first:.4f}", f"{peer:.4f}", f"{first / peer:.4f}"]
        print("| " + " | ".join([Path(path).stem, *cells]) + " |", flush=True)


if __name__ == "__main__":
    main()
