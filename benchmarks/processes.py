"""The HTTP side and the engine in one process, as they are, and in two, as in vLLM's v1 and SGLang.

    python -m benchmarks.processes [--streams 1 64 256] [--steps 5 10 30] [--modes one two] [--rounds 3] [--out FILE]

A stand-in for the runner builds each step's batch and sleeps for the rest of the step, as if it waited for a GPU or for
C++ threads; all else is a server's: scheduling, detokenising, HTTP. With two processes, the engine's sends the
outputs of a step in one message, and the server's has the rest. Both are measured in turn, in each round. Reported are
tokens per second, the time between two tokens of a stream, what a stream's token takes beyond the step, memory, and the
processor time of a token in each process.

The two become the way if they give 1.2 times the tokens at 256 streams, and one stream loses at most 0.3 ms a token.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import os
import pickle
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import this_machine
from benchmarks.stand_in import BLOCK, INFO, BatchOnly, make_core
from octavo.checkpoint.model_source import resolve_model
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.outputs import OutputKind, RequestOutput
from octavo.request import DEFAULT_CONTEXT, RequestContext
from octavo.sampling_params import SamplingParams
from octavo.scheduler.plan import StepPlan, StepResult
from octavo.server.config import ServerConfig
from octavo.server.interpreter_settings import settle_interpreter
from octavo.server.run import serve
from octavo.text.tokenizer import Tokenizer
from octavo.workloads.http import PostUrl, post_json
from octavo.workloads.server_process import running_server
from tests.server.fake_engine import FakeEngine

MODEL = "stand-in"
MAX_STREAMS = 256
PROMPT_TOKENS = 32
MODES = ("one", "two")
MAX_TOKENS = 512 * BLOCK - 64


class Sleeping(BatchOnly):
    """A runner whose steps take `seconds`."""

    is_computing = False  # whether it sleeps, and needs no interpreter

    def __init__(self, seconds: float) -> None:
        super().__init__(MAX_STREAMS, 512)
        self._step_seconds = seconds

    def watch(self, on_failure: Callable[[], None]) -> None:
        return

    def failure(self) -> str:
        return ""

    def execute(self, plan: StepPlan) -> StepResult:
        ends = time.perf_counter() + self._step_seconds
        result = super().execute(plan)
        self.is_computing = True
        time.sleep(max(0.0, ends - time.perf_counter()))
        self.is_computing = False
        return result


def make_engine(seconds: float) -> AsyncEngine:
    tokenizer = Tokenizer.from_source(resolve_model("smollm2"))
    core = make_core(MAX_STREAMS * 512, Sleeping(seconds), seqs=MAX_STREAMS, budget=16_384, tokenizer=tokenizer)
    return AsyncEngine(core, MODEL)


def run_engine(seconds: float, connection: Connection) -> None:
    """Run the engine's process: takes requests and aborts from the connection, and sends lists of (id, output)."""
    engine = make_engine(seconds)
    settle_interpreter()
    asyncio.run(_serve_engine(engine, connection))


async def _serve_engine(engine: AsyncEngine, connection: Connection) -> None:
    await engine.start()
    loop = asyncio.get_running_loop()
    tasks: dict[int, asyncio.Task[None]] = {}
    outputs: list[tuple[int, RequestOutput]] = []

    def flush() -> None:
        connection.send_bytes(pickle.dumps(outputs, protocol=pickle.HIGHEST_PROTOCOL))
        outputs.clear()

    async def answer(number: int, *request: Any) -> None:
        prompt, params, context, kind = request
        async for output in engine.generate(prompt, params, context, output_kind=kind):
            if not outputs:
                # Once per round of the loop, in which all outputs of a step arrive.
                loop.call_soon(flush)
            outputs.append((number, output))

    def take(number: int, request: tuple[Any, ...] | None) -> None:
        if request is not None:
            tasks[number] = asyncio.ensure_future(answer(number, *request))
        else:
            tasks.pop(number).cancel()

    def receive() -> None:
        try:
            while True:
                loop.call_soon_threadsafe(take, *pickle.loads(connection.recv_bytes()))
        except (EOFError, OSError):
            loop.call_soon_threadsafe(ended.set)

    ended = asyncio.Event()
    threading.Thread(target=receive, daemon=True).start()
    connection.send_bytes(b"ready")
    await ended.wait()
    await engine.shutdown(0.0)


class EngineElsewhere(FakeEngine):
    """The server's side of an engine in a process of its own, as far as completions need it."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.info = replace(INFO, model_name=MODEL)
        self.tokenizer = Tokenizer.from_source(resolve_model("smollm2"))  # type: ignore[assignment]
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=run_engine, args=(seconds, theirs), daemon=True)
        self._process.start()
        theirs.close()
        assert self._connection.recv_bytes() == b"ready"
        self._numbers = itertools.count()
        self._queues: dict[int, asyncio.Queue[RequestOutput]] = {}

    async def start(self) -> None:
        await super().start()
        threading.Thread(target=self._receive, args=(asyncio.get_running_loop(),), daemon=True).start()

    def _receive(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while True:
                loop.call_soon_threadsafe(self._deliver, pickle.loads(self._connection.recv_bytes()))
        except (EOFError, OSError, RuntimeError):
            return

    def _deliver(self, outputs: list[tuple[int, RequestOutput]]) -> None:
        for number, output in outputs:
            if (queue := self._queues.get(number)) is not None:
                queue.put_nowait(output)

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        context: RequestContext = DEFAULT_CONTEXT,
        *,
        output_kind: OutputKind = OutputKind.DELTA,
    ) -> AsyncIterator[RequestOutput]:
        number = next(self._numbers)
        queue = self._queues[number] = asyncio.Queue()
        self._send(number, (prompt, params, context, output_kind))
        try:
            while True:
                yield await queue.get()
        finally:  # a stream ends when its client leaves
            del self._queues[number]
            self._send(number, None)

    def _send(self, number: int, request: tuple[Any, ...] | None) -> None:
        self._connection.send_bytes(pickle.dumps((number, request), protocol=pickle.HIGHEST_PROTOCOL))

    async def shutdown(self, drain_seconds: float) -> None:
        self._connection.close()
        self._process.join(10)


@dataclass(frozen=True, slots=True)
class Result:
    """One run.

    Attributes:
        beyond_step_ms: the median time between a stream's tokens, without the step.
        processor_us: the processor time of a token in each of the server's processes, the busiest first.
    """

    tokens_per_second: float
    p99_ms: float
    beyond_step_ms: float
    memory_mib: float
    processor_us: tuple[float, ...]


async def read_streams(
    url: PostUrl, pids: list[int], count: int, seconds: float
) -> tuple[list[list[float]], list[float]]:
    """Read streams for a while, a second after the last has begun.

    Returns:
        When their tokens arrived in that while, and the processor time of each process in it, in seconds.
    """
    arrivals: list[list[float]] = [[] for _ in range(count)]

    async def read(number: int) -> None:
        prompt = [300 + number * 131 % 40_000] * (PROMPT_TOKENS + number % BLOCK)
        body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True}
        times = arrivals[number]
        status, error = await post_json(url, {}, body, lambda piece, now: times.extend([now] * piece.count(b"data: {")))
        raise RuntimeError(f"a stream ended before its time; give fewer --seconds ({status} {error.decode()})")

    tasks = [asyncio.create_task(read(number)) for number in range(count)]
    while not all(arrivals):
        if failed := [task for task in tasks if task.done()]:
            failed[0].result()
        await asyncio.sleep(0.05)
    await asyncio.sleep(1.0)  # tokens that wait in buffers since the streams began are not counted
    begin, before = time.perf_counter(), [processor_seconds(pid) for pid in pids]
    await asyncio.sleep(seconds)
    spent = [processor_seconds(pid) - earlier for pid, earlier in zip(pids, before, strict=True)]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return [[at for at in times if at >= begin] for times in arrivals], spent


def measure(mode: str, streams: int, step_ms: float, seconds: float) -> Result:
    command = (sys.executable, "-m", "benchmarks.processes", "--serve", mode, "--step-ms", str(step_ms))
    with running_server((), command) as server:
        assert server.pid is not None
        pids = [server.pid, *_descendants(server.pid)]
        url = PostUrl.parse(server.base_url + "/v1/completions")
        arrivals, spent = asyncio.run(read_streams(url, pids, streams, seconds))
        memory = sum(map(memory_of, pids))
    count = sum(map(len, arrivals))
    gaps = sorted(1e3 * (after - before) for times in arrivals for before, after in itertools.pairwise(times))
    of_a_token = sorted((1e6 * each / count for each in spent if each), reverse=True)
    beyond = statistics.median(gaps) - step_ms
    return Result(count / seconds, gaps[int(0.99 * len(gaps))], beyond, memory, tuple(of_a_token))


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_of(pid: int) -> float:
    """Return a process's proportional memory in MiB."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(next(line for line in rollup.splitlines() if line.startswith("Pss:")).split()[1]) / 1024


def _descendants(pid: int) -> list[int]:
    listed = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    children = [int(each) for line in listed for each in line.split()]
    return children + [each for child in children for each in _descendants(child)]


def table(results: dict[tuple[float, int, str], list[Result]]) -> str:
    lines = [
        "# The HTTP side and the engine in one process and in two",
        "",
        f"`python -m benchmarks.processes {' '.join(sys.argv[1:])}`, {this_machine.name()}. Medians of "
        f"{min(map(len, results.values()))} rounds.",
        "",
        "| step | streams | processes | tokens/s | p99 between tokens | beyond the step | memory | processor time |",
        "|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    for (step_ms, streams, mode), runs in results.items():
        names = ("tokens_per_second", "p99_ms", "beyond_step_ms", "memory_mib")
        rate, p99, beyond, memory = (statistics.median(getattr(run, name) for run in runs) for name in names)
        spent = " + ".join(
            f"{statistics.median(each):.0f}" for each in zip(*(run.processor_us for run in runs), strict=False)
        )
        lines.append(
            f"| {step_ms:g} ms | {streams} | {mode} | {rate:,.0f} | {p99:.1f} ms | {beyond:.2f} ms | {memory:.0f} MiB "
            f"| {spent} µs |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=float, nargs="+", default=[5.0, 10.0, 30.0], metavar="MS")
    parser.add_argument("--seconds", type=float, default=8.0, help="of steps in one run")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=this_machine.output_file, help="file for the table")
    parser.add_argument("--serve", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--step-ms", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--host", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        make = make_engine if arguments.serve == "one" else EngineElsewhere
        serve(lambda: make(arguments.step_ms / 1e3), ServerConfig(port=arguments.port))
        return
    results: dict[tuple[float, int, str], list[Result]] = {}
    for _ in range(arguments.rounds):
        for step_ms, streams, mode in itertools.product(arguments.steps, arguments.streams, arguments.modes):
            result = measure(mode, streams, step_ms, arguments.seconds)
            results.setdefault((step_ms, streams, mode), []).append(result)
            print(f"{step_ms:g} ms, {streams} streams, {mode}: {result}", flush=True)
    told = table(results)
    print(told)
    if arguments.out is not None:
        arguments.out.write_text(told)


if __name__ == "__main__":
    main()
