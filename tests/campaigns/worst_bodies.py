"""Measure what the worst permitted value of each body field costs the event loop and the engine's thread.

    python -m tests.campaigns.worst_bodies            writes worst_bodies.md in the folder of this machine's results
    python -m tests.campaigns.worst_bodies --profile  prints what the worst iteration and step spent their time on
    python -m tests.campaigns.worst_bodies --only beams --only prompts --out rows.md     selected rows

A server with SmolLM2 runs in this process; bodies are sent by another. While each is served, another client's stream is
decoding, and the maximum of four figures is taken:

- the event loop, per iteration: CPU time of its thread between two polls of its sockets, all callbacks together. This
  is what a body costs everyone else on the loop, whatever else the machine does meanwhile;
- lag of the event loop: how late a task wakes that sleeps for a millisecond over and over. Other threads, the
  interpreter's lock and the operating system contribute to it: the baseline shows how much is not due to the body;
- the engine's thread, per step: CPU time apart from the model and the sampler (accepting, scheduling, updating,
  delivering);
- the sampler, per step: CPU time of its thread.

The baseline is a small body beside the same stream.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import pstats
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks import this_machine
from octavo.config import EngineConfig
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.builder import build_engine
from octavo.request_limits import DEFAULT_LIMITS as LIMITS
from octavo.scheduler.plan import StepPlan, StepResult
from octavo.server.app import create_app
from octavo.server.bodies.chat_messages import MAX_MARKS
from octavo.server.bodies.responses_body import MOST_REPEATED_BYTES
from octavo.server.config import ServerConfig
from octavo.server.http.connection import InFlight
from octavo.server.http.listening import bind
from octavo.server.interpreter_settings import settle_interpreter
from octavo.server.run import Server
from tests.campaigns.timed_sampler import SamplerTime

COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
OLLAMA_CHAT, COMPLETION = "/api/chat", "/completion"
# After this time the client gives a body up: the worst is over by then.
SECONDS = 8.0

_CLIENT = """
import http.client, sys, time
port, path, file, seconds = int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
body = open(file, "rb").read()
connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
began = time.perf_counter()
try:
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    size = len(response.read())
    print(response.status, round(time.perf_counter() - began, 3), size)
except TimeoutError:
    print("cancelled", round(time.perf_counter() - began, 3), 0)
"""


def _note_collection(phase: str, details: dict[str, int]) -> None:
    if phase == "stop" and details["generation"] > 0:
        print(f"(a collection of generation {details['generation']})")


@dataclass
class Meter:
    """The maxima seen since `reset`, in seconds.

    Args:
        profiles: keep the profiles of the worst iteration and the worst step; everything takes about twice as long.
    """

    profiles: bool = False
    loop: float = 0.0
    lag: float = 0.0
    host: float = 0.0
    sampler: float = 0.0
    steps: int = 0
    loop_profile: cProfile.Profile | None = None
    host_profile: cProfile.Profile | None = None

    def reset(self) -> None:
        self.loop = self.lag = self.host = self.sampler = 0.0
        self.loop_profile = self.host_profile = None

    def watch_loop(self, loop: Any) -> None:
        run_once = loop._run_once

        def watched() -> None:
            began = time.thread_time()
            with self._profiled() as profile:
                run_once()
            took = time.thread_time() - began
            if took > self.loop:
                self.loop, self.loop_profile = took, profile

        loop._run_once = watched

    @contextmanager
    def _profiled(self) -> Iterator[cProfile.Profile | None]:
        """Profile this thread's CPU time, if profiles are wanted."""
        if not self.profiles:
            yield None
            return
        profile = cProfile.Profile(time.thread_time)
        gc.callbacks.append(_note_collection)  # so that the profile has a line for collections
        profile.enable()
        try:
            yield profile
        finally:
            profile.disable()
            gc.callbacks.remove(_note_collection)

    def print_profiles(self) -> None:
        for what, profile in (("event loop", self.loop_profile), ("engine's thread", self.host_profile)):
            if profile is not None:
                print(f"--- the worst of the {what}")
                pstats.Stats(profile).sort_stats("tottime").print_stats(28)

    async def sample_lag(self) -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            self.lag = max(self.lag, time.perf_counter() - began - 0.001)

    def watch(self, engine: AsyncEngine) -> None:
        core = engine.core
        sampler = core.runner._sampler
        sampler_time = SamplerTime(sampler, time.thread_time)
        in_runner = 0.0

        execute, step = core.runner.execute, engine._step

        def executed(plan: StepPlan) -> StepResult:
            nonlocal in_runner
            began = time.thread_time()
            try:
                return execute(plan)
            finally:
                in_runner += time.thread_time() - began

        core.runner.execute = executed

        def watched() -> bool:
            nonlocal in_runner
            in_runner = 0.0
            sampler_time.take()
            began = time.thread_time()
            with self._profiled() as profile:
                goes_on = step()
            host = time.thread_time() - began - in_runner
            if host > self.host:
                self.host, self.host_profile = host, profile
            self.sampler = max(self.sampler, sampler_time.take())
            self.steps += 1
            return goes_on

        engine._step = watched


@contextmanager
def served(meter: Meter) -> Iterator[int]:
    """Run a server whose engine and event loop are measured; yields its port."""
    core = build_engine(EngineConfig(kv_cache_memory=2**30))
    assert core.inputs.grammars is not None
    core.inputs.grammars.prepare().result()  # as `octavo serve` does
    engine = AsyncEngine(core, "smollm2", idle_audit_seconds=1e6)
    meter.watch(engine)
    settle_interpreter()
    config = ServerConfig(port=0, shutdown_timeout=0)
    listener = bind("127.0.0.1", 0)
    in_flight = InFlight()
    server = Server(create_app(engine, config, in_flight), config, in_flight, "smollm2")

    async def run() -> None:
        meter.watch_loop(asyncio.get_running_loop())
        sampling = asyncio.ensure_future(meter.sample_lag())
        await engine.start()
        try:
            await server.serve(sockets=[listener])
        finally:
            sampling.cancel()
            await engine.shutdown(0)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@contextmanager
def streaming(port: int) -> Iterator[None]:
    """Let another client's stream decode meanwhile."""
    body = json.dumps({"prompt": [7], "max_tokens": 8000, "ignore_eos": True, "stream": True}).encode()
    with tempfile.NamedTemporaryFile() as file:
        file.write(body)
        file.flush()
        argv = [sys.executable, "-c", _CLIENT, str(port), COMPLETIONS, file.name, "60"]
        with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as client:
            try:
                yield
            finally:
                client.kill()


def wait_for_steps(meter: Meter, count: int, seconds: float = 20.0) -> None:
    until, goal = time.monotonic() + seconds, meter.steps + count
    while meter.steps < goal and time.monotonic() < until:
        time.sleep(0.005)


def post(port: int, path: str, body: bytes, seconds: float = SECONDS) -> list[str]:
    """Send a body from a separate process; returns (status, seconds, size of the answer)."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(body)
        file.flush()
        argv = [sys.executable, "-c", _CLIENT, str(port), path, file.name, str(seconds)]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()


def _stops() -> list[str]:
    return [chr(97 + i) * 127 + "!" for i in range(LIMITS.max_stop_bytes // 128)]


def bodies() -> Iterator[tuple[str, str, Any]]:
    """Yield (name, path, body); bytes are sent as they are, all else as JSON."""
    few = {"max_tokens": 16, "ignore_eos": True}
    stops = _stops()
    ids = list(range(1000, 1000 + LIMITS.max_stop_token_ids))
    yield "baseline: 5 tokens", COMPLETIONS, {"prompt": [5] * 5, **few}
    yield f"`n`: {LIMITS.max_n}", COMPLETIONS, {"prompt": [5] * 5, "n": LIMITS.max_n, **few}
    yield (
        f"`stop`: {len(stops)} of 128 characters, n = {LIMITS.max_n}",
        COMPLETIONS,
        {"prompt": "aaaa" * 64, "stop": stops, "n": LIMITS.max_n, **few},
    )
    yield (
        f"`stop_token_ids`: {len(ids)}, `min_tokens`, n = {LIMITS.max_n}",
        COMPLETIONS,
        {"prompt": [5], "stop_token_ids": ids, "min_tokens": 16, "n": LIMITS.max_n, **few},
    )
    yield (
        f"`logit_bias`: {LIMITS.max_logit_bias} entries, n = {LIMITS.max_n}",
        COMPLETIONS,
        {"prompt": [5], "logit_bias": {str(i): -1 for i in range(LIMITS.max_logit_bias)}, "n": LIMITS.max_n, **few},
    )
    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
    yield "penalties over 7,000 tokens, n = 8", COMPLETIONS, {"prompt": list(range(7000)), "n": 8, **penalties, **few}
    beams = {"use_beam_search": True, "temperature": 0, "best_of": LIMITS.max_beam_width, "n": 1}
    yield f"beams: {LIMITS.max_beam_width}", COMPLETIONS, {"prompt": [5], **beams, **few}
    yield (
        f"beams: {LIMITS.max_beam_width}, {len(ids)} `stop_token_ids`, `logprobs` 20",
        COMPLETIONS,
        {"prompt": [5], **beams, "stop_token_ids": ids, "logprobs": 20, **few},
    )
    yield (
        f"{LIMITS.max_body_prompts} prompts",
        COMPLETIONS,
        {"prompt": [[i % 40000 + 1] for i in range(LIMITS.max_body_prompts)], "max_tokens": 2, "ignore_eos": True},
    )
    yield (
        f"{LIMITS.max_body_sequences // LIMITS.max_n} prompts of 8,000 ids, n = {LIMITS.max_n}",
        COMPLETIONS,
        {"prompt": [[i] * 8000 for i in range(LIMITS.max_body_sequences // LIMITS.max_n)], "n": LIMITS.max_n},
    )
    yield "2,048 prompts, n = 64 (refused)", COMPLETIONS, {"prompt": ["a"] * 2048, "n": 64}
    yield "`prompt`: 2.5 million ids, 15 MB (refused)", COMPLETIONS, {"prompt": [1234] * 2_500_000}
    yield "`prompt`: 15 MB of one letter (refused)", COMPLETIONS, {"prompt": "a" * 15_000_000}
    yield "`prompt`: 600 kB of text (refused once tokenised)", COMPLETIONS, {"prompt": "the blocks " * 54_000}
    yield (
        "`prompt_logprobs`: 20 over 4,000 tokens, n = 8",
        COMPLETIONS,
        {
            "prompt": list(range(4000)),
            "prompt_logprobs": 20,
            "n": 8,
            "max_tokens": 1,
        },
    )
    yield (
        "`echo`, `logprobs` 5 over 4,000 tokens, streamed",
        COMPLETIONS,
        {
            "prompt": list(range(4000)),
            "echo": True,
            "logprobs": 5,
            "stream": True,
            "max_tokens": 1,
        },
    )
    yield "`messages`: 300,000 empty ones (refused)", CHAT, {"messages": [{}] * 300_000}
    message = {"role": "user", "content": "x"}
    yield f"`messages`: {LIMITS.max_messages}", CHAT, {"messages": [message] * LIMITS.max_messages, "max_tokens": 1}
    yield "`role`: 10 MB (refused)", CHAT, {"messages": [{"role": "r" * 10_000_000, "content": "x"}]}
    yield "`model`: 10 MB (refused)", COMPLETIONS, {"prompt": [5], "model": "m" * 10_000_000}
    yield "`cache_salt`: 8 MB (refused)", COMPLETIONS, {"prompt": [5], "cache_salt": "s" * 8_000_000}
    yield "`metadata`: 15 MB, ignored", COMPLETIONS, {"prompt": [5], "metadata": {"m": "x" * 15_000_000}, **few}
    yield "a million unknown fields (refused)", COMPLETIONS, {f"f{i}": 1 for i in range(1_000_000)}
    yield "no JSON: 16 MB of [ (refused)", COMPLETIONS, b"[" * 16_000_000
    yield (
        "/tokenize with `return_token_strs`, 600 kB",
        TOKENIZE,
        {"prompt": "the " * 150_000, "return_token_strs": True},
    )
    yield "/tokenize: 600 kB of one letter", TOKENIZE, {"prompt": "a" * 600_000}
    yield from _constrained_bodies()


def _constrained_bodies() -> Iterator[tuple[str, str, Any]]:
    """Bodies that restrict what may be drawn, and other fields that can hold a lot."""
    few = {"max_tokens": 16, "ignore_eos": True, "n": LIMITS.max_n}
    words = [f"{i:04}" + "x" * (LIMITS.max_bad_word_length // 2) for i in range(LIMITS.max_bad_words)]
    yield f"`bad_words`: {len(words)}, n = {LIMITS.max_n}", COMPLETIONS, {"prompt": [5], "bad_words": words, **few}
    ids = list(range(100, 100 + LIMITS.max_allowed_token_ids))
    yield (
        f"`allowed_token_ids`: {len(ids)}, n = {LIMITS.max_n}",
        COMPLETIONS,
        {"prompt": [5], "allowed_token_ids": ids, **few},
    )
    yield (
        "`truncate_prompt_tokens`: 600 kB of text, of which 5 tokens are kept",
        COMPLETIONS,
        {"prompt": "the blocks " * 54_000, "truncate_prompt_tokens": 5, "max_tokens": 1},
    )
    message = {"role": "user", "content": "x"}
    most = LIMITS.max_grammar_bytes - 100
    properties = {f"field_{i:04}": {"type": "string", "maxLength": 40} for i in range(most // 60)}
    schema = {"type": "object", "properties": properties, "required": list(properties)[:100]}
    yield (
        f"`response_format`: a schema of {len(json.dumps(schema)):,} bytes, n = {LIMITS.max_n}",
        CHAT,
        {
            "messages": [message],
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
            **few,
        },
    )
    choices = [f"choice number {i}" for i in range(LIMITS.max_grammar_bytes // 24)]
    yield (
        f"`structured_outputs`: {len(choices):,} choices, n = {LIMITS.max_n}",
        COMPLETIONS,
        {"prompt": [5], "structured_outputs": {"choice": choices}, **few},
    )
    yield (
        f"`structured_outputs`: an expression of many ways, n = {LIMITS.max_n}",
        COMPLETIONS,
        {"prompt": [5], "structured_outputs": {"regex": "(a|b|c|[a-z]{1,40}){1,40}" * 8}, **few},
    )
    parameters = {"type": "object", "properties": {"x": {"type": "string", "description": "d" * 1700}}}
    tools = [
        {"type": "function", "function": {"name": f"tool_{i}", "parameters": parameters}}
        for i in range(LIMITS.max_tools)
    ]
    yield (
        f"`tools`: {len(tools)}, {len(json.dumps(tools)):,} bytes",
        CHAT,
        {"messages": [message], "tools": tools, "max_tokens": 4},
    )
    short = [
        {"type": "function", "function": {"name": f"tool_{i}", "parameters": {"type": "object", "properties": {}}}}
        for i in range(LIMITS.max_tools)
    ]
    yield (
        f"`tools`: {len(short)} short ones, `tool_choice` required, n = {LIMITS.max_n}",
        CHAT,
        {"messages": [message], "tools": short, "tool_choice": "required", **few},
    )
    inputs = [[i % 40_000 + 1] * 8 for i in range(LIMITS.max_body_prompts)]
    yield f"/v1/embeddings: {len(inputs)} inputs", "/v1/embeddings", {"input": inputs}
    yield from _newer_bodies(_stops(), tools)
    yield from _native_bodies(tools)


def _newer_bodies(stops: list[str], tools: list[dict[str, Any]]) -> Iterator[tuple[str, str, Any]]:
    """Bodies of /v1/messages and /v1/responses, and those that pin prefixes."""
    control = {"type": "ephemeral", "ttl": "24h"}
    marked = [{"role": "user", "content": f"{i} " + "the " * 1900, "cache_control": control} for i in range(MAX_MARKS)]
    yield f"`cache_control`: {len(marked)} pins over 7,700 tokens", CHAT, {"messages": marked, "max_tokens": 4}
    few = {"max_tokens": 4}
    parts = [{"type": "text", "text": f"{i} " + "the " * 1900, "cache_control": control} for i in range(MAX_MARKS)]
    yield (
        f"/v1/messages: {len(parts)} parts pinned, `stop_sequences` {len(stops)}",
        MESSAGES,
        {"messages": [{"role": "user", "content": parts}], "stop_sequences": stops, **few},
    )
    yield "/v1/messages: 300,000 empty ones (refused)", MESSAGES, {"messages": [{}] * 300_000, **few}
    message = {"role": "user", "content": "x"}
    yield (
        f"/v1/messages: {LIMITS.max_messages} (refused once tokenised)",
        MESSAGES,
        {"messages": [message, {"role": "assistant", "content": "y"}] * (LIMITS.max_messages // 2), **few},
    )
    flat = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in tools]
    yield f"/v1/messages: {len(flat)} `tools`", MESSAGES, {"messages": [message], "tools": flat, **few}
    yield (
        "/v1/messages: `metadata` of 15 MB",
        MESSAGES,
        {"messages": [message], "metadata": {"m": "x" * 15_000_000}, **few},
    )
    few = {"max_output_tokens": 16}
    yield "/v1/responses: `input` of 15 MB (refused)", RESPONSES, {"input": "a" * 15_000_000, **few}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}] * LIMITS.max_messages
    yield f"/v1/responses: {len(items)} items (refused once tokenised)", RESPONSES, {"input": items, **few}
    yield "/v1/responses: 300,000 empty items (refused)", RESPONSES, {"input": [{}] * 300_000, **few}
    metadata = {f"k{i}": "x" * 500 for i in range(MOST_REPEATED_BYTES // 520)}
    yield (
        f"/v1/responses: `metadata` of {len(json.dumps(metadata)):,} bytes, streamed and stored",
        RESPONSES,
        {"input": "x", "metadata": metadata, "stream": True, "store": True, **few},
    )
    named = [{"type": "function", **t["function"]} for t in tools]
    yield f"/v1/responses: {len(named)} `tools`", RESPONSES, {"input": "x", "tools": named, **few}
    yield (
        "/v1/responses: 7,700 tokens, stored, `top_logprobs` 20",
        RESPONSES,
        {"input": "the " * 7700, "top_logprobs": 20, "include": ["message.output_text.logprobs"], **few},
    )


def _native_bodies(tools: list[dict[str, Any]]) -> Iterator[tuple[str, str, Any]]:
    """Bodies of Ollama's and llama.cpp's own APIs."""
    message = {"role": "user", "content": "x"}
    few = {"options": {"num_predict": 4}}
    yield "/api/chat: 300,000 empty messages (refused)", OLLAMA_CHAT, {"messages": [{}] * 300_000}
    turns = [message, {"role": "assistant", "content": "y"}] * (LIMITS.max_messages // 2 - 1)
    yield f"/api/chat: {len(turns)} messages, the oldest dropped", OLLAMA_CHAT, {"messages": [*turns, message], **few}
    long = [{**turn, "content": "the " * 1000} for turn in turns[:200]]
    yield "/api/chat: 200 messages of 4 kB, the oldest dropped", OLLAMA_CHAT, {"messages": [*long, message], **few}
    yield f"/api/chat: {len(tools)} `tools`", OLLAMA_CHAT, {"messages": [message], "tools": tools, **few}
    options = {f"o{i}": 1 for i in range(1_000_000)}
    yield "/api/chat: a million unknown `options`", OLLAMA_CHAT, {"messages": [message], "options": options}
    yield "/api/generate: `prompt` of 15 MB (refused)", "/api/generate", {"prompt": "a" * 15_000_000, **few}
    context = [i % 40_000 + 1 for i in range(7_700)]
    yield "/api/generate: `context` of 7,700 tokens", "/api/generate", {"prompt": "x", "context": context, **few}
    yield (
        "/api/generate: `context` of 2,000,000 (refused)",
        "/api/generate",
        {"prompt": "x", "context": [5] * 2_000_000},
    )
    inputs = ["the block " * 8] * LIMITS.max_body_prompts
    yield f"/api/embed: {len(inputs)} inputs", "/api/embed", {"input": inputs}
    yield "/api/embed: 600 kB, cut", "/api/embed", {"input": "the " * 150_000}
    yield "/api/show: `name` of 10 MB (refused)", "/api/show", {"name": "m" * 10_000_000}
    yield (
        "/completion: `n_probs` 20, 7,700 tokens",
        COMPLETION,
        {"prompt": "the " * 7_700, "n_probs": 20, "n_predict": 4},
    )
    biases = [[i, 1.0] for i in range(500_000)]
    yield "/completion: 500,000 pairs of `logit_bias` (refused)", COMPLETION, {"prompt": "x", "logit_bias": biases}
    yield "/completion: `prompt` of 15 MB (refused)", COMPLETION, {"prompt": "a" * 15_000_000}
    half = "the " * 1_800_000
    yield "/infill: 15 MB (no tokens for it: refused)", "/infill", {"input_prefix": half, "input_suffix": half}


def run(only: list[str] | None, *, profiles: bool, seconds: float = SECONDS) -> list[str]:
    meter = Meter(profiles)
    rows = ["| body | size | answer | seconds | event loop, ms | its lag, ms | engine's thread, ms | sampler, ms |"]
    rows.append("|---|---:|---|---:|---:|---:|---:|---:|")
    with served(meter) as port:
        # The processes that parse large bodies start with the first of these.
        post(port, COMPLETIONS, json.dumps({"prompt": [5] * 40_000}).encode())
        for name, path, content in bodies():
            if only and not any(part in name for part in only):
                continue
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            with streaming(port):
                # By then the previous body's work is over, and the stream runs.
                wait_for_steps(meter, 30)
                meter.reset()
                status, took, size = post(port, path, body, seconds)
                wait_for_steps(meter, 3)
                figures = [meter.loop, meter.lag, meter.host, meter.sampler]
            row = [
                name,
                f"{len(body):,}",
                f"{status}, {int(size):,} bytes",
                took,
                *(f"{f * 1e3:.1f}" for f in figures),
            ]
            rows.append("| " + " | ".join(row) + " |")
            print(rows[-1], flush=True)
            meter.print_profiles()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="bodies whose name holds this; may be given several times")
    parser.add_argument(
        "--out", type=this_machine.output_file, default=str(this_machine.results_folder() / "worst_bodies.md")
    )
    parser.add_argument("--profile", action="store_true", help="print profiles, and write no report")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="when a client gives up")
    args = parser.parse_args()
    rows = run(args.only, profiles=args.profile, seconds=args.seconds)
    if args.profile:
        return
    args.out.write_text(HEAD.format(machine=this_machine.name()) + "\n".join(rows) + "\n")


HEAD = """# The worst permitted value of each field

`python -m tests.campaigns.worst_bodies`, on {machine},
SmolLM2-135M, 256 sequences at most, one stream of somebody else's decoding meanwhile. Event loop: CPU time of its
thread in one iteration, the most of any. Its lag: how late a task that sleeps for a millisecond wakes at worst, which
also holds what other threads, the interpreter's lock and the operating system do: compare it with the baseline's.
Engine's thread: CPU time of a step besides model and sampler, the most of any step. Sampler: its CPU time in a step,
the most of any. Bodies that take longer than 8 s are given up by their client ("cancelled").

"""

if __name__ == "__main__":
    main()
