"""How a server process begins and ends, seen from outside."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.errors import ConfigError
from octavo.server.config import ServerConfig
from octavo.server.http.listening import bind
from octavo.server.run import serve
from tests.server.conftest import wait_until
from tests.server.fake_engine import FakeEngine
from tests.server.server_process import ROOT, ServerProcess, started

pytestmark = pytest.mark.integration

STEP = 0.02


@pytest.fixture
def start() -> Iterator[Callable[..., ServerProcess]]:
    with ExitStack() as stack:

        def start(shutdown_timeout: float = 30, stdin: Any = subprocess.PIPE, **options: Any) -> ServerProcess:
            command = [sys.executable, "-W", "error", "-m", "tests.server.fake_server", "0", str(STEP)]
            command += [str(shutdown_timeout), *([json.dumps(options)] if options else [])]
            return stack.enter_context(started(command, stdin))

        yield start


def test_it_says_what_it_serves_and_where_once_it_does_and_leaves_quickly_when_idle(
    start: Callable[..., ServerProcess],
) -> None:
    server = start(shutdown_timeout=600)
    assert server.said == "loading the model\n"
    assert re.fullmatch(r"Octavo serving fake on http://127\.0\.0\.1:\d+\n", server.ready)
    with httpx.Client(base_url=server.url) as kept_alive:
        assert kept_alive.get("/health").status_code == 200
        server.stop(signal.SIGINT)
        assert server.process.wait(60) == 0


def test_a_hangup_without_a_keys_file_is_survived_and_the_first_signal_lets_a_stream_finish(
    start: Callable[..., ServerProcess],
) -> None:
    server = start(shutdown_timeout=120)
    stream = server.stream(prompt="x", max_tokens=3000)
    server.stop(signal.SIGHUP)
    server.errors_up_to("there is no --keys-file to reread")
    server.stop(signal.SIGTERM)
    wait_until(lambda: not server.listens())
    server.hurry()
    *_, last, done = stream.wait()
    assert done == "[DONE]"
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(60) == 0
    out, err = server.process.communicate()
    assert out == "gone in peace\n"
    assert err == "Octavo stops: waiting up to 120 s for 1 running request; a second signal stops at once\n"


# SIGINT, and its code 130: `test_real_engine_process.py`.
def test_the_second_signal_leaves_at_once(start: Callable[..., ServerProcess]) -> None:
    server = start()
    stream = server.stream(prompt="x", max_tokens=4000)
    server.stop(signal.SIGTERM)
    wait_until(lambda: not server.listens())
    assert server.process.poll() is None
    server.stop(signal.SIGTERM)
    assert server.process.wait(60) == 128 + signal.SIGTERM
    assert "[DONE]" not in stream.wait()


def test_what_runs_too_long_is_cancelled_with_an_error(start: Callable[..., ServerProcess]) -> None:
    server = start(shutdown_timeout=0.3)
    stream = server.stream(prompt="x", max_tokens=4000)
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 4000}))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: httpx.get(f"{server.url}/load").json()["server_load"] == 2)
    server.stop(signal.SIGTERM)
    *_, last, done = stream.wait()
    assert json.loads(last)["error"]["code"] == "shutting_down"
    assert done == "[DONE]"
    asking.join(60)
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "shutting_down")
    assert server.process.wait(60) == 0


def test_a_hangup_rereads_the_keys_and_a_running_stream_goes_on(
    start: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[tenants.ada]\nkeys = ["old"]')
    keys.chmod(0o600)
    server = start(keys_file=str(keys))

    def status(key: str) -> int:
        return httpx.get(f"{server.url}/v1/models", headers={"x-api-key": key}).status_code

    assert (status("old"), status("new")) == (200, 401)
    body = {"prompt": "x", "max_tokens": 60, "stream": True}
    headers = {"x-api-key": "old"}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers) as response:
        lines = response.iter_lines()
        next(lines)
        keys.write_text('[tenants.ada]\nkeys = ["new"]')
        server.stop(signal.SIGHUP)
        wait_until(lambda: status("new") == 200)
        assert status("old") == 401
        assert [line for line in lines if line][-1] == "data: [DONE]"
    keys.write_text("nonsense")
    server.stop(signal.SIGHUP)
    err = server.errors_up_to("keeping the previous keys")
    assert "1 keys of 1 tenants" in err
    assert status("new") == 200
    server.stop(signal.SIGTERM)
    assert "old" not in err + server.process.communicate(timeout=600)[1]


HUNG_UP_WHILE_LOADING = """
import os, pathlib, signal, sys
from octavo.server.config import ServerConfig
from octavo.server.run import serve
from tests.server.fake_engine import FakeEngine

def load():
    print("loading the model", flush=True)
    pathlib.Path(sys.argv[1]).write_text('[tenants.ada]\\nkeys = ["new"]')
    os.kill(os.getpid(), signal.SIGHUP)
    return FakeEngine()

serve(load, ServerConfig(port=0, keys_file=sys.argv[1]))
"""


def test_a_hangup_while_the_model_is_loaded_rereads_the_keys_once_it_is(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[tenants.ada]\nkeys = ["old"]')
    keys.chmod(0o600)
    command = [sys.executable, "-c", HUNG_UP_WHILE_LOADING, str(keys)]
    with started(command) as server:
        url = f"{server.url}/v1/models"
        statuses = [httpx.get(url, headers={"x-api-key": key}).status_code for key in ("old", "new")]
    assert statuses == [401, 200]


def test_without_a_keys_file_the_end_of_its_terminal_ends_the_process(start: Callable[..., ServerProcess]) -> None:
    terminal, theirs = os.openpty()
    with open(terminal, "wb"), open(theirs, "rb") as stdin:
        server = start(stdin=stdin)
        server.stop(signal.SIGHUP)
        assert server.process.wait(60) == -signal.SIGHUP


def test_a_port_in_use_fails_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command: list[Any] = [sys.executable, "-m", "tests.server.fake_server", str(port), "0", "0"]
        finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 1
    assert "loading" not in finished.stdout
    assert finished.stderr == (
        f"cannot listen on 127.0.0.1:{port}: address already in use; "
        "choose another port with --port, or 0 for a free one\n"
    )


def test_a_host_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on '256\.0\.0\.1'"):
        bind("256.0.0.1", 0)


def test_an_interrupt_that_was_lost_while_the_model_loaded_ends_the_server_before_it_serves() -> None:
    def lost() -> None:
        raise KeyboardInterrupt

    engine = FakeEngine()
    with pytest.raises(KeyboardInterrupt):
        serve(lambda: engine, ServerConfig(port=0), check_interrupt=lost)
    assert not engine.is_alive
