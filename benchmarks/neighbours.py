"""Measure blocks from a neighbour over a link of a given rate: two servers, each in a network namespace of its own.

    sudo .venv/bin/python -m benchmarks.neighbours [--rate 1gbit 10gbit] [--tokens 2048] [--runs 5] [--fetches 8]

Prints the time to the first token of a prompt that is computed, fetched from the other server, and cached; and the time
between tokens of a stream at the other server, while nothing or one block after another is fetched from it. The servers
have one thread each and the packaged model. Needs Linux, root and `tc` with tbf.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import httpx

from octavo.workloads.report import percentile

KEY, SECRET = "way-to-the-servers", "only our servers know"
HOSTS = ("10.99.0.1", "10.99.0.2")
SPACES = ("octavo-near-a", "octavo-near-b")
PORT, LENT = 8000, 9400
STREAM_TOKENS = 200


def run(command: str) -> None:
    subprocess.run(command.split(), check=True)


@contextmanager
def link(rate: str) -> Iterator[None]:
    """Two namespaces with a link of this rate in both directions."""
    try:
        run(f"ip link add {SPACES[0][:15]} type veth peer name {SPACES[1][:15]}")
        for space, host in zip(SPACES, HOSTS, strict=True):
            run(f"ip netns add {space}")
            run(f"ip link set {space[:15]} netns {space}")
            inside = f"ip netns exec {space}"
            run(f"{inside} ip addr add {host}/24 dev {space[:15]}")
            run(f"{inside} ip link set {space[:15]} up")
            run(f"{inside} ip link set lo up")
            run(f"{inside} tc qdisc add dev {space[:15]} root tbf rate {rate} burst 4mb latency 50ms")
        yield
    finally:
        for space in SPACES:
            subprocess.run(["ip", "netns", "del", space], check=False)


@contextmanager
def server(index: int, tokens: int) -> Iterator[None]:
    address = f"{HOSTS[index]}:{LENT}"
    options = f"--num-threads 1 --max-model-len {tokens + 256} --kv-cache-memory 512MiB --kv-host-memory 1GiB"
    near = f"--kv-neighbours {address} --kv-demotion all --router-key {KEY} --host {HOSTS[index]} --port {PORT}"
    command = f"ip netns exec {SPACES[index]} {sys.executable} -m octavo serve {options} {near}"
    environment = {**os.environ, "OCTAVO_KV_REMOTE_SECRET": SECRET}
    process = subprocess.Popen(
        [*command.split(), "--allow-unauthenticated", "--allowed-hosts", HOSTS[index]],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def stream(index: int, prompt: list[int], hint: str | None = None, count: int = 1) -> tuple[list[float], int]:
    """Return the times since the request at which tokens came, and how many of the prompt's were cached."""
    headers = {} if hint is None else {"Octavo-Router-Key": KEY, "Octavo-KV-Hint": hint}
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": count, "ignore_eos": True, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    times, cached, began = [], 0, time.perf_counter()
    url = f"http://{HOSTS[index]}:{PORT}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=300) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if event.get("choices"):
                    times.append(time.perf_counter() - began)
                elif usage := event.get("usage"):
                    cached = usage["prompt_tokens_details"]["cached_tokens"]
                else:
                    raise RuntimeError(line)
        answer.raise_for_status()
    return times, cached


def measure(tokens: int, runs: int, fetches: int) -> None:
    """Measure from the second server's namespace, where this runs."""
    for index in (0, 1):
        until = time.monotonic() + 120
        while True:
            try:
                httpx.get(f"http://{HOSTS[index]}:{PORT}/ready").raise_for_status()
                break
            except httpx.HTTPError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.3)
    source = random.Random(1)
    hint = f"{HOSTS[0]}:{LENT}"

    def prompt() -> list[int]:
        return [source.randrange(100, 40_000) for _ in range(tokens)]

    for index in (0, 1):
        stream(index, prompt())
    found: dict[str, list[float]] = {"computed": [], "fetched": [], "cached": []}
    for _ in range(runs):
        new = prompt()
        found["computed"].append(stream(0, new)[0][0])
        time.sleep(0.3)  # until the copies of its last blocks are made
        times, cached = stream(1, new, hint)
        assert cached >= tokens - 32, f"{cached} of {tokens} tokens were fetched"
        found["fetched"].append(times[0])
        found["cached"].append(stream(1, new)[0][0])
    for name, values in found.items():
        print(f"  first token, {name}: {min(values) * 1e3:.0f} ms at best, {percentile(values, 50) * 1e3:.0f} median")
    prompts = [prompt() for _ in range(fetches)]
    for each in prompts:
        stream(0, each)
    for fetched in ([], prompts) if prompts else ():
        stop, num_tokens = threading.Event(), [0]
        thread = threading.Thread(target=fetch, args=(fetched, hint, stop, num_tokens))
        thread.start()
        times, _ = stream(0, source.sample(range(100, 40_000), 64), count=STREAM_TOKENS)
        stop.set()
        thread.join()
        gaps = [late - early for early, late in pairwise(times)]
        middle, high = (percentile(gaps, share) * 1e3 for share in (50, 99))
        print(f"  between tokens while {num_tokens[0]} tokens are fetched: {middle:.1f} ms median, {high:.1f} p99")
    metrics = httpx.get(f"http://{HOSTS[1]}:{PORT}/metrics").text
    for line in metrics.splitlines():
        if 'tier="neighbour"' in line and ("read_bytes" in line or "seconds_sum" in line):
            print(f"  {line}")


def fetch(prompts: list[list[int]], hint: str, stop: threading.Event, num_tokens: list[int]) -> None:
    """Fetch one prompt after another until `stop`; counts their tokens."""
    for prompt in prompts:
        if not stop.is_set():
            num_tokens[0] += stream(1, prompt, hint)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", nargs="+", default=["1gbit", "10gbit"])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--fetches", type=int, default=8, help="prompts fetched during a stream; 0: no stream")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        measure(given.tokens, given.runs, given.fetches)
        return
    for rate in given.rate:
        print(f"{rate}, {given.tokens} tokens")
        with link(rate), ExitStack() as servers:
            for index in (0, 1):
                servers.enter_context(server(index, given.tokens))
            counts = f"--tokens {given.tokens} --runs {given.runs} --fetches {given.fetches}"
            inside = f"{sys.executable} -m benchmarks.neighbours --inside {counts}"
            run(f"ip netns exec {SPACES[1]} {inside}")


if __name__ == "__main__":
    main()
