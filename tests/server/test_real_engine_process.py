"""`octavo serve` from outside, as a process: how it begins with a real model, how it ends, how it fails to begin."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from octavo.cli import main
from tests.engine.tiny_engine import tiny_model
from tests.models.tiny import make_model, write_gguf
from tests.server.server_process import ServerProcess, started

pytestmark = pytest.mark.integration

# A model of random weights never ends by itself within these.
LONG = {"prompt": [5, 6], "max_tokens": 300, "ignore_eos": True}
STOPS = "a second signal stops at once"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def command(model: str | Path, *options: str) -> list[str]:
    return [sys.executable, "-W", "error", "-m", "octavo", "serve", str(model), "--port", "0", *options]


def script(code: str, *arguments: object) -> list[str]:
    """The command of a script that ends as `octavo serve` does."""
    return [sys.executable, "-W", "error", "-c", code, *map(str, arguments), "--port", "0"]


# `octavo serve`, whose steps take a tenth of a second as long as a file exists.
SLOW = """
import os, sys, time
from octavo import cli
from octavo.runner.runner import ModelRunner

file, execute = sys.argv.pop(1), ModelRunner.execute

def slowly(self, plan):
    if os.path.exists(file):
        time.sleep(0.1)
    return execute(self, plan)

ModelRunner.execute = slowly
sys.exit(cli.main(sys.argv[1:]))
"""

# `octavo serve` that loads its model again and again.
LOADING = """
import sys
from octavo import cli
from octavo.server import run

serve = run.serve

def never(load, *args, **options):
    def load_for_ever():
        while True:
            load()
    serve(load_for_ever, *args, **options)

run.serve = never
sys.exit(cli.main(sys.argv[1:]))
"""


# `octavo serve` that may open few files.
FEW_FILES = """
import resource, sys
from octavo import cli

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture
def start() -> Iterator[Callable[[list[str]], ServerProcess]]:
    with ExitStack() as stack:
        yield lambda command: stack.enter_context(started(command))


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """A file: a server's steps take long until it is removed."""
    (path := tmp_path / "slow").touch()
    return path


def test_a_server_finishes_what_runs_restarts_warm_and_leaves_at_once_at_a_second_signal(
    start: Callable[..., ServerProcess], slow: Path, tmp_path: Path
) -> None:
    options = ["--num-blocks", "4096", "--dtype", "float32", "--num-threads", "1", "--shutdown-timeout", "120"]
    serve = script(SLOW, slow, "serve", tiny_model(), *options, "--kv-disk", str(tmp_path / "kv"))
    body = {"prompt": [(7 * i) % 200 for i in range(100)], "max_tokens": 4, "ignore_eos": True, "temperature": 0}

    def ask(server: ServerProcess) -> tuple[str, int]:
        answer = server.post("/v1/completions", body)
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    first = start(serve)
    (text, cold), (_, reused) = ask(first), ask(first)
    assert (cold, reused) == (0, 96)
    stream = first.stream(**LONG)
    first.stop(signal.SIGTERM)
    first.errors_up_to(STOPS)
    slow.unlink()
    *_, last, done = stream.wait()
    assert first.end() == ""
    assert done == "[DONE]"
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"

    second = start(serve)
    assert ask(second) == (text, 96)
    slow.touch()
    streams = [second.stream(**LONG, n=16) for _ in range(3)]
    second.stop(signal.SIGINT)
    second.errors_up_to(STOPS)
    second.leave(signal.SIGINT, 130)
    assert all("[DONE]" not in stream.wait() for stream in streams)


def test_a_server_out_of_descriptors_serves_on(start: Callable[..., ServerProcess]) -> None:
    options = [
        "--num-blocks",
        "96",
        "--dtype",
        "float32",
        "--num-threads",
        "1",
        "--server-limits",
        "keep_alive_timeout=600",
    ]
    server = start(script(FEW_FILES, "serve", tiny_model(), *options))
    body = {"prompt": [5, 6], "max_tokens": 2, "ignore_eos": True}
    with httpx.Client(base_url=server.url) as client:
        assert client.get("/health").status_code == 200  # over a connection that is kept
        with ExitStack() as crowd:
            for _ in range(100):
                crowd.enter_context(socket.create_connection(("127.0.0.1", client.base_url.port or 0)))
            # The engine's first idle moment, at which it starts a process and imports modules.
            server.errors_up_to("idle checks postponed")
            assert client.post("/v1/completions", json=body).status_code == 200
    assert server.post("/v1/completions", body)["usage"]["completion_tokens"] == 2
    assert "Traceback" not in server.leave(signal.SIGTERM)


def test_the_default_model_answers_a_question(start: Callable[..., ServerProcess]) -> None:
    server = start(command("smollm2", "--max-model-len", "512", "--num-blocks", "128", "--num-threads", "1"))
    assert re.fullmatch(r"Octavo serving smollm2 on http://127\.0\.0\.1:\d+\n", server.ready)
    # Each token of this answer leads by at least half a nat: it does not depend on how a level rounds. France's does.
    question = [{"role": "user", "content": "What is the capital of Japan?"}]
    chats = [
        server.post("/v1/chat/completions", {"messages": question, "max_tokens": 20, "temperature": 0})
        for _ in range(2)
    ]
    assert "Tokyo" in chats[0]["choices"][0]["message"]["content"]
    assert chats[1]["choices"] == chats[0]["choices"]
    assert [chat["usage"]["prompt_tokens_details"]["cached_tokens"] for chat in chats] == [0, 32]
    # Without the model's default penalties, which count commas too.
    plain = {"max_tokens": 6, "temperature": 0, "repetition_penalty": 1, "frequency_penalty": 0}
    continued = server.post("/v1/completions", {"prompt": "1, 2, 3, 4, 5,", **plain})
    assert continued["choices"][0]["text"].startswith(" 6, 7")
    assert server.leave(signal.SIGTERM) == ""


def test_ctrl_c_while_the_model_loads_says_nothing_more() -> None:
    process = subprocess.Popen(script(LOADING, "serve", "smollm2"), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stderr is not None
        while "loading smollm2" not in process.stderr.readline():  # the last thing it says before it loads
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=600)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in errors


# `octavo serve`, whose runner raises from its tenth step on: for good, and whatever it is asked to compute.
BREAKING = """
import itertools, sys
from octavo import cli
from octavo.runner.runner import ModelRunner

steps, execute = itertools.count(), ModelRunner.execute

def breaking(self, plan):
    if next(steps) >= 10:
        raise RuntimeError("the device is lost")
    return execute(self, plan)

ModelRunner.execute = breaking
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_process_whose_engine_is_dead_says_why_and_exits_with_an_error() -> None:
    command = script(BREAKING, "serve", tiny_model(), "--num-blocks", "512", "--dtype", "float32")
    with started(command) as server:
        events = server.stream(**LONG).wait()
        errors = server.end(1)
    assert json.loads(events[-2])["error"]["code"] == "engine_dead", "whom it served is told"
    assert "CRITICAL octavo.engine.async_engine: the step loop died" in errors
    assert "RuntimeError: the device is lost" in errors
    assert (
        errors.splitlines()[-1]
        == "octavo: error: the engine died, so the server has stopped; see the log for the cause"
    )


def missing(folder: Path) -> Path:
    return folder / "nowhere.gguf"


def no_model_at_all(folder: Path) -> Path:
    return folder


def cut_short(folder: Path) -> Path:
    path = folder / "cut.gguf"
    write_gguf(path, make_model("Llama"))
    path.write_bytes(path.read_bytes()[:-1000])
    return path


def not_gguf(folder: Path) -> Path:
    path = folder / "text.gguf"
    path.write_text("this is no model")
    return path


def unknown_architecture(folder: Path) -> Path:
    path = folder / "mamba.gguf"
    write_gguf(path, make_model("Llama"), keys={"general.architecture": "mamba"})
    return path


def unknown_type(folder: Path) -> Path:
    path = folder / "nvfp4.gguf"
    write_gguf(path, make_model("Llama", hidden_size=256, intermediate_size=256), quantization="NVFP4")
    return path


def broken_config(folder: Path) -> Path:
    (folder / "config.json").write_text('{"model_type": "llama"')
    return folder


def weights_cut_short(folder: Path) -> Path:
    for file in tiny_model().iterdir():
        content = file.read_bytes()
        (folder / file.name).write_bytes(content[:-100] if file.suffix == ".safetensors" else content)
    return folder


def assert_one_line(errors: str, model: Path, says: str) -> None:
    *before, line = errors.splitlines()
    assert all(" INFO octavo.serve: loading " in record for record in before)
    assert line.startswith("octavo: error: ")
    assert says in line
    assert str(model) in line


def test_a_model_that_cannot_be_served_is_one_line_and_exit_code_one(tmp_path: Path) -> None:
    model = unknown_architecture(tmp_path)
    finished = subprocess.run(command(model), env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert (finished.returncode, finished.stdout) == (1, "")
    assert_one_line(finished.stderr, model, "architecture 'mamba'")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (missing, "there is no file or folder"),
        (no_model_at_all, "has neither a config.json nor a GGUF file"),
        (cut_short, "truncated or corrupt"),
        (not_gguf, "GGUF"),
        (unknown_type, "is stored as NVFP4; supported: F32"),
        (broken_config, "config.json"),
        (weights_cut_short, "truncated or corrupt"),
    ],
)
def test_whatever_is_wrong_with_a_model_is_told_in_one_line(
    tmp_path: Path, make: Callable[[Path], Path], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As above, without a process for each."""
    model = make(tmp_path)
    capsys.readouterr()
    assert main(command(model)[command(model).index("serve") :]) == 1
    out, errors = capsys.readouterr()
    assert out == ""
    assert_one_line(errors, model, says)
