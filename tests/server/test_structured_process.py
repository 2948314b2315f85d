"""Structured answers of a server whose model is computed by a process of its own (`ProcessExecutor`)."""

from __future__ import annotations

import gc
import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from octavo.engine import builder
from octavo.grammar.state import live_states
from octavo.runner.executor import Executor
from octavo.scheduler.plan import StepPlan, StepResult
from tests.engine.preempting import thrash
from tests.server.answers.test_structured_outputs import SCHEMA
from tests.server.conftest import wait_until
from tests.server.real_engine import RealServer, real_server
from tests.server.test_real_engine_tools import TOOL

pytestmark = pytest.mark.integration

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# So little room that sequences are swapped out and come back.
TIGHT = {"num_blocks": 160, "block_size": 4, "max_num_seqs": 16, "preemption_mode": "swap", "swap_space": "16MiB"}


class _Counting(Executor):
    """Notes how many states of grammars there are after each plan, and those of plans that only forget."""

    def __init__(self, runner: Executor, num_states: Any) -> None:
        self._runner = runner
        self._num_states = num_states

    def execute(self, plan: StepPlan) -> StepResult:
        result = self._runner.execute(plan)
        if not plan:
            gc.collect()
        self._num_states.value = len(live_states)
        return result

    def close(self) -> None:
        self._runner.close()


def build_counting_runner(num_states: Any, *given: Any) -> tuple[Executor, Any]:
    runner, facts = builder._build_runner_apart(*given)
    return _Counting(runner, num_states), facts


@pytest.fixture
def num_states() -> Any:
    return multiprocessing.get_context("spawn").Value("i", -1)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch, num_states: Any) -> Iterator[RealServer]:
    monkeypatch.setattr(builder, "_build_runner_apart", partial(build_counting_runner, num_states))
    with real_server({"tool_call_parser": "hermes"}, executor="process", **TIGHT) as server:
        thrash(server.core)
        yield server


# More than fits by itself: sixteen samples of 50 tokens take 208 of the 160 blocks, whenever they arrive.
ENDLESS = "start: /[a-z]/ start"
CROWD = (COMPLETIONS, {"prompt": "crowd", "guided_grammar": ENDLESS, "n": 16, "seed": 6, "max_tokens": 50})


def bodies() -> list[tuple[str, dict[str, Any]]]:
    formats: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"structured_outputs": {"regex": "[a-f]{20,40}-[0-9]{3}"}},
        {"structured_outputs": {"choice": ["no", "not", "none of these"]}},
        {"structured_outputs": {"grammar": 'start: "(" start ")" | "x"'}},
    ]
    calls: list[dict[str, Any]] = [
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "set_volume"}}},
    ]
    how: list[dict[str, Any]] = [
        {"temperature": 0},
        {"seed": 4, "n": 2},
        {"seed": 5, "top_p": 0.9, "stream": True},
    ]
    told = [{"role": "user", "content": "x"}]
    asked = [(COMPLETIONS, {"prompt": f"prompt {i}", **form}) for i, form in enumerate(formats)]
    asked += [(CHAT, {"messages": told, **form}) for form in (*formats[:1], *calls)]
    ways = [(each, how[(i + j) % 3]) for i, each in enumerate(asked) for j in range(2)]
    return [(path, {**body, **way, "max_tokens": 50}) for (path, body), way in ways]


def answer(server: RealServer, path: str, body: dict[str, Any]) -> Any:
    """What the choices say, whatever their ids."""
    if not body.get("stream"):
        response = httpx.post(server.url + path, json=body, timeout=60)
        assert response.status_code == 200, response.text
        return _without_ids(response.json()["choices"])
    with httpx.stream("POST", server.url + path, json=body, timeout=60) as response:
        chunks = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    # Several tokens may come in one event: only their sum is the same.
    deltas = [choice.get("delta") or {"content": choice.get("text")} for c in chunks for choice in c["choices"]]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    return [
        "".join(delta.get("content") or "" for delta in deltas),
        "".join(call.get("name", "") + call["arguments"] for call in calls),
        [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]],
    ]


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_ids(each) for name, each in value.items() if name != "id"}
    return [_without_ids(each) for each in value] if isinstance(value, list) else value


def leave_early(server: RealServer, index: int) -> None:
    """Begin an output of two endless samples, and close the connection in the middle of it."""
    body = {"prompt": "x" * index, "stream": True, "max_tokens": 200, "n": 2, "guided_grammar": 'start: "a" start'}
    with httpx.stream("POST", server.url + COMPLETIONS, json=body, timeout=60) as response:
        for number, _ in enumerate(response.iter_lines()):
            if number > 6 + index:
                return


def test_structured_answers_are_those_of_one_process_and_leave_no_grammar_behind(
    apart: RealServer, num_states: Any
) -> None:
    asked = bodies()
    with real_server({"tool_call_parser": "hermes"}) as reference:
        with ThreadPoolExecutor(len(asked)) as threads:
            expected = list(threads.map(lambda each: answer(reference, *each), asked))
        expected_crowd = answer(reference, *CROWD)
        reference.assert_nothing_runs()
    assert answer(apart, *CROWD) == expected_crowd
    assert apart.core.scheduler.counters.num_preemptions > 0
    with ThreadPoolExecutor(len(asked) + 4) as threads:
        leaving = [threads.submit(leave_early, apart, i) for i in range(1, 5)]
        found = list(threads.map(lambda each: answer(apart, *each), asked))
        for each in leaving:
            each.result()
    assert found == expected
    too_complex = {
        "prompt": "x",
        "max_tokens": 150,
        "guided_grammar": 'start: "[" s "]"\ns: "a" | s s s s | s s s | s s',
    }
    (letter,) = apart.post("/tokenize", {"prompt": "a", "add_special_tokens": False}).json()["tokens"]
    response = apart.post(COMPLETIONS, {**too_complex, "logit_bias": {str(letter): 100}})
    assert response.json()["error"]["code"] == "grammar_too_complex", response.text
    apart.assert_nothing_runs()
    wait_until(lambda: num_states.value == 0)
