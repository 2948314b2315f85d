"""Reading bodies: the same result wherever it happens, and a large one that goes wrong hurts nobody else."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import resource
import signal
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from octavo import helper_process
from octavo.checkpoint.model_source import resolve_model
from octavo.errors import ContextLengthError, RequestError
from octavo.request_limits import DEFAULT_LIMITS
from octavo.server.bodies import reader_pool
from octavo.server.bodies.body_reader import BodyReader, frame
from octavo.server.bodies.reader_pool import (
    LARGE_NICENESS,
    MANY_PARTS,
    MEDIUM_BODY,
    NUM_WORKERS,
    SMALL_BODY,
    ReaderPool,
)
from octavo.server.errors import BODY_TOO_LARGE, MODEL_MISSING, ApiError, to_api_error
from octavo.text.chat_template import MAX_RENDERED
from tests.engine.tiny_engine import tiny_model
from tests.server.bodies.slow_tokenizer import SlowTokenizer
from tests.server.conftest import KeptPool
from tests.server.fake_engine import VOCAB_SIZE, ByteTokenizer


class PartsKept(ReaderPool):
    """Reads nothing, and returns the parts of the body as they came."""

    def _read(self, method: str, parts: tuple[bytes, ...], *, is_niced: bool = False) -> Any:
        return parts


def reading(
    seconds: float = 120.0,
    max_model_len: int = 500_000,
    memory: int = 2**30,
    pool: type[ReaderPool] = KeptPool,
    template: str = "",
) -> ReaderPool:
    reader = BodyReader(
        tokenizer=SlowTokenizer(template),
        vocab_size=VOCAB_SIZE,
        hidden_size=4,
        max_model_len=max_model_len,
        limits=DEFAULT_LIMITS,
        names=("fake",),
    )
    return pool(reader, seconds, memory)


def chat(template: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": template}]}


def read(bodies: ReaderPool, body: dict[str, Any], method: str = "completion") -> Any:
    return asyncio.run(bodies.read(method, json.dumps(body).encode()))


@pytest.mark.slow
@pytest.mark.parametrize("size", [10, SMALL_BODY, MEDIUM_BODY])
def test_a_body_is_read_alike_inline_in_a_thread_and_in_a_process(size: int) -> None:
    body = {"prompt": "x" * size, "echo": True, "stop": ["a"], "n": 2, "cache_salt": "s", "user": "u"}
    found = read(reading(), body)
    assert list(found.prompts[0].token_ids) == SlowTokenizer().encode("x" * size)
    assert found.prompts[0].text == "x" * size
    assert (found.params.n, found.params.stop, found.model, found.cache_salt) == (2, ("a",), "fake", "s")
    assert (found.body.echo, found.body.prompt, found.body.sampling) == (True, None, {"n": 2})


@pytest.mark.slow
def test_the_first_body_is_read_by_the_process_that_was_started_ahead() -> None:
    reader_pool.start_ahead(resolve_model(str(tiny_model())))
    (ahead,) = reader_pool._started_ahead
    bodies = reading(pool=ReaderPool)
    read_by = read(bodies, {"prompt": "pid", "n": 1, "unknown": "x" * MEDIUM_BODY, "add_special_tokens": False})
    assert list(read_by.prompts[0].token_ids) == ByteTokenizer().encode(str(ahead.pid), False)
    assert not reader_pool._started_ahead


@pytest.mark.slow
def test_a_process_that_was_started_ahead_and_has_ended_is_replaced() -> None:
    reader_pool.start_ahead(resolve_model(str(tiny_model())))
    os.kill(reader_pool._started_ahead[0].pid, signal.SIGKILL)
    reader_pool._started_ahead[0].wait()
    assert len(read(reading(pool=ReaderPool), {"prompt": "x" * MEDIUM_BODY}).prompts[0].token_ids) == MEDIUM_BODY + 1


@pytest.mark.slow
@pytest.mark.parametrize("size", [10, SMALL_BODY, MEDIUM_BODY])
def test_a_refusal_is_the_same_wherever_it_is_found(size: int) -> None:
    with pytest.raises(RequestError, match="prompt must contain token ids from 0 to 257, got 999") as refusal:
        read(reading(), {"prompt": [1] * size + [999]})
    assert refusal.value.param == "prompt"
    with pytest.raises(ApiError, match="`other` does not exist") as missing:
        read(reading(), {"prompt": "x" * size, "model": "other"})
    assert (missing.value.status, missing.value.code) == (404, "model_not_found")


@pytest.mark.slow
def test_a_body_that_takes_too_long_is_refused_and_the_next_one_is_read() -> None:
    bodies = reading(seconds=1.0)
    with pytest.raises(ApiError, match=r"took longer than 1 s.*--server-limits max_body_seconds") as refusal:
        read(bodies, {"prompt": "slow" + "x" * MEDIUM_BODY})
    assert (refusal.value.status, refusal.value.code) == (400, "request_too_expensive")
    bodies._seconds = 60.0
    assert len(read(bodies, {"prompt": "x" * MEDIUM_BODY}).prompts[0].token_ids) == MEDIUM_BODY + 1


@pytest.mark.slow
def test_a_body_that_ends_its_reader_is_a_500_and_the_next_one_is_read() -> None:
    bodies = reading()
    with pytest.raises(ApiError) as failure:
        read(bodies, {"prompt": "crash" + "x" * MEDIUM_BODY})
    assert (failure.value.status, failure.value.code) == (500, "internal_error")
    assert len(read(bodies, {"prompt": "x" * MEDIUM_BODY}).prompts[0].token_ids) == MEDIUM_BODY + 1


HERE = SlowTokenizer().encode("pid", False)


@pytest.mark.slow
def test_a_short_chat_is_read_where_it_arrives_if_its_template_is_plain() -> None:
    bodies = reading(template="{% for message in messages %}{{ message.content }}{% endfor %}")
    assert list(read(bodies, chat("pid"), "chat").prompt.token_ids) == HERE
    long = {**chat("pid"), "unknown": "x" * SMALL_BODY}
    assert list(read(bodies, long, "chat").prompt.token_ids) != HERE


@pytest.mark.slow
def test_a_chat_however_short_is_rendered_in_another_process_if_its_template_is_not_plain() -> None:
    bodies = reading(template="{% for _ in range(messages[0].n) %}{% endfor %}")
    assert list(read(bodies, chat("{{ 6 * 7 }}"), "chat").prompt.token_ids) == SlowTokenizer().encode("42", False)
    assert list(read(bodies, chat("pid"), "chat").prompt.token_ids) != HERE
    raw = json.dumps(chat("pid"))
    for written in (raw, raw.replace("messages", r"\u006dessages")):
        assert json.loads(asyncio.run(bodies.read("tokenize", written.encode())).content)["tokens"] != HERE


@pytest.mark.slow
@pytest.mark.parametrize(("method", "field"), [("completion", "prompt"), ("embedding", "input")])
def test_a_short_body_of_many_prompts_is_read_in_another_process(method: str, field: str) -> None:
    body = {"add_special_tokens": False}
    assert list(read(reading(), {**body, field: "pid"}, method).prompts[0].token_ids) == HERE
    assert list(read(reading(), {**body, field: ["pid"] * MANY_PARTS}, method).prompts[0].token_ids) != HERE


def test_a_large_body_is_not_searched_for_its_parts_on_the_event_loop() -> None:
    bodies, large = reading(pool=PartsKept), b"[" * MEDIUM_BODY
    with patch("octavo.server.bodies.reader_pool._num_parts", side_effect=AssertionError("it was searched")):
        assert asyncio.run(bodies.read("completion", large)) == (large,)


def test_bodies_that_go_on_from_a_response_share_its_items_until_they_are_read() -> None:
    bodies, items = reading(pool=PartsKept), b'{"role": "user", "content": "x"}' * 1000
    parts = asyncio.run(bodies.read("next_response", *frame(items, b"", b"{}"), tenant="ada"))
    assert any(part is items for part in parts)


@pytest.mark.slow
def test_a_template_that_loops_is_ended_and_the_next_chat_is_read() -> None:
    bodies = reading(seconds=1.0)
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ApiError, match="took longer than 1 s") as refusal:
        read(bodies, chat(loops), "chat")
    assert (refusal.value.status, refusal.value.code) == (400, "request_too_expensive")
    bodies._seconds = 60.0
    assert list(read(bodies, chat("x"), "chat").prompt.token_ids) == SlowTokenizer().encode("x", False)


@pytest.mark.slow
def test_a_template_that_fills_the_memory_is_refused_and_the_next_chat_is_read() -> None:
    bodies = reading(memory=256 * 2**20)
    with pytest.raises(
        ApiError, match=rf"took more than {256 * 2**20} bytes of memory.*--server-limits max_body_memory"
    ) as refusal:
        read(bodies, chat("{{ '%999999999d' % 1 }}"), "chat")
    assert (refusal.value.status, refusal.value.code) == (400, "request_too_expensive")
    assert list(read(bodies, chat("x"), "chat").prompt.token_ids) == SlowTokenizer().encode("x", False)


@pytest.mark.slow
def test_a_template_that_goes_on_writing_is_refused_with_the_limit() -> None:
    writes = "{% for i in range(99999) %}{{ 'x' * 100000 }}{% endfor %}"
    with pytest.raises(RequestError, match=f"output exceeds {MAX_RENDERED} characters"):
        read(reading(), chat(writes), "chat")


@pytest.mark.slow
@pytest.mark.parametrize("mebibytes", [1, 16])  # the body does not fit as received; once parsed
def test_a_large_body_that_fills_the_memory_is_refused(mebibytes: int) -> None:
    with pytest.raises(ApiError, match=f"more than {mebibytes * 2**20} bytes of memory"):
        read(reading(memory=mebibytes * 2**20), {"prompt": [[1]] * 500_000})


@pytest.mark.slow
def test_a_process_that_keeps_too_much_memory_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = reading()
    assert list(read(bodies, chat("x"), "chat").prompt.token_ids) == SlowTokenizer().encode("x", False)
    (first,) = bodies._idle
    monkeypatch.setattr(reader_pool, "_KEPT_BYTES", -(2**30))
    assert list(read(bodies, chat("x"), "chat").prompt.token_ids) == SlowTokenizer().encode("x", False)
    assert bodies._idle == []
    assert not first.is_alive
    assert list(read(bodies, chat("y"), "chat").prompt.token_ids) == SlowTokenizer().encode("y", False)


@pytest.mark.slow
def test_a_process_that_ended_while_it_was_idle_is_replaced() -> None:
    bodies = reading()
    assert list(read(bodies, chat("x"), "chat").prompt.token_ids) == SlowTokenizer().encode("x", False)
    (idle,) = bodies._idle
    idle._process._process.kill()
    idle._process._process.wait()
    assert list(read(bodies, chat("y"), "chat").prompt.token_ids) == SlowTokenizer().encode("y", False)


def test_a_system_without_proc_reads_bodies_without_a_limit_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    monkeypatch.setattr(helper_process, "_OWN_PAGES", "/nonexistent/statm")
    helper_process.limit_memory(2**30)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


class BlockedWorker:
    """Stands in for a process: reads nothing until `goes_on` is set; notes what it was given."""

    goes_on: threading.Event
    given: list[bytes]

    def __init__(self, *_: Any) -> None:
        self.is_alive, self.is_bloated = True, False

    def read(self, method: str, parts: tuple[bytes, ...], seconds: float, *, is_niced: bool = False) -> bytes:
        raw = b"".join(parts)
        self.given.append(raw)
        assert raw[:3] != b"ada" or self.goes_on.wait(60)
        return raw


@pytest.mark.parametrize("size", [10, MEDIUM_BODY])
def test_a_tenants_slow_bodies_hold_up_no_other_tenants(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("octavo.server.bodies.reader_pool.ReaderProcess", BlockedWorker)
    BlockedWorker.goes_on, BlockedWorker.given = threading.Event(), []
    bodies = reading(pool=ReaderPool)

    async def run() -> None:
        slow = [asyncio.ensure_future(bodies.read("chat", b"ada" + b"x" * size, tenant="ada")) for _ in range(9)]
        while len(BlockedWorker.given) < 2:
            await asyncio.sleep(0.001)
        for _ in range(3):
            assert await bodies.read("chat", b"ben" + b"x" * size, tenant="ben")
        assert [raw[:3] for raw in BlockedWorker.given] == [b"ada"] * 2 + [b"ben"] * 3
        slow[0].cancel()
        slow[-1].cancel()
        await asyncio.sleep(0)
        # Nobody waits for the first any more, but it is being read: its place is not free.
        assert await bodies.read("chat", b"ben" + b"x" * size, tenant="ben")
        assert len(BlockedWorker.given) == 6
        BlockedWorker.goes_on.set()
        assert len(await asyncio.gather(*slow[1:-1])) == 7

    asyncio.run(run())
    assert len(BlockedWorker.given) == 8 + 4


def test_a_tenants_medium_bodies_hold_up_no_other_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, bodies = threading.Event(), reading()
    read_now = bodies.reader.completion

    def read_slowly(raw: bytes) -> Any:
        assert b"ada" not in raw or goes_on.wait(600)
        return read_now(raw)

    monkeypatch.setattr(bodies.reader, "completion", read_slowly)

    def body(tenant: str) -> bytes:
        return json.dumps({"prompt": "x" * SMALL_BODY, "max_tokens": 1, "user": tenant}).encode()

    async def run() -> None:
        slow = [asyncio.ensure_future(bodies.read("completion", body("ada"), tenant="ada")) for _ in range(9)]
        try:
            async with asyncio.timeout(120):
                assert await bodies.read("completion", body("ben"), tenant="ben")
        finally:
            goes_on.set()
        assert all(await asyncio.gather(*slow))

    asyncio.run(run())


@pytest.mark.slow
def test_large_bodies_are_read_with_a_lower_priority_than_chats_by_the_same_process() -> None:
    bodies = reading()
    read(bodies, {"prompt": "x" * MEDIUM_BODY})
    (worker,) = bodies._idle
    threads = [int(task.name) for task in Path(f"/proc/{worker._process.pid}/task").iterdir()]
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert min(own + LARGE_NICENESS, 19) in [os.getpriority(os.PRIO_PROCESS, thread) for thread in threads]
    assert os.getpriority(os.PRIO_PROCESS, worker._process.pid) == own
    read(bodies, chat("x"), "chat")
    assert bodies._idle == [worker]


def test_chats_do_not_wait_for_large_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_pool, "ReaderProcess", BlockedWorker)
    BlockedWorker.goes_on, BlockedWorker.given = threading.Event(), []
    bodies = reading(pool=ReaderPool)

    async def run() -> None:
        large = [asyncio.ensure_future(bodies.read("completion", b"ada" + b"x" * MEDIUM_BODY)) for _ in range(9)]
        while len(BlockedWorker.given) < NUM_WORKERS:
            await asyncio.sleep(0.001)
        assert await bodies.read("chat", b"hi")
        BlockedWorker.goes_on.set()
        await asyncio.gather(*large)

    asyncio.run(run())


def test_a_prompt_over_the_models_length_is_refused_as_soon_as_it_is_tokenised() -> None:
    with pytest.raises(ContextLengthError, match="maximum context length is 10 tokens, but the prompt alone has 21"):
        read(reading(max_model_len=10), {"prompt": "x" * 20})


@pytest.mark.parametrize("error", [BODY_TOO_LARGE(7), MODEL_MISSING("m"), to_api_error(RequestError("no", param="n"))])
def test_an_error_for_the_client_survives_the_way_from_another_process(error: ApiError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.status, copy.fields(), str(copy)) == (error.status, error.fields(), str(error))
