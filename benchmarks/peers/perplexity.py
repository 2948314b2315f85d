"""Perplexity of a GGUF file: as Octavo multiplies it, dequantised to float32, and in llama.cpp, on the same tokens.

    PEERS_HOME=… .venv/bin/python benchmarks/peers/perplexity.py FILE.gguf … [--windows 4] [--tokens 2048] [--no-peer]

Windows of English text, spread evenly over it. The table has perplexities; their ratios to the dequantised file's, with
the standard error of the difference token by token; and the divergence (KL) from it, in thousandths of a nat a token.
Rows are computed 16 at a time. Kernels that multiply 32 rows and more in bfloat16 (level amx) are not measured by that:
they do not round activations.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

from octavo import LLM, kernels
from octavo.workloads.forward_text import english, logits_of_chunks

PEER = Path(os.environ.get("PEERS_HOME", Path.home() / ".cache" / "peers")) / "llamacpp" / "bin" / "llamacpp_logits"
ROWS = 16

Windows = list[list[int]]


def tokenised(path: str, num_windows: int, num_tokens: int) -> Windows:
    with LLM(path, device="cpu", kv_cache_memory="64MiB", max_model_len=64) as llm:
        ids = llm.tokenizer.encode(english())
        # Models that are trained with BOS need it in each window.
        first = ids[:1] if ids[0] == llm.tokenizer.bos_token_id else []
    last = len(ids) - num_tokens - 1
    starts = [last * i // max(1, num_windows - 1) for i in range(num_windows)]
    return [first + ids[start + len(first) : start + num_tokens + 1] for start in starts]


def octavo_logprobs(path: str, windows: Windows, **options: str) -> Iterator[torch.Tensor]:
    """Yield the logprobs float32 [tokens, vocab] of what follows each token of a window."""
    with LLM(path, device="cpu", kv_cache_memory="512MiB", max_model_len=len(windows[0]), **options) as llm:
        runner = llm.core.runner
        for window in windows:
            chunks = logits_of_chunks(runner.model, runner.arena, runner.attention, window[:-1], chunk=ROWS)
            yield torch.cat([chunk.log_softmax(1) for chunk in chunks])


def llamacpp_logprobs(path: str, windows: Windows) -> Iterator[torch.Tensor]:
    for window in windows:
        ids = torch.tensor(window[:-1], dtype=torch.int32).numpy().tobytes()
        logits = subprocess.run([PEER, path], input=ids, stdout=subprocess.PIPE, check=True).stdout
        yield torch.frombuffer(bytearray(logits), dtype=torch.float32).view(len(window) - 1, -1).log_softmax(1)


class Compared:
    """One engine's distributions, compared with the dequantised file's."""

    def __init__(self) -> None:
        self.text: list[torch.Tensor] = []  # logprobs of the text
        self.kl: list[torch.Tensor] = []

    def add(self, window: list[int], exact: torch.Tensor, found: torch.Tensor) -> None:
        following = torch.tensor(window[1:])[:, None]
        self.text.append(found.gather(1, following)[:, 0].double())
        for p, q in zip(exact.split(64), found.split(64), strict=True):
            self.kl.append((p.double().exp() * (p.double() - q.double())).sum(1) * 1e3)


def with_error(values: torch.Tensor) -> tuple[float, float]:
    return float(values.mean()), float(values.std() / len(values) ** 0.5)


def ratio(a: Compared, b: Compared) -> str:
    """Return the ratio of the perplexities of two engines, with its standard error."""
    mean, error = with_error(torch.cat(b.text) - torch.cat(a.text))
    return f"{torch.tensor(mean).exp():.4f} ± {error:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048, help="of a window")
    parser.add_argument("--no-peer", action="store_true", help="without llama.cpp")
    args = parser.parse_args()
    print(f"{args.windows} windows of {args.tokens} tokens, level {kernels.isa()}\n")
    print("| file | Octavo | / dequantised | KL | llama.cpp | / dequantised | KL | Octavo / llama.cpp |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for path in args.files:
        windows = tokenised(path, args.windows, args.tokens)
        found = [octavo_logprobs(path, windows)] + ([] if args.no_peer else [llamacpp_logprobs(path, windows)])
        reference, engines = Compared(), [Compared() for _ in found]
        exact = octavo_logprobs(path, windows, quantization="none", dtype="float32")
        for window, expected, *others in zip(windows, exact, *found, strict=True):
            reference.add(window, expected, expected)
            for engine, logprobs in zip(engines, others, strict=True):
                engine.add(window, expected, logprobs)
        cells = []
        for engine in engines:
            mean, error = with_error(torch.cat(engine.kl))
            perplexity = (-torch.cat(engine.text).mean()).exp()
            cells += [f"{perplexity:.4f}", ratio(engine, reference), f"{mean:.3f} ± {error:.3f}"]
        if len(engines) == 2:
            cells.append(ratio(*engines))
        print("| " + " | ".join([Path(path).stem, *cells]) + " |", flush=True)


if __name__ == "__main__":
    main()
