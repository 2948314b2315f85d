"""An engine that is closed or dropped returns its memory at once, without waiting for the garbage collector."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.llm import LLM
from octavo.sampling_params import SamplingParams
from octavo.structured_outputs import StructuredOutputsParams
from tests.conftest import runner_of

SMALL: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1, "num_blocks": 20, "block_size": 16}


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def parts_of(llm: LLM) -> dict[str, weakref.ref[Any]]:
    runner, scheduler = runner_of(llm.core), llm.core.scheduler
    parts = {
        "model": runner.model,
        "arena": runner.arena,
        "host memory": runner.host,
        "scheduler": scheduler,
        "cache": scheduler.kv,
        "bookkeeping of blocks": scheduler.kv.blocks,
        "bookkeeping of host memory": scheduler.kv.hierarchy.host,
        "tokenizer": llm.tokenizer,
    }
    return {name: weakref.ref(part) for name, part in parts.items()}


def alive(parts: dict[str, weakref.ref[Any]]) -> list[str]:
    return [name for name, part in parts.items() if part() is not None]


def serve(llm: LLM) -> None:
    """Serve more than fits at once, so that sequences are preempted and blocks evicted."""
    prompts = [{"prompt_token_ids": [3 + i] * 40} for i in range(8)]
    llm.generate(prompts, SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True), use_tqdm=False)
    llm.generate("text", SamplingParams(max_tokens=4), use_tqdm=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"preemption_mode": "swap"},
        {"prefix_cache": "radix", "eviction_policy": "fifo", "scheduling_policy": "vtc"},
        {"kv_cache_dtype": "int8"},
        {"attention_backend": "reference"},
    ],
    ids=str,
)
@pytest.mark.usefixtures("no_collector")
def test_a_dropped_engine_is_freed_at_once(tiny_llama: Path, options: dict[str, Any]) -> None:
    llm = LLM(str(tiny_llama), **SMALL, **options)
    serve(llm)
    parts = parts_of(llm)
    del llm
    assert alive(parts) == []


@pytest.mark.usefixtures("no_collector")
def test_a_closed_engine_with_a_store_is_freed_at_once(tiny_llama: Path, tmp_path: Path) -> None:
    llm = LLM(str(tiny_llama), **SMALL, kv_disk=str(tmp_path), kv_disk_size="4MiB", kv_host_memory="1MiB")
    serve(llm)
    parts = parts_of(llm)
    llm.close()
    del llm
    assert alive(parts) == []


@pytest.mark.usefixtures("no_collector")
def test_closing_frees_model_and_cache_even_if_the_engine_is_kept(tiny_llama: Path) -> None:
    llm = LLM(str(tiny_llama), **SMALL)
    serve(llm)
    parts = parts_of(llm)
    llm.close()
    assert not {"model", "arena", "host memory"} & set(alive(parts))
    llm.core.scheduler.kv.audit()
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.generate("text")
    llm.close()


def test_an_engines_threads_end_when_it_is_closed(tiny_llama: Path, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    options = {"kv_disk": str(tmp_path), "kv_disk_size": "4MiB", "kv_host_memory": "1MiB"}
    # A busy machine may take long over any grammar.
    llm = LLM(str(tiny_llama), **SMALL, **options, limits={"max_grammar_ms": 600_000})
    serve(llm)
    params = SamplingParams(max_tokens=3, structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
    llm.generate("text", params, use_tqdm=False)
    llm.close()
    deadline = time.monotonic() + 60
    while left := [thread.name for thread in set(threading.enumerate()) - before if "octavo" in thread.name]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
