"""Measure what an open live page costs the engine, and a browser that draws 100,000 blocks and stays open for hours.

    python -m benchmarks.live_page                          # half a minute; the browser's part needs chromium
    python -m benchmarks.live_page --part server            # four minutes; a quiet machine
    python -m benchmarks.live_page --part top               # half a minute

- engine: the engine's thread takes a look between two steps, and the event loop, which shares the interpreter with
  it, serialises what it found. Both are timed with a scheduler of 64 running sequences in a full pool and ten steps
  from one look to the next, and given as shares of the time between two looks (`octavo.server.live_page`). With no
  page open, none of this is done (tests/server/test_live_page.py).
- server: tokens a second of `octavo serve` with 16 streams, in rounds without and with a page open by turns.
- top: processor time of `octavo top` in a terminal of 120 x 40, with ten events a second of 64 requests that move.
- browser: milliseconds of a frame, and memory after the events of some hours, replayed as fast as the page takes them.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import json
import os
import pty
import socket
import statistics
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from octavo.config import EngineConfig
from octavo.engine.live import LiveView
from octavo.kvcache.spec import KVCacheSpec
from octavo.planner.sources import find_shape
from octavo.request import Request, RequestId
from octavo.sampling_params import SamplingParams
from octavo.scheduler.assembly import assemble_cache, assemble_scheduler
from octavo.scheduler.plan import StepResult
from octavo.scheduler.scheduler import Scheduler
from octavo.server.live_page import MOST_PAGES, _event, pause
from octavo.workloads.server_process import running_server

STEPS_BETWEEN = 10
PAGE = Path(__file__).parents[1] / "src" / "octavo" / "server" / "static"


def busy_scheduler(num_blocks: int, num_seqs: int) -> Scheduler:
    """A scheduler whose sequences have prompts that fill most of the pool."""
    config = EngineConfig(num_blocks=num_blocks, max_num_seqs=num_seqs, max_num_batched_tokens=65_536)
    spec = KVCacheSpec.build(find_shape("smollm2").kv_layers, 16, "bfloat16")
    kv = assemble_cache(config, spec, num_blocks)
    scheduler = assemble_scheduler(config, kv, 1 << 20)
    length = (num_blocks * 16) * 8 // 10 // num_seqs
    for number in range(num_seqs):
        params = SamplingParams(max_tokens=4000, ignore_eos=True, temperature=0.0)
        scheduler.add(Request(RequestId(f"r{number}"), [number] * length, params))
    while any(not seq.output_token_ids for request in scheduler.requests for seq in request.sequences):
        step(scheduler)
    return scheduler


def step(scheduler: Scheduler) -> None:
    plan = scheduler.schedule()
    scheduler.update(plan, StepResult((1,) * plan.num_draws))


def engine_cost(num_blocks: int, num_seqs: int, looks: int) -> dict[str, float]:
    """Milliseconds of a look and of its serialisation, looks a second, and the share of the time that all pages take,
    with one page and with as many as can be open."""
    scheduler, view = busy_scheduler(num_blocks, num_seqs), LiveView()
    view.look(scheduler)
    taken, worded = [], []
    for _ in range(looks):
        for _ in range(STEPS_BETWEEN):
            step(scheduler)
        began = time.perf_counter()
        changes = view.look(scheduler)
        looked = time.perf_counter()
        _event(changes)
        taken.append(looked - began)
        worded.append(time.perf_counter() - looked)
    look, words = statistics.median(taken), statistics.median(worded)
    figures = {"blocks": num_blocks - 1, "look_ms": 1e3 * look, "words_ms": 1e3 * words}
    for num_pages in (1, MOST_PAGES):
        between = pause(look + words, num_pages)
        figures |= {f"looks_per_s_{num_pages}": 1 / between, f"share_{num_pages}": num_pages * (look + words) / between}
    return figures


def server_cost(rounds: int, round_s: float, streams: int) -> dict[str, Any]:
    """The share of the tokens a second that is lost while one page is open, from rounds by turns: without, with, with,
    without, … The page's reader is a process of its own, which discards what it reads."""
    arguments = ["smollm2", "--num-blocks=8001", "--max-model-len=8192", f"--max-num-seqs={streams}"]
    with running_server(arguments) as server, contextlib.ExitStack() as stack:
        stop = threading.Event()
        threads = [threading.Thread(target=keep_busy, args=(server.base_url, i, stop)) for i in range(streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            stack.callback(thread.join)
        stack.callback(stop.set)
        time.sleep(10)
        rates: dict[bool, list[float]] = {False: [], True: []}
        for number in range(2 * rounds):
            with_page = number % 4 in (1, 2)
            with reading(server.base_url) if with_page else contextlib.nullcontext():
                time.sleep(0.3)
                before, began = generated(server.base_url), time.perf_counter()
                time.sleep(round_s)
                rates[with_page].append((generated(server.base_url) - before) / (time.perf_counter() - began))
    pairs = [1 - opened / alone for alone, opened in zip(rates[False], rates[True], strict=True)]
    quartiles = statistics.quantiles(pairs, n=4)
    return {
        "tokens_per_s": statistics.median(rates[False]),
        "lost": statistics.median(pairs),
        "lost_quartiles": [quartiles[0], quartiles[2]],
        "pairs": len(pairs),
    }


def keep_busy(url: str, number: int, stop: threading.Event) -> None:
    """Stream answers until told to stop; the prompts differ, and the contexts stay short."""
    with httpx.Client(base_url=url, timeout=600) as client:
        while not stop.is_set():
            prompt = [100 + (number * 7919 + i) % 1000 for i in range(64)]
            fields = {"model": "smollm2", "prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/completions", json=fields) as response:
                for _ in response.iter_raw():
                    if stop.is_set():
                        break


def generated(url: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))


@contextlib.contextmanager
def reading(url: str) -> Iterator[None]:
    """A page's connection, read by a process that costs little."""
    with subprocess.Popen(["curl", "-sN", "-o", "/dev/null", f"{url}/live/events"]) as process:
        try:
            yield
        finally:
            process.terminate()


def top_cost(num_blocks: int, num_requests: int, seconds: float) -> dict[str, float]:
    """The share of a core that `octavo top` takes, without its start."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    with socket.create_server(("127.0.0.1", 0)) as listener, open(controller, "rb", buffering=0) as drawn:
        command = [sys.executable, "-m", "octavo", "top", f"http://127.0.0.1:{listener.getsockname()[1]}"]
        environment = {**os.environ, "TERM": "xterm-256color"}
        with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment) as process:
            os.close(terminal)
            threading.Thread(target=discard, args=(drawn,), daemon=True).start()
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
                used, began = 0.0, time.perf_counter()
                for number, event in enumerate(events_for_top(num_blocks, num_requests, round(10 * (seconds + 2)))):
                    connection.sendall(_event(event))
                    if number == 20:
                        used, began = processor_seconds(process.pid), time.perf_counter()
                    time.sleep(0.1)
                share = (processor_seconds(process.pid) - used) / (time.perf_counter() - began)
                process.terminate()
    return {"blocks": num_blocks - 1, "top_share": share}


def events_for_top(num_blocks: int, num_requests: int, count: int) -> Iterator[dict[str, Any]]:
    nothing = {"ttft": [0] * 23, "itl": [0] * 26, "counters": [num_requests, 0, 0, 0, 0, 0, 0], "tiers": []}
    yield {"model": "m", "ttft_bounds": [1.0] * 22, "itl_bounds": [1.0] * 25}
    ids = [f"cmpl-{number:032}" for number in range(num_requests)]
    facts = {"tenant": "", "prompt": 500, "max": 4000, "n": 1, "cache": None, "progress": [1, 500, 1, 0]}
    spec = {"num_blocks": num_blocks, "block_bytes": 1 << 20, "host_blocks": 0}
    first = {"spec": spec, "all": ["3" * num_blocks, ""], "added": [{"id": name, **facts} for name in ids]}
    yield {"at": 0.0, "totals": [0] * 5, **first, **nothing}
    for number in range(1, count):
        changed = [value for block in range(60) for value in (1 + (number * 31 + block) % (num_blocks - 1), 1, 0)]
        moved = [[name, 1, 500 + number, number, 0] for name in ids]
        yield {"at": number / 10, "totals": [number] * 5, "blocks": changed, "updated": moved, **nothing}


def discard(drawn: io.RawIOBase) -> None:
    with contextlib.suppress(OSError):  # the terminal is gone
        while drawn.read(65_536):
            pass


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


FRAMES = """(() => {
  spec = {num_blocks: %(blocks)d + 1, block_size: 16, block_bytes: 1024, host_blocks: 0};
  layOut();
  counters = [0, 0, 0, 0, 0, 0, 0];
  tiers = [];
  owners = new Uint16Array(spec.num_blocks);
  codes = new Uint8Array(spec.num_blocks);
  const frame = (share) => {
    const now = performance.now();
    for (let i = 0; i < share * codes.length; i++) {
      const block = 1 + Math.floor(Math.random() * (codes.length - 1));
      codes[block] = Math.floor(Math.random() * 11);
      flash.set(block, now);
    }
    const began = performance.now();
    paint();
    // Until the pixels are there, not merely asked for.
    $("blocks").getContext("2d").getImageData(0, 0, 1, 1);
    return performance.now() - began;
  };
  const median = (share) => Array.from({length: 30}, () => frame(share)).sort((a, b) => a - b)[15];
  return [frame(1), median(0.3), median(0.01)];
})()"""


# One event of a busy server as it comes at most ten times a second: 64 requests move, one in three events replaces
# eight, blocks are evicted, copied and shared.
EVENTS = """(async () => {
  window.eventsOf ??= {number: 0, next: 0, running: []};
  const of = window.eventsOf, size = 2000;
  const nothing = {tiers: [], ttft: new Array(23).fill(0), itl: new Array(26).fill(0)};
  if (!of.number) {
    take({model: "m", ttft_bounds: new Array(22).fill(1), itl_bounds: new Array(25).fill(1)});
    take({spec: {num_blocks: size, block_size: 16, block_bytes: 1024, host_blocks: 0}, tenants: [""], at: 0,
      all: ["0".repeat(size), "0".repeat(size)], totals: [0, 0, 0, 0, 0], counters: [0, 0, 0, 0, 0, 0, 0], ...nothing});
  }
  for (let i = 0; i < %(events)d; i++, of.number++) {
    const n = of.number, came = [], gone = [];
    while (of.running.length < 64) {
      const id = "cmpl-" + String(of.next++).padStart(32, "0");
      came.push({id, tenant: "", prompt: 500, max: 200, n: 1, cache: {cached_tokens: 96, reason: "cold"},
        progress: [1, 500, 1, 0]});
      of.running.push(id);
    }
    if (n %% 3 === 0) gone.push(...of.running.splice(0, 8));
    const blocks = [];
    for (let j = 0; j < 60; j++) blocks.push(1 + (n * 31 + j * 17) %% (size - 1), (n + j) %% 11, 0);
    const moved = of.running.map((id, j) => [id, 1, 500 + n, n %% 200, (n + j) %% 500 ? 0 : 1]);
    take({at: n / 10, came, gone, blocks, moved,
      evicted: [1 + n %% (size - 1)], copied: [[of.running[0], 1 + n %% (size - 1), 1 + (n + 5) %% (size - 1)]],
      totals: [n, n, n, n, n], counters: [64, 0, 0, 0, n, n / 50, n], ...nothing});
    if (n %% 20 === 0) { paint(); await new Promise((done) => setTimeout(done)); }
  }
  return true;
})()"""


@contextlib.contextmanager
def page_without_server() -> Iterator[Any]:
    """The live page in headless chromium: its scripts fail to connect, but draw all the same."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.server.chromium import chromium

    with chromium() as page:
        page.open((PAGE / "page.html").as_uri())
        page.wait_for("document.readyState === 'complete'")
        style = json.dumps((PAGE / "page.css").read_text() + "canvas { width: 1200px }")
        scripts = "".join((PAGE / f"{name}.js").read_text() for name in ("blocks", "details", "page"))
        page.value(
            f"for (const [name, text] of [['style', {style}], ['script', {json.dumps(scripts)}]]) {{"
            "const made = document.createElement(name); made.textContent = text; document.body.append(made); }"
        )
        yield page


def frame_times(blocks: int) -> dict[str, float]:
    """Milliseconds of a frame in headless chromium: all cells new, 30 % changed, 1 % changed."""
    with page_without_server() as page:
        first, many, few = page.value(FRAMES % {"blocks": blocks})
    return {"blocks": blocks, "all_ms": first, "a_third_ms": many, "a_hundredth_ms": few}


def memory_over_time(hours: float, samples: int = 6) -> list[dict[str, float]]:
    """What the page holds after the events of some hours, which it takes as fast as it can: the heap after a garbage
    collection, and the elements of the page."""
    found = []
    with page_without_server() as page:
        for number in range(1, samples + 1):
            for _ in range(round(hours * 36 / samples)):
                page.value(EVENTS % {"events": 1000})
            page.call("HeapProfiler.collectGarbage")
            heap = page.call("Runtime.getHeapUsage")["usedSize"]
            found.append({"hours": hours * number / samples, "heap_mib": heap / 2**20})
            found[-1]["elements"] = page.value("document.querySelectorAll('*').length")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--looks", type=int, default=50)
    parser.add_argument(
        "--part", choices=("engine", "server", "top", "browser"), action="append", help="default: engine, browser"
    )
    parser.add_argument("--hours", type=float, default=1.0, help="of events that the browser takes")
    parser.add_argument("--rounds", type=int, default=60, help="of the server, without and with a page each")
    parser.add_argument("--round-s", type=float, default=1.5)
    parser.add_argument("--streams", type=int, default=16)
    arguments = parser.parse_args()
    parts = arguments.part or ["engine", "browser"]
    result: dict[str, Any] = {}
    if "engine" in parts:
        result["engine"] = [
            engine_cost(blocks + 1, arguments.sequences, arguments.looks) for blocks in (2000, arguments.blocks)
        ]
    if "server" in parts:
        result["server"] = server_cost(arguments.rounds, arguments.round_s, arguments.streams)
    if "top" in parts:
        result["top"] = [top_cost(blocks + 1, arguments.sequences, 10) for blocks in (256, arguments.blocks)]
    if "browser" in parts:
        result["frames"] = frame_times(arguments.blocks)
        result["memory"] = memory_over_time(arguments.hours)
    for name, found in result.items():
        for figures in found if isinstance(found, list) else [found]:
            print(name, {key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()})
    print(json.dumps(result))


if __name__ == "__main__":
    main()
