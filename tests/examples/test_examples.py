"""The scripts in examples/ run as they are written, and show what they say they show."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import running_server
from tests.server.fake_engine import FakeEngine
from tests.server.real_engine import real_server

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs `main` of examples/NAME.py with the given arguments; returns what it prints."""

    def run(name: str, *arguments: Any) -> str:
        runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](*map(str, arguments))
        return capsys.readouterr().out

    return run


def test_every_example_has_a_test() -> None:
    tested = {name.removeprefix("test_").removesuffix("_runs") for name in globals() if name.endswith("_runs")}
    assert tested == {path.stem for path in EXAMPLES.glob("*.py")}


def test_generate_runs(example: Callable[..., str], tiny_llama: Path) -> None:
    assert example("generate", tiny_llama).count(" -> ") == 3


def test_stream_chat_runs(example: Callable[..., str]) -> None:
    with running_server(FakeEngine(), shutdown_timeout=0) as server:
        printed = example("stream_chat", server.url, server.engine.info.model_name)
    assert re.search(r"\[\d+ prompt tokens, 64 completion tokens\]", printed)


def test_shared_prefix_runs(example: Callable[..., str]) -> None:
    cached = [int(line.split()[0]) for line in example("shared_prefix").splitlines()]
    assert cached[0] == 0
    assert min(cached[1:]) > 100


def test_samples_and_beams_runs(example: Callable[..., str], tiny_llama: Path) -> None:
    assert example("samples_and_beams", tiny_llama).count("log-probability") == 4 + 2 + 2


def test_live_page_runs(example: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "client, another")
    with real_server(num_blocks=257) as server:
        assert server.client.get("/v1/models").status_code == 401
        printed = example("live_page", server.url, 0)
        server.assert_nothing_runs()
    figures = re.findall(r"(\d+) of (\d+) prompt tokens came from the cache, (\d+) evictions", printed)
    first, sharing, samples, others, too_late, preempted = (tuple(map(int, scene)) for scene in figures)
    assert first == (0, 100, 0)
    assert sharing == (3 * 96, 303, 0)
    assert samples == (0, 72, 0)
    assert others[0] == 0
    assert others[2] > 100
    assert too_late[0] == 0
    assert preempted[:2] == (0, 3000)


def test_live_page_says_that_it_has_no_key(example: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_API_KEY", raising=False)
    with (
        running_server(FakeEngine(), shutdown_timeout=0, api_key=["client"]) as server,
        pytest.raises(httpx.HTTPStatusError, match="401 Unauthorized"),
    ):
        example("live_page", server.url, 0)


def test_pins_runs(example: Callable[..., str]) -> None:
    pinned, kept = (int(number) for number in re.findall(r"(\d+) of \d+ (?:prompt )?tokens", example("pins")))
    assert 0 < pinned <= kept


def test_plan_memory_runs(example: Callable[..., str]) -> None:
    assert "327,680 bytes a token, 343.6 GB" in example("plan_memory")
