"""Engines for tests: small, quick to make, and held to account when their test is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.kvcache.block import BlockState

MakeLLM = Callable[..., Any]


def assert_idle(core: EngineCore) -> None:
    """Nothing waits, nothing runs, nobody holds a block, and every count is right."""
    scheduler = core.scheduler
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.request_ids) == (0, 0, [])
    audit = scheduler.kv.audit()
    assert BlockState.ACTIVE not in audit.counts
    assert audit.num_sequences == 0
    assert not scheduler.kv._holdings, "a finished sequence is remembered"
    assert not core._processor._tracked, "a finished request is remembered"


@pytest.fixture(scope="session")
def load_once() -> Callable[[EngineConfig], Any]:
    """The builder's loading step, remembering its last few models."""
    import torch

    from octavo.engine import builder

    load = builder._load

    @lru_cache(maxsize=4)
    def cached(model: str, dtype: Any, backend: Any) -> Any:
        config = EngineConfig(model=model, dtype=dtype, attention_backend=backend)
        return load(config, torch.device("cpu"))

    return lambda config: cached(
        config.model, config.dtype, "reference" if config.attention_backend == "reference" else "auto"
    )


@pytest.fixture
def make_llm(monkeypatch: pytest.MonkeyPatch, load_once: Callable[[EngineConfig], Any]) -> Iterator[MakeLLM]:
    """Makes `LLM`s in float32 on one thread, loading each model once; at the end of the test each must be idle."""
    import torch

    from octavo.engine import builder
    from octavo.llm import LLM

    monkeypatch.setattr(builder, "_load", lambda config, device: load_once(config))
    made: list[LLM] = []

    def make(model: Path | str, **options: Any) -> LLM:
        # A second thread would only wait: these models are tiny, or the machine is busy with other tests.
        small = {"dtype": "float32", "device": "cpu", "num_threads": 1, "kv_cache_memory": "64MiB"}
        made.append(LLM(str(model), **{**small, **options}))
        return made[-1]

    threads = torch.get_num_threads()
    yield make
    torch.set_num_threads(threads)
    for llm in made:
        assert_idle(llm.core)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers, 320 tokens, 256 positions, with a tokenizer and a chat template."""
    from tests.models.tiny import write_hf_model

    folder = tmp_path_factory.mktemp("tiny_llama")
    write_hf_model(folder, "Llama", tokenizer=True)
    return folder


@pytest.fixture(scope="session")
def tiny_mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a Mistral with a sliding window of nine tokens."""
    from tests.models.tiny import write_hf_model

    folder = tmp_path_factory.mktemp("tiny_mistral")
    write_hf_model(folder, "Mistral", tokenizer=True, sliding_window=9)
    return folder
