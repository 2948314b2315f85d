"""Measure what the tiers below the KV cache gain for conversations and documents that return to a pool of 5 %.

    python -m benchmarks.tiers --trace mooncake_conversation.jsonl [--scale 1.0] [--out benchmarks/results]

Two workloads, each of about 70,000 prompt tokens at scale 1 (some six minutes on two cores):

- conversations: those of the recorded chat service that begin in its first ten minutes and have at least three turns,
  in order of arrival; 512 tokens of the trace are 32 here, so that they fit a small model's context;
- documents: 20 documents of 2,000 tokens, chosen by Zipf's law, with questions of 30 tokens each.

The device's pool holds 5 % of the distinct blocks of a workload (and the longest request), host memory 30 % (and twice
what the running requests take); disk and Redis hold all of them. `--concurrency` requests run at any time. Each row has
a new engine; a restart begins with what the previous row left on disk or in Redis, and with nothing else. Without
`redis-server`, the rows that need it are left out. With `--out`, rows are compared with those of earlier calls, and the
fastest run of each is kept, which other programs have disturbed least.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import this_machine
from octavo import LLM, SamplingParams
from octavo.kvcache.host_memory import HostMemory
from octavo.kvcache.spec import eviction_bytes
from octavo.workloads.report import percentile
from octavo.workloads.traces import TOKENS_PER_HASH, read_trace
from octavo.workloads.workload import BenchRequest, random_token_ids
from tests.redis_server import PROGRAM, redis_server

BLOCK_SIZE = 16
TOKENS = 70_000
HASH_TOKENS = 32
LONGEST_HASHES = 60
BEGIN_WITHIN_S = 600.0
LEAST_TURNS = 3
DOCUMENTS, DOCUMENT_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 20, 2_000, 30, 16
ON_DEVICE, IN_HOST = 0.05, 0.3
TIERS = ["device", "host", "disk", "remote"]


@dataclass(frozen=True)
class Row:
    """A run of a workload, the fastest of `runs`; `hit_rates` are the shares of all prompt tokens found, by tier."""

    workload: str
    tiers: str
    hit_rates: dict[str, float]
    mean_ttft_s: float
    p99_ttft_s: float
    requests_s: float
    prompt_tok_s: float
    seconds: float
    runs: int = 1


def conversations(trace: Path, tokens: int) -> list[BenchRequest]:
    """The trace's conversations that return, until they have `tokens` prompt tokens."""
    by_conversation: dict[int, list[int]] = {}
    requests = read_trace(trace)
    for index, request in enumerate(requests):
        if request.hash_ids and len(request.hash_ids) > 1:
            # Almost all begin with the same block; the second tells them apart.
            by_conversation.setdefault(request.hash_ids[1], []).append(index)
    fitting = [
        turns
        for turns in by_conversation.values()
        if len(turns) >= LEAST_TURNS
        and (requests[turns[0]].arrival_s or 0.0) < BEGIN_WITHIN_S
        and all(len(requests[i].hash_ids or ()) <= LONGEST_HASHES for i in turns)
    ]
    random.Random(0).shuffle(fitting)
    chosen: list[int] = []
    left = tokens
    for turns in fitting:
        chosen += turns
        left -= sum(requests[i].prompt_tokens * HASH_TOKENS // TOKENS_PER_HASH for i in turns)
        if left <= 0:
            break
    workload = []
    for index in sorted(chosen):
        request = requests[index]
        ids = [t for h in request.hash_ids or () for t in random_token_ids(random.Random(h), HASH_TOKENS)]
        length = max(1, request.prompt_tokens * HASH_TOKENS // TOKENS_PER_HASH)
        answer = min(32, max(1, request.output_tokens * HASH_TOKENS // TOKENS_PER_HASH))
        workload.append(BenchRequest(ids[:length], answer))
    return workload


def documents(tokens: int) -> list[BenchRequest]:
    """Questions about documents, the k-th most popular asked about 1/k as often as the first."""
    rng = random.Random(0)
    texts = [random_token_ids(rng, DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
    weights = [1 / (k + 1) for k in range(DOCUMENTS)]
    count = max(DOCUMENTS // 4, tokens // (DOCUMENT_TOKENS + QUESTION_TOKENS))
    return [
        BenchRequest(text + random_token_ids(rng, QUESTION_TOKENS), ANSWER_TOKENS)
        for text in rng.choices(texts, weights, k=count)
    ]


def different_blocks(requests: Sequence[BenchRequest]) -> int:
    """The number of the prompts' blocks that an unbounded cache would hold."""
    seen: set[tuple[int, int]] = set()
    for request in requests:
        key = 0
        for start in range(0, len(request.prompt_token_ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
            key = hash((key, tuple(request.prompt_token_ids[start : start + BLOCK_SIZE])))
            seen.add((start, key))
    return len(seen)


def least_disturbed(rows: Sequence[Row]) -> list[Row]:
    """Return the fastest run of each row, in the order of the first ones."""
    fastest: dict[tuple[str, str], Row] = {}
    for row in rows:
        known = fastest.setdefault((row.workload, row.tiers), row)
        runs = known.runs + (row.runs if known is not row else 0)
        fastest[row.workload, row.tiers] = replace(min(known, row, key=lambda each: each.seconds), runs=runs)
    return sorted(fastest.values(), key=lambda row: row.workload)


def described(requests: Sequence[BenchRequest]) -> str:
    """Return a sentence on a workload's size."""
    prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
    return (
        f"{len(requests)} requests of {prompt_tokens:,} prompt tokens, {different_blocks(requests):,} different blocks "
        f"of {BLOCK_SIZE}."
    )


def measure(
    name: str, tiers: str, requests: Sequence[BenchRequest], options: dict[str, Any], concurrency: int, demotion: str
) -> Row:
    """Run a workload with `concurrency` requests at any time."""
    with LLM(block_size=BLOCK_SIZE, max_num_seqs=concurrency, kv_demotion=demotion, **options) as llm:
        core, waiting = llm.core, deque(requests)
        sent: dict[str, float] = {}
        without_token: dict[str, Any] = {}
        first_tokens: list[float] = []
        found: Counter[str] = Counter()
        began = time.perf_counter()
        while waiting or sent:
            while waiting and len(sent) < concurrency:
                each = waiting.popleft()
                params = SamplingParams(max_tokens=each.max_tokens, temperature=0.0, ignore_eos=True)
                request = core.inputs.make(each.prompt_token_ids, params)
                sent[request.request_id], without_token[request.request_id] = time.perf_counter(), request
                core.add(request)
            outputs = core.step()
            now = time.perf_counter()
            for request_id, request in list(without_token.items()):
                if request.sequences[0].num_output_tokens:
                    first_tokens.append(now - sent[request_id])
                    del without_token[request_id]
            for output in outputs:
                if output.finished:
                    if output.error is not None:
                        raise SystemExit(f"{tiers}: a request failed: {output.error}")
                    found.update(output.cached_by_tier or {"device": output.num_cached_tokens})
                    del sent[output.request_id]
        seconds = time.perf_counter() - began
    gc.collect()
    total = sum(len(request.prompt_token_ids) for request in requests)
    row = Row(
        name,
        tiers,
        {tier: found[tier] / total for tier in TIERS},
        sum(first_tokens) / len(first_tokens),
        percentile(first_tokens, 99),
        len(requests) / seconds,
        total / seconds,
        seconds,
    )
    print(json.dumps(asdict(row)), flush=True)
    return row


def run(name: str, requests: Sequence[BenchRequest], arguments: argparse.Namespace, redis: str | None) -> list[Row]:
    blocks = different_blocks(requests)
    longest = max(len(request.prompt_token_ids) + request.max_tokens for request in requests)
    pool = max(int(ON_DEVICE * blocks), -(-longest // BLOCK_SIZE) + 8) + 1
    with LLM(arguments.model, num_blocks=64) as llm:
        spec = llm.core.scheduler.kv.spec
    each = spec.block_bytes + HostMemory.bookkeeping_bytes(BLOCK_SIZE) + eviction_bytes("adaptive")
    print(f"{name}: {len(requests)} requests, {blocks} blocks", flush=True)
    # No swap space: nothing needs it here, and prefixes would use it too.
    device: dict[str, Any] = {"model": arguments.model, "num_blocks": pool, "swap_space": 0}
    # Requests that wait for a store may hold half of it.
    slots = max(int(IN_HOST * blocks), 2 * arguments.concurrency * -(-longest // BLOCK_SIZE))
    host = device | {"kv_host_memory": slots * each}
    rows = []

    def add(tiers: str, options: dict[str, Any], demotion: str = "all") -> None:
        rows.append(measure(name, tiers, requests, options, arguments.concurrency, demotion))

    add("device only", device)
    add("+ host memory", host)
    for demotion, tiers in (("on_second_use", "+ host + disk, `on_second_use`"), ("all", "+ host + disk")):
        with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="octavo-disk-") as folder:
            disk = host | {"kv_disk": folder, "kv_disk_size": "16GiB"}
            add(tiers, disk, demotion)
            if demotion == "all":
                add("the same after a restart", disk)
    if redis is not None:
        add("+ host + Redis", host | {"kv_remote": redis})
        add("another server, same Redis", host | {"kv_remote": redis})
    return rows


def table(rows: Sequence[Row], sizes: dict[str, str], arguments: argparse.Namespace) -> str:
    lines = [
        "# What the tiers below the KV cache are worth",
        "",
        f"`python -m benchmarks.tiers --scale {arguments.scale:g}`, {arguments.model}, {this_machine.name()}. "
        f"{arguments.concurrency} requests under way at any time. The pool holds {ON_DEVICE:.0%} of a workload's "
        f"blocks or its longest request, host memory {IN_HOST:.0%}, disk and Redis all. `--kv-demotion all` except "
        "where a row says otherwise. Each row is the fastest of "
        f"{min(row.runs for row in rows)} or more runs, which other programs disturbed least. Hits are shares of all "
        "prompt tokens, by the tier that they came from.",
    ]
    for name in dict.fromkeys(row.workload for row in rows):
        base = next(row for row in rows if row.workload == name)
        lines += [
            "",
            f"## {name.capitalize()}",
            "",
            f"{sizes[name]}",
            "",
            "| tiers | device | host | disk | Redis | hits | mean TTFT | p99 TTFT | prompt tok/s | to the first |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for row in (row for row in rows if row.workload == name):
            hits = " | ".join(f"{row.hit_rates[tier]:.1%}" for tier in TIERS)
            faster = row.prompt_tok_s / base.prompt_tok_s
            lines.append(
                f"| {row.tiers} | {hits} | {sum(row.hit_rates.values()):.1%} | {row.mean_ttft_s * 1e3:,.0f} ms "
                f"| {row.p99_ttft_s * 1e3:,.0f} ms | {row.prompt_tok_s:,.0f} | {faster:.2f} × |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--trace", type=Path, help="mooncake_conversation.jsonl; without it, documents only")
    parser.add_argument(
        "--only", choices=["conversations", "documents"], help="measure one; --out keeps the other's rows"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="share of the prompt tokens of each workload")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--dir", type=Path, help="where disk tiers are made; default: the system's temporary folder")
    parser.add_argument("--out", type=this_machine.output_folder, help="folder for tiers.md and .json")
    arguments = parser.parse_args()
    tokens = int(TOKENS * arguments.scale)
    workloads = {"documents": documents(tokens)}
    if arguments.trace is not None:
        workloads = {"conversations": conversations(arguments.trace, tokens), **workloads}
    rows: list[Row] = []
    for name, requests in workloads.items():
        if arguments.only in (None, name):
            with redis_server() if PROGRAM else nullcontext() as redis:
                rows += run(name, requests, arguments, None if redis is None else redis.url)
    file = None if arguments.out is None else arguments.out / "tiers.json"
    if file is not None and file.exists():
        rows = least_disturbed([Row(**each) for each in json.loads(file.read_text())] + rows)
    text = table(rows, {name: described(requests) for name, requests in workloads.items()}, arguments)
    print(text)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.with_suffix(".md").write_text(text)
        file.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
