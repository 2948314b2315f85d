"""A model split among machines gives the bits of one rank; a machine that is lost ends what runs, no more."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams, kernels
from octavo.config import EngineConfig
from octavo.errors import ConfigError, ExecutorError
from octavo.option import options_of
from octavo.runner.machines import Machines
from tests.campaigns.cluster import Network, can_isolate, isolated
from tests.conftest import assert_idle, runner_of
from tests.engine.test_ranks import MIXTURE, SIZES, bits
from tests.engine.test_same_tokens import workload
from tests.models.tiny import write_hf_model
from tests.ports import free_port

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not kernels.available() or sys.platform != "linux", reason="ranks need the kernels, on Linux"),
]

OPTIONS: dict[str, Any] = {"num_blocks": 40, "max_num_batched_tokens": 24, "num_threads": 1, "dtype": "bfloat16"}
FOUR: dict[str, Any] = {**SIZES, "hidden_size": 128, "intermediate_size": 160, "num_attention_heads": 8}
PROMPT: Any = {"prompt_token_ids": list(range(3, 40))}


def command(model: Path, options: dict[str, Any]) -> list[str]:
    """How another machine is started with an engine's options."""
    named = [flag for name, value in options.items() for flag in options_of(EngineConfig)[name].argv(value)]
    return [sys.executable, "-m", "octavo", "serve", str(model), *named]


def several(port: int, ranks: int = 2) -> dict[str, Any]:
    return {**OPTIONS, "tensor_parallel_size": ranks, "nnodes": 2, "master_port": port}


@contextmanager
def second(model: Path, options: dict[str, Any], inside: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    argv = [*inside, *command(model, {**options, "node_rank": 1})]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def ask(llm: LLM) -> Any:
    """The bits of an answer, or why there is none."""
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=1)
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    return output.error_reason or bits([output])


@dataclass
class Pair:
    """Machine 0, and what starts another."""

    llm: LLM
    model: Path
    options: dict[str, Any]
    other: subprocess.Popen[str]


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr("octavo.runner.ranks.ANSWER_S", 2.0)
    monkeypatch.setattr("octavo.runner.machines.JOIN_AGAIN_S", 60.0)
    write_hf_model(tmp_path, "Llama", **SIZES)
    options = several(free_port())
    with second(tmp_path, options) as other, LLM(str(tmp_path), **options) as llm:
        yield Pair(llm, tmp_path, options, other)
        assert_idle(llm.core)


@pytest.mark.parametrize(
    ("family", "ranks", "sizes"),
    [
        pytest.param("Llama", 4, {**FOUR, "num_key_value_heads": 2}, id="two ranks each, replicated KV heads"),
        pytest.param("Qwen3Moe", 2, {**SIZES, **MIXTURE}, id="a mixture"),
    ],
)
def test_machines_give_the_bits_of_one_rank(tmp_path: Path, family: str, ranks: int, sizes: dict[str, Any]) -> None:
    write_hf_model(tmp_path, family, **sizes)
    prompts, params = workload()
    with LLM(str(tmp_path), **OPTIONS) as llm:
        expected = [bits(llm.generate(prompts, params, use_tqdm=False)) for _ in range(2)]
    options = several(free_port(), ranks)
    with second(tmp_path, options) as other:
        with LLM(str(tmp_path), **options) as llm:
            assert [bits(llm.generate(prompts, params, use_tqdm=False)) for _ in range(2)] == expected
            assert_idle(llm.core)
        assert other.wait(30) == 1, "it ends with machine 0"
        assert other.stderr is not None
        assert "machine 1 has ended: another machine is lost" in other.stderr.read()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_machine_that_dies_or_stops_ends_what_runs_and_another_takes_its_place(pair: Pair, how: int) -> None:
    with LLM(str(pair.model), **OPTIONS) as llm:
        expected = ask(llm)
    assert ask(pair.llm) == expected, "heads that two machines divide unevenly"
    pair.other.send_signal(how)
    with second(pair.model, pair.options):
        assert ask(pair.llm).startswith("another machine is lost: ")  # reset, closed, a broken pipe, or silent
        assert ask(pair.llm) == expected


def test_a_lost_machine_is_noticed_while_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.runner.machines.SILENT_S", 2.0)
    monkeypatch.setattr("octavo.runner.machines._SIGN_S", 0.1)
    write_hf_model(tmp_path, "Llama", **SIZES)
    options = several(free_port())
    with second(tmp_path, options) as other, LLM(str(tmp_path), **options) as llm:
        group = runner_of(llm.core)._ranks
        assert group is not None
        other.send_signal(signal.SIGSTOP)
        until = time.monotonic() + 30
        while not group.failure and time.monotonic() < until:
            time.sleep(0.05)
        assert group.failure == "machine 1 has given no sign of life for 2 s"


def test_a_machine_with_other_options_is_refused(tmp_path: Path) -> None:
    write_hf_model(tmp_path, "Llama", **SIZES)
    options = several(free_port())
    refused = "machine 1 was started with another model, or with other options"
    with second(tmp_path, {**options, "block_size": 32}) as other:
        with pytest.raises(ConfigError, match=refused):
            LLM(str(tmp_path), **options)
        assert other.wait(30) == 1
        assert other.stderr is not None
        assert refused in other.stderr.read()


def test_a_machine_that_never_comes_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.runner.machines.FIRST_JOIN_S", 1.0)
    write_hf_model(tmp_path, "Llama", **SIZES)
    with pytest.raises(ExecutorError, match="the 2 machines do not meet at"):
        LLM(str(tmp_path), **several(free_port()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nnodes": 2}, "nnodes is 2, but tensor_parallel_size is 1: give a multiple of 2"),
        ({"nnodes": 2, "tensor_parallel_size": 3}, "give a multiple of 2"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "node_rank": 2}, "node_rank is 2, but the machines are 0 to 1"),
    ],
)
def test_machines_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


@pytest.mark.skipif(not can_isolate(), reason="this user may not make network namespaces")
def test_two_hosts_with_a_link_between_them(tmp_path: Path) -> None:
    write_hf_model(tmp_path, "Llama", **SIZES)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        alone = json.loads(json.dumps(ask(llm)))
    own = [sys.executable, "-m", "tests.engine.test_machines", str(tmp_path)]
    found = subprocess.run(isolated(own), capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stderr[-4000:]
    together, parted, again = json.loads(found.stdout.splitlines()[-1])
    assert together == again == alone
    assert parted.startswith("another machine is lost: ")


def two_hosts(model: Path) -> list[Any]:
    """The answers of two ranks on hosts of their own, of these while their link is cut, and after that."""
    network = Network(is_isolated=True)
    a, b = network.host("a", 1), network.host("b", 2)
    options = {**several(29501), "master_addr": a.address}
    answering = [*a.inside, sys.executable, "-m", "tests.engine.test_machines", str(model), json.dumps(options)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with second(model, options, b.inside), subprocess.Popen(answering, **pipes) as first:
        first.stdin.write("\n")
        together = json.loads(first.stdout.readline())
        b.cut()
        first.stdin.write("\n")
        time.sleep(5)  # longer than the other may take to answer; then machine 0 waits for one to join
        b.join()
        with second(model, options, b.inside):
            parted = json.loads(first.stdout.readline())
            first.stdin.write("\n")
            again = json.loads(first.stdout.readline())
        first.kill()
    return [together, parted, again]


def answer_lines(model: Path, options: dict[str, Any]) -> None:
    """Answer each line from stdin, on this host."""
    import octavo.runner.ranks

    octavo.runner.ranks.ANSWER_S = 2.0
    with LLM(str(model), **options) as llm:
        for _ in sys.stdin:
            print(json.dumps(ask(llm)), flush=True)


def test_machines_exchange_more_than_sockets_hold_and_a_stranger_at_their_port_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size, port = 16 * 1024 * 1024, free_port()
    strangers: list[socket.socket] = []

    def listen(address: Any, **options: Any) -> Any:
        listener = socket.create_server(address, **options)
        strangers.append(socket.create_connection(listener.getsockname()))
        strangers[-1].sendall(bytes(20))
        return listener

    monkeypatch.setattr("octavo.runner.machines.create_server", listen)

    def run(machine: int) -> tuple[bytes, bytes]:
        machines = Machines(
            EngineConfig(model="x", tensor_parallel_size=2, nnodes=2, node_rank=machine, master_port=port), 60.0
        )
        machines.join()
        gather, broadcast = machines.link
        every, message = bytearray(2 * size), bytearray(b"from0" if machine == 0 else b"     ")
        gather(memoryview(bytearray([machine + 1]) * size), memoryview(every))
        broadcast(memoryview(message))
        assert machines.agree("the same", [7 + machine, 9 - machine]) == [7, 8]
        machines.leave()
        return bytes(every), bytes(message)

    with ThreadPoolExecutor(2) as pool:
        expected = bytes([1]) * size + bytes([2]) * size, b"from0"
        assert list(pool.map(run, range(2))) == [expected, expected]
    assert len(strangers) == 2
    for stranger in strangers:
        stranger.close()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        answer_lines(Path(sys.argv[1]), json.loads(sys.argv[2]))
    else:
        print(json.dumps(two_hosts(Path(sys.argv[1]))))
