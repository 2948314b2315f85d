"""Perplexity of a GGUF file: as Octavo multiplies it, dequantised to float32, and in llama.cpp, on the same tokens.

    PEERS_HOME=… .venv/bin/python benchmarks/peers/perplexity.py FILE.gguf … [--tokens 1024] [--no-peer]

Beside it, the divergence (KL) of both from the dequantised file, in thousandths of a nat a token, over its 100 most
likely tokens and all others together. llama.cpp's server has no perplexity: it is asked for the logprobs of the next
token after each prefix in turn. Kernels that multiply prompts in bfloat16 (level amx) do not round activations to int8,
as decoding does: run with OCTAVO_ISA=avx512_bf16 to measure that.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch

from octavo import LLM, kernels
from octavo.workloads.quality import english, next_token_log_probs

SERVER = Path(os.environ.get("PEERS_HOME", Path.home() / ".cache" / "peers")) / "llamacpp" / "bin" / "llama-server"
LISTED = 2000  # of a vocabulary; a token beyond them is asked for again
COMPARED = 100


def octavo_logprobs(path: str, num_tokens: int, **options: str) -> tuple[list[int], torch.Tensor]:
    """Return the first tokens of the text, and the logprobs [tokens - 1, vocab] of what follows each but the last."""
    with LLM(path, device="cpu", kv_cache_memory="512MiB", max_model_len=num_tokens + 1, **options) as llm:
        ids = llm.tokenizer.encode(english()[: num_tokens * 8])[:num_tokens]
        return ids, next_token_log_probs(llm.core.runner, ids)[: num_tokens - 1].double()


@contextmanager
def serving(path: str, length: int, port: int) -> Iterator[httpx.Client]:
    argv = [str(SERVER), "-m", path, "--port", str(port), "-t", "1", "-np", "1", "-c", str(length + 8)]
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
            yield client
    finally:
        server.terminate()
        server.wait()


def llamacpp_logprobs(path: str, ids: list[int], vocab_size: int, port: int) -> torch.Tensor:
    """Return what `octavo_logprobs` does, with -inf for tokens that are not listed."""
    found = torch.full((len(ids) - 1, vocab_size), -torch.inf, dtype=torch.float64)
    with serving(path, len(ids), port) as client:
        for end in range(1, len(ids)):
            for count in (LISTED, vocab_size):
                body = {"prompt": ids[:end], "n_predict": 1, "temperature": 1.0, "n_probs": count}
                (step,) = client.post("/completion", json=body).json()["completion_probabilities"]
                for one in step["top_logprobs"]:
                    found[end - 1, one["id"]] = one["logprob"]
                if found[end - 1, ids[end]] > -torch.inf:
                    break
    return found


def divergence(exact: torch.Tensor, found: torch.Tensor) -> float:
    """Return the mean KL divergence of rows of logprobs, in nats, over the likely tokens and all others together."""
    likely = exact.topk(COMPARED).indices

    def distribution(logprobs: torch.Tensor) -> torch.Tensor:
        chosen = logprobs.gather(1, likely).exp()
        return torch.cat([chosen, (1 - chosen.sum(1, keepdim=True)).clamp(min=1e-12)], 1).clamp(min=1e-12)

    p, q = distribution(exact), distribution(found)
    return float((p * (p / q).log()).sum(1).mean())


def ratio(a: torch.Tensor, b: torch.Tensor) -> str:
    """Return the ratio of the perplexities of two texts' logprobs, with the standard error of it."""
    difference = b - a
    mean, error = difference.mean(), difference.std() / len(difference) ** 0.5
    return f"{mean.exp():.4f} ± {error:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--no-peer", action="store_true", help="without llama.cpp")
    parser.add_argument("--port", type=int, default=8098)
    args = parser.parse_args()
    print(f"{args.tokens} tokens, level {kernels.isa()}\n")
    print("| file | Octavo | / dequantised | KL | llama.cpp | / dequantised | KL | Octavo / llama.cpp |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for path in args.files:
        ids, ours = octavo_logprobs(path, args.tokens)
        _, exact = octavo_logprobs(path, args.tokens, quantization="none", dtype="float32")
        following = torch.tensor(ids[1:])[:, None]

        def of_text(logprobs: torch.Tensor, following: torch.Tensor = following) -> torch.Tensor:
            return logprobs.gather(1, following)[:, 0]

        cells = []
        several = [ours] if args.no_peer else [ours, llamacpp_logprobs(path, ids, ours.shape[1], args.port)]
        for found in several:
            text = of_text(found)
            cells += [f"{(-text.mean()).exp():.4f}", ratio(text, of_text(exact))]
            cells.append(f"{1e3 * divergence(exact, found):.2f}")
        if len(several) == 2:
            cells.append(ratio(of_text(ours), of_text(several[1])))
        print("| " + " | ".join([Path(path).stem, *cells]) + " |", flush=True)


if __name__ == "__main__":
    main()
