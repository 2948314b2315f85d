"""A model's speed on this CPU next to the machine's limits, and to llama.cpp's if `llama-bench` is installed."""

from __future__ import annotations

import json
import logging
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from octavo import LLM
from octavo.checkpoint.model_source import load_model_config, model_of
from octavo.errors import ModelError
from octavo.planner.sources import shape_of_source
from octavo.workloads import latency
from octavo.workloads.workload import BenchRequest

logger = logging.getLogger(__name__)

STREAMS = 8
PROMPT_TOKENS = 512
_OUTPUT_TOKENS = 32
_RUNS = 3
_END_TOKEN_ID = 30000


@dataclass(frozen=True, slots=True)
class Score:
    """The speed of one model with `threads` threads, medians of three runs.

    Attributes:
        decode_tokens_s: of one stream.
        weights_gb_s: 10^9 bytes of weights per second that one stream reads: of a mixture, of the experts that a token
            uses, and of an embedding only what is the head too, by their shares of the parameters.
        streams_tokens_s: of `STREAMS` streams together.
        prompt_tokens_s: of one prompt of `PROMPT_TOKENS` tokens, or as many as the model takes.
        prompt_gop_s: 10^9 operations per second and thread of the prompt's products with weights; a multiply-add counts
            as two. None where the model's parameters cannot be counted.
        llamacpp_decode_tokens_s, llamacpp_prompt_tokens_s: of llama.cpp on the same file; None without.
    """

    model: str
    threads: int
    decode_tokens_s: float
    weights_gb_s: float
    streams_tokens_s: float
    prompt_tokens_s: float
    prompt_gop_s: float | None
    llamacpp_decode_tokens_s: float | None
    llamacpp_prompt_tokens_s: float | None


def score(model: str, threads: int) -> Score:
    """Measure one model.

    Raises:
        OctavoError: it cannot be loaded.
    """
    with LLM(model, device="cpu", num_threads=threads, max_num_seqs=STREAMS, max_model_len=None) as llm:
        source = model_of(llm.config)
        end = min(_END_TOKEN_ID, llm.info.vocab_size)

        def measure(count: int, prompt: int, output: int) -> Sequence[latency.LatencyRun]:
            requests = [BenchRequest([(7 * i + j) % end for j in range(prompt)], output) for i in range(count)]
            return latency.measure(llm, requests, _RUNS)

        one = latency.rates(measure(1, _OUTPUT_TOKENS, _OUTPUT_TOKENS), 1, 1, llm.info.weight_bytes)
        gb_s = one["weights_gb_s"]
        several = latency.rates(measure(STREAMS, _OUTPUT_TOKENS, _OUTPUT_TOKENS), 1, STREAMS, llm.info.weight_bytes)
        prompt = min(PROMPT_TOKENS, llm.info.max_model_len - 1)
        seconds = statistics.median(run.prefill for run in measure(1, prompt, 1))
    try:
        shape = shape_of_source(source, load_model_config(source))
        # One row of logits: the prompt is hardly multiplied with the head.
        multiplied = shape.active_parameters - shape.parameters.embedding - shape.parameters.head
        embedding = shape.parameters.embedding if shape.parameters.head else 0
        gb_s *= (shape.active_parameters - embedding) / shape.parameters.total
        gop_s = round(2 * multiplied * prompt / seconds / threads / 1e9, 1)
    except ModelError:
        gop_s = None
    return Score(
        model,
        threads,
        one["decode_tokens_s"],
        round(gb_s, 1),
        several["decode_tokens_s"],
        round(prompt / seconds, 1),
        gop_s,
        *_llamacpp(str(source.path), threads, prompt),
    )


def _llamacpp(path: str, threads: int, prompt: int) -> tuple[float | None, float | None]:
    """Return llama.cpp's decode and prompt tokens per second by its own benchmark, if it is on the PATH."""
    if (program := shutil.which("llama-bench")) is None or not path.endswith(".gguf"):
        return None, None
    argv = [program, "-m", path, "-t", str(threads), "-p", str(prompt), "-n", str(_OUTPUT_TOKENS)]
    done = subprocess.run([*argv, "-r", str(_RUNS), "-o", "json"], capture_output=True, text=True, check=False)
    if done.returncode:
        logger.warning("llama-bench failed: %s", done.stderr.strip()[-200:])
        return None, None
    speeds = {bool(test["n_gen"]): round(test["avg_ts"], 1) for test in json.loads(done.stdout)}
    return speeds.get(True), speeds.get(False)
