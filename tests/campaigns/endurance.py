"""Run everything at once on a real server for ten minutes: answers must equal those of the same requests alone.

    python -m tests.campaigns.endurance [--seconds 600] [--modes swap/hashed,recompute/radix] [--streams 256]
    python -m tests.campaigns.endurance --seconds 180 --model smollm2 --streams 32 --questions 40
    python -m tests.campaigns.endurance --join FILE

Writes endurance.md in the folder of this machine's results. `octavo serve --deterministic` runs in a separate
process with a pool so small that sequences are preempted all the time, and with faults in its steps
(`faulty_server.py`):

    256 clients, sending again and again ────┐
      1/3 leave at a random moment           │
      some read slowly, some not at all      ├──> octavo serve ──> small pool, faults, a limited queue
    a flood of 300 bodies every ten seconds ─┘
    the answer to each question alone, on the idle server, before and after

All that was received of an answer is compared, even if its client left or the request ended with an error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks import this_machine
from octavo.workloads.server_process import running_server
from tests.campaigns.attacks import write_model
from tests.campaigns.endurance_clients import CHATML, LONG, Client, Manner, Question, Reply, questions
from tests.campaigns.faulty_server import CURSE
from tests.campaigns.watched_server import resident

ADMIN = "a-key-of-the-admin"
TENANTS = ("ada", "ben", "cleo", "dan")
# A tenant whose rate is limited, and one whose requests only the queue limits.
FLOODS = ("limited", "unlimited")
FLOOD_EVERY, FLOOD = 10.0, 300
LEAVE, SLOW, UNREAD, CURSED = 1 / 3, 0.06, 0.01, 0.005
KEYS = f"""
[tenants.admin]
keys = ["{ADMIN}"]
admin = true
[tenants.limited]
keys = ["limited"]
requests_per_minute = 600
max_concurrency = 40
[tenants.unlimited]
keys = ["unlimited"]
""" + "".join(f'[tenants.{name}]\nkeys = ["{name}"]\n' for name in TENANTS)
# Blocks of 16 tokens: a twentieth of what 256 streams would hold.
POOL = [
    "--max-num-seqs",
    "64",
    "--block-size",
    "16",
    "--max-num-batched-tokens",
    "256",
    "--limits",
    "max_waiting_requests=500",
]
TIMEOUTS = ["--server-limits", "write_timeout=5,body_timeout=5"]
# Default preemption mode and prefix cache of each round.
MODES = "swap/hashed,recompute/radix"
PREEMPTION_MODES, PREFIX_CACHES = ("auto", "recompute", "swap"), ("hashed", "radix")


@dataclass
class Round:
    """What one server was sent, and how it answered.

    Attributes:
        asked: number of bodies sent, however they ended.
        outcomes: how they ended.
        wrong: answers that differ from those of the same request alone.
        memory: (bodies sent so far, MiB) over time.
    """

    asked: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[tuple[int, float]] = field(default_factory=list)
    most_running: int = 0


class Load:
    """The clients of a round."""

    def __init__(self, port: int, known: list[tuple[Question, Reply]], long: tuple[Question, Reply], seed: int) -> None:
        self.found = Round()
        self._client = Client(port)
        self._known = known
        self._long = long
        self._rng = random.Random(seed)
        self._usual = 1.0
        self._open = 0
        # Seconds of running time left: a benchmark elsewhere on the machine may stop all of this for a while.
        self._left = 0.0
        self.stops = 0

    async def run(self, seconds: float, streams: int, sample: Any) -> None:
        self._left = seconds
        clients = [self._client_loop(TENANTS[i % len(TENANTS)]) for i in range(streams)]
        await asyncio.gather(*clients, self._floods(), self._sampling(sample))

    async def _client_loop(self, key: str) -> None:
        while self._left > 0:
            question, whole = self._rng.choice(self._known)
            draw = self._rng.random()
            if draw < CURSED:
                # Nothing of such a prompt can be computed.
                await self._ask(Question("/v1/completions", {"prompt": [*CURSE] * 3, "max_tokens": 4}), Reply(), key)
                continue
            manner, stream = Manner(), question.streams and self._rng.random() < 0.9
            if (draw := self._rng.random()) < LEAVE:
                manner = Manner(leaves_after=self._rng.random() * 1.5 * self._usual)
            elif draw < LEAVE + SLOW:
                manner = Manner(pause=self._rng.choice([0.005, 0.05]), piece=self._rng.choice([700, 4096]))
            elif draw < LEAVE + SLOW + UNREAD:
                question, whole = self._long
                manner = Manner(leaves_after=20.0, pause=9.0)
            elif draw < LEAVE + SLOW + 2 * UNREAD:
                question, whole = self._long
            await self._ask(question, whole, key, manner, stream=stream)

    async def _ask(
        self, question: Question, whole: Reply, key: str, manner: Manner = Manner(), *, stream: bool = True
    ) -> None:
        self.found.asked += 1
        self._open += 1
        self.found.most_running = max(self.found.most_running, self._open)
        began = time.monotonic()
        reply = await self._client.ask(question, key, manner, stream=stream)
        self._open -= 1
        if reply.error:
            outcome = f"{reply.status} {reply.error}" + ("" if whole.choices else ", uncomputable")
        elif reply.is_whole:
            outcome = "whole"
            if manner == Manner():
                self._usual += 0.05 * (time.monotonic() - began - self._usual)
        elif manner.leaves_after is not None and time.monotonic() - began >= manner.leaves_after:
            outcome = "left"
        else:
            outcome = "cut: not read in time" if manner.pause > 5 else "closed"
        self.found.outcomes[outcome] += 1
        if (whole.choices and not reply.is_part_of(whole)) or (outcome == "whole" and reply.choices != whole.choices):
            self.found.wrong.append(json.dumps([question.body, str(reply), str(whole)]))
        if reply.error == "engine_dead":
            self._left = 0.0  # nothing more can be learnt
        if reply.status in (429, 503):
            # As clients do that are told to retry later.
            await asyncio.sleep(0.5)

    async def _floods(self) -> None:
        while self._left > FLOOD_EVERY:
            await asyncio.sleep(FLOOD_EVERY)
            some = self._rng.choices(self._known, k=FLOOD)
            key = self._rng.choice(FLOODS)
            asked = (self._ask(question, whole, key, stream=question.streams) for question, whole in some)
            await asyncio.gather(*asked)

    async def _sampling(self, sample: Any) -> None:
        while self._left > 0:
            self.found.memory.append((self.found.asked, sample()))
            began = time.monotonic()
            await asyncio.sleep(1.0)
            passed = time.monotonic() - began
            self.stops += passed > 3
            self._left -= min(passed, 3)


def operate(port: int, method: str, path: str) -> httpx.Response:
    """Send an operator's request."""
    headers = {"Authorization": f"Bearer {ADMIN}"}
    return httpx.request(method, f"http://127.0.0.1:{port}{path}", headers=headers, timeout=60)


def alone(port: int, question: Question) -> Reply:
    """The answer on an idle server that has nothing cached."""
    operate(port, "POST", "/reset_prefix_cache").raise_for_status()
    reply = asyncio.run(Client(port).ask(question, "unlimited", stream=False))
    if reply.status != 200:
        raise RuntimeError(f"alone, {question} is answered {reply}")
    return reply


def counters(port: int) -> dict[str, float]:
    lines = operate(port, "GET", "/metrics").text.splitlines()
    return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def settled(port: int, seconds: float = 60.0) -> dict[str, Any]:
    """The cache's report once nothing runs and its accounting has been audited since."""
    until, audits = time.monotonic() + seconds, None
    while time.monotonic() < until:
        now = counters(port)
        if now["vllm:num_requests_running"] == now["vllm:num_requests_waiting"] == 0:
            audits = now["octavo:audits_total"] if audits is None else audits
            if now["octavo:audits_total"] > audits:
                return {**operate(port, "GET", "/debug/kv").json(), "health": operate(port, "GET", "/health").json()}
        else:
            audits = None
        time.sleep(0.5)
    return {**operate(port, "GET", "/debug/kv").json(), "health": operate(port, "GET", "/health").json()}


def unexpected(log: str) -> list[str]:
    """Tracebacks of the log that do not end in an injected fault, and critical messages."""
    found = [line for line in log.splitlines() if " CRITICAL " in line]
    for part in log.split("Traceback (most recent call last):")[1:]:
        last = next((line for line in part.splitlines() if line and not line.startswith(" ")), "")
        if "injected" not in last:
            found.append(last)
    return found


def options_of(mode: str) -> list[str]:
    """`swap/hashed` -> the server's options."""
    preemption, prefix_cache = mode.split("/")
    return ["--preemption-mode", preemption, "--prefix-cache", prefix_cache]


def modes(text: str) -> list[str]:
    """`swap/hashed,recompute/radix` -> its parts; raises `ArgumentTypeError` if one is invalid."""
    found = text.split(",")
    for mode in found:
        preemption, _, prefix_cache = mode.partition("/")
        if preemption not in PREEMPTION_MODES or prefix_cache not in PREFIX_CACHES:
            raise argparse.ArgumentTypeError(
                f"{mode!r} is not one of {'|'.join(PREEMPTION_MODES)} / one of {'|'.join(PREFIX_CACHES)}"
            )
    return found


def endure(mode: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run one round: a server, its answers alone, the load, and what is left behind."""
    keys, log, counts = folder / "keys.toml", folder / "log", folder / "counters"
    calm = folder / "CALM"
    keys.write_text(KEYS)
    calm.touch()
    words = ["block", "table", "the", "scheduler", "waits", "for", "its", "turn", "ünï", "日本", "😀", "queue"]
    asked = questions(random.Random(7), args.questions, words)
    server = [sys.executable, str(Path(__file__).with_name("faulty_server.py")), str(log), str(counts), args.faults]
    options = ["--keys-file", str(keys), "--no-access-log", "--deterministic", *POOL, *TIMEOUTS, *options_of(mode)]
    options += ["--model", args.model or str(folder / "model"), *args.server.split()]
    with running_server(options, [*server, "serve"]) as running:
        port = int(running.base_url.rpartition(":")[2])
        assert running.pid is not None
        pid = running.pid
        known = [(question, alone(port, question)) for question in asked]
        long = Question("/v1/completions", LONG)
        load = Load(port, known, (long, alone(port, long)), args.seed)
        calm.unlink()
        asyncio.run(load.run(args.seconds, args.streams, lambda: resident(pid)))
        calm.touch()
        if any("engine_dead" in outcome for outcome in load.found.outcomes):
            raise RuntimeError(f"the engine died: {unexpected(log.read_text(errors='replace'))}")
        report = settled(port)
        after = known[:: max(1, len(known) // 50)]
        changed = [question.body for question, reply in after if alone(port, question) != reply]
        memory = resident(pid)
        metrics = counters(port)
    found = load.found
    return {
        "mode": mode,
        "seconds": round(args.seconds),
        "stops": load.stops,
        "streams": args.streams,
        "asked": found.asked,
        "outcomes": dict(found.outcomes.most_common()),
        "wrong": len(found.wrong),
        "examples": found.wrong[:3],
        "changed": changed,
        "after": len(after),
        "most_running": found.most_running,
        "memory": [*_thinned(found.memory), (found.asked, memory)],
        "active": sum(report["bytes"][state] for state in ("active", "swapped")),
        "left": len(report["requests"]),
        "health": report["health"],
        "failed_audits": metrics["octavo:failed_audits_total"],
        "audits": metrics["octavo:audits_total"],
        "preemptions": metrics["vllm:num_preemptions_total"],
        "failed_steps": metrics["octavo:failed_steps_total"],
        "hits": metrics["vllm:prefix_cache_hits_total"],
        "tokens": metrics["vllm:generation_tokens_total"],
        "counters": json.loads(counts.read_text()),
        "unexpected": unexpected(log.read_text(errors="replace"))[:5],
    }


def _thinned(memory: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Eight of the samples, evenly over time."""
    last = len(memory) - 1
    return [memory[last * i // 7] for i in range(8)] if last >= 7 else memory


def failings(row: dict[str, Any]) -> list[str]:
    """The names of what must not have happened."""
    found = [name for name in ("wrong", "changed", "active", "left", "failed_audits", "unexpected") if row[name]]
    allowed = ["whole", "left", "cut", "429", "503", "200 step_failed", "500 step_failed"]
    if row["stops"]:
        allowed.append("closed")  # clients that did not read while everything was stopped
    found += [name for name in row["outcomes"] if not name.startswith(tuple(allowed))]
    return found + (["health"] if row["health"] != {"status": "ok"} else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="of each mode")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--modes", type=modes, default=modes(MODES), help=f"default: {MODES}")
    parser.add_argument("--faults", default="0.004", help="probability of a fault at each of four places of a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="", help="default: a tiny model of random weights")
    parser.add_argument("--server", default="--num-blocks 321 --swap-space 512KiB --num-threads 1", help="its options")
    parser.add_argument("--rows", type=Path, help="append to this JSON file, to be put together by --join")
    parser.add_argument("--join", type=Path, help="write the report from this file instead")
    parser.add_argument(
        "--out", type=this_machine.output_file, default=str(this_machine.results_folder() / "endurance.md")
    )
    args = parser.parse_args()
    rows: list[dict[str, Any]] = json.loads(args.join.read_text()) if args.join else []
    if not args.join:
        for mode in args.modes:
            with tempfile.TemporaryDirectory() as folder:
                name = args.model or "a tiny model of random weights"
                if not args.model:
                    # Large weights: with small ones a token hardly depends on those before it.
                    write_model(Path(folder) / "model", CHATML, initializer_range=0.4, max_position_embeddings=1024)
                rows.append({**endure(mode, args, Path(folder)), "model": name})
                print(json.dumps(rows[-1], indent=1), flush=True)
    if args.rows:
        known = json.loads(args.rows.read_text()) if args.rows.exists() else []
        args.rows.write_text(json.dumps(known + rows))
    else:
        args.out.write_text(report_of(rows))
    return 1 if any(failings(row) for row in rows) else 0


def report_of(rows: Sequence[dict[str, Any]]) -> str:
    return "\n".join([HEAD.format(machine=this_machine.name()), *map(_section, rows)])


def _section(row: dict[str, Any]) -> str:
    memory = "\n".join(f"| {asked:,} | {size:.0f} |" for asked, size in row["memory"])
    outcomes = "\n".join(f"| {name} | {count:,} |" for name, count in row["outcomes"].items())
    swap, scheduler, faults = (row["counters"][name] for name in ("swap", "scheduler", "faults"))
    places = ", ".join(f"{name} {count:,}" for name, count in sorted(faults.items()))
    claims = [
        f"**Answers that differ from the same request alone: {row['wrong']}.**",
        f"Asked once more, alone, on the same server afterwards: {row['after']} questions; answered otherwise than "
        f"before: {len(row['changed'])}.",
        f"**Active and swapped bytes at the end: {row['active']}; requests left: {row['left']}.**",
        f"Idle audits: {row['audits']:.0f}, failed: {row['failed_audits']:.0f}; `/health`: {row['health']['status']}. "
        f"Tracebacks in the log that are no injected fault: {len(row['unexpected'])}.",
        f"Preemptions: {row['preemptions']:,.0f}. To host memory went {swap['sequences_out']:,} sequences, "
        f"{swap['sequences_in']:,} came back, {swap['sequences_lost']:,} were given up for want of room; "
        f"{scheduler['recomputed_tokens']:,} tokens were given up to be computed again.",
        f"Failed steps: {row['failed_steps']:,.0f}. Faults injected: {places}.",
    ]
    return "\n".join(
        [
            f"## {row['model']}, `{' '.join(options_of(row['mode']))}`",
            "",
            f"{row['seconds']} s, {row['streams']} clients, at most {row['most_running']:,} requests at once, "
            f"{row['asked']:,} in all; {row['tokens']:,.0f} tokens drawn, {row['hits']:,.0f} tokens of prompts found "
            "in the prefix cache.",
            "",
            *(f"- {claim}" for claim in claims),
            "",
            "| how a request ended | requests |",
            "|---|---:|",
            outcomes,
            "",
            "| requests asked | memory of the server, MiB |",
            "|---:|---:|",
            memory,
            "",
        ]
    )


HEAD = """# Endurance: everything at once

`python -m tests.campaigns.endurance` on {machine}; clients and server shared one core,
beside other work. `octavo serve --deterministic` has a pool of 320 blocks of 16 tokens, where its clients would hold
several times that. A third of them leave at a random moment, some read slowly or not at all, every ten seconds 300 more
come at once, and steps raise at random before and after planning and computing, and while blocks are published. So that
sequences are preempted all the time, admission holds back no blocks for those that run. Each question is asked alone
first, on the same server.

- whole: it came to its end, and is that of the same request alone: tokens, text, log-probabilities, reasons.
- left: its client left. cut: by the server, after `write_timeout`. 429, 503: refused, as floods are.
- step_failed: ended by a fault that met this request alone again, or half-way through taking in its tokens; what had
  come before is compared as well. uncomputable: prompts for which every step raises.
"""

if __name__ == "__main__":
    sys.exit(main())
