"""Readers of public request traces, and synthetic prompts of the same lengths.

| format             | how it is recognised                     | contains                                |
|--------------------|------------------------------------------|-----------------------------------------|
| Mooncake (JSONL)   | a line is an object                      | arrivals, lengths, hashes of 512 tokens |
| Azure LLM (CSV)    | TIMESTAMP,ContextTokens,GeneratedTokens  | arrivals, lengths                       |
| VTC (CSV)          | arrival_s,client,prompt_tokens,output_tokens | arrivals, lengths, clients          |
| workload (JSON)    | the file is an array                     | the token ids themselves                |
"""

from __future__ import annotations

import csv
import io
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.text_file import read_text
from octavo.workloads.workload import END_TOKEN_ID, BenchRequest, random_token_ids

TOKENS_PER_HASH = 512
"""Number of prompt tokens that one of Mooncake's hash ids stands for; the last one of a prompt may stand for fewer."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request.

    Attributes:
        arrival_s: seconds after the trace's first request; None if the format has no times.
        hash_ids: one id per 512 prompt tokens; equal ids stand for equal tokens after an equal prefix. None if unknown.
        client: the sender; None if unknown.
        token_ids: the prompt itself; None if the trace does not have it.
    """

    arrival_s: float | None
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None = None
    client: str | None = None
    token_ids: tuple[int, ...] | None = None


def read_trace(path: str | Path) -> list[TraceRequest]:
    """Read the requests of a trace in any known format, by arrival, the first at 0.

    Raises:
        ConfigError: the file cannot be read, is in no known format, or has a bad line; the message names the line.
    """
    requests = _parse(str(path), read_text(path))
    if not requests:
        raise ConfigError(f"{path} has no request")
    times = [request.arrival_s for request in requests if request.arrival_s is not None]
    if len(times) < len(requests):
        return requests
    start = min(times)
    requests = [replace(r, arrival_s=r.arrival_s - start) for r in requests if r.arrival_s is not None]
    return sorted(requests, key=lambda request: request.arrival_s or 0.0)


def _parse(name: str, text: str) -> list[TraceRequest]:
    start = text.lstrip()[:1]
    if start == "[":
        try:
            entries = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{name}: {error}") from error
        return _parse_entries(name, "entry", enumerate(entries), _from_workload)
    if start == "{":
        lines = ((number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip())
        return _parse_entries(name, "line", lines, lambda line: _from_mooncake(json.loads(line)))
    rows = csv.DictReader(io.StringIO(text))
    columns = [column.strip() for column in rows.fieldnames or ()]
    for known, from_row in _CSV_FORMATS.items():
        if set(known) <= set(columns):
            rows.fieldnames = columns
            return _parse_entries(name, "line", enumerate(rows, start=2), from_row)
    formats = "; ".join(",".join(known) for known in _CSV_FORMATS)
    raise ConfigError(
        f"{name} is not a known trace: neither JSON (a workload), nor JSON lines (Mooncake), nor CSV with {formats}"
    )


def _parse_entries(name: str, unit: str, entries: Any, from_entry: Callable[[Any], TraceRequest]) -> list[TraceRequest]:
    requests = []
    for number, entry in entries:
        try:
            request = from_entry(entry)
        except KeyError as error:
            raise ConfigError(f"{name}, {unit} {number}: {error.args[0]!r} is missing") from error
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            raise ConfigError(f"{name}, {unit} {number}: {error}") from error
        if request.arrival_s is not None and not math.isfinite(request.arrival_s):
            raise ConfigError(f"{name}, {unit} {number}: an arrival must be finite, got {request.arrival_s:g}")
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            lengths = f"{request.prompt_tokens} in and {request.output_tokens} out"
            raise ConfigError(f"{name}, {unit} {number}: both lengths must be at least 1, got {lengths}")
        requests.append(request)
    return requests


def _from_workload(entry: dict[str, Any]) -> TraceRequest:
    token_ids = tuple(int(token_id) for token_id in entry["prompt_token_ids"])
    arrival_s = entry.get("arrival_s")
    return TraceRequest(
        arrival_s=None if arrival_s is None else float(arrival_s),
        prompt_tokens=len(token_ids),
        output_tokens=int(entry["max_tokens"]),
        token_ids=token_ids,
    )


def _from_mooncake(entry: dict[str, Any]) -> TraceRequest:
    hash_ids = tuple(int(hash_id) for hash_id in entry["hash_ids"])
    prompt_tokens = int(entry["input_length"])
    if len(hash_ids) != -(-prompt_tokens // TOKENS_PER_HASH):
        raise ValueError(f"{len(hash_ids)} hash ids do not match {prompt_tokens} tokens, {TOKENS_PER_HASH} each")
    return TraceRequest(
        arrival_s=float(entry["timestamp"]) / 1000,
        prompt_tokens=prompt_tokens,
        output_tokens=int(entry["output_length"]),
        hash_ids=hash_ids,
    )


def _from_azure(row: dict[str, str]) -> TraceRequest:
    return TraceRequest(
        arrival_s=datetime.fromisoformat(row["TIMESTAMP"].strip()).timestamp(),
        prompt_tokens=int(row["ContextTokens"]),
        output_tokens=int(row["GeneratedTokens"]),
    )


def _from_vtc(row: dict[str, str]) -> TraceRequest:
    return TraceRequest(
        arrival_s=float(row["arrival_s"]),
        prompt_tokens=int(row["prompt_tokens"]),
        output_tokens=int(row["output_tokens"]),
        client=row["client"].strip(),
    )


_CSV_FORMATS: dict[tuple[str, ...], Callable[[dict[str, str]], TraceRequest]] = {
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _from_azure,
    ("arrival_s", "client", "prompt_tokens", "output_tokens"): _from_vtc,
}


def tokens_per_hash(scale_lengths: float) -> int:
    """Return how many tokens a hash stands for once lengths are scaled."""
    return max(1, round(TOKENS_PER_HASH * scale_lengths))


def scaled(trace: Sequence[TraceRequest], scale_lengths: float) -> list[TraceRequest]:
    """Return requests whose prompts and outputs are `scale_lengths` times as long; prompts that a trace holds are cut.

    Raises:
        ConfigError: the scale is not positive, or is above 1 for a trace that holds the prompts themselves.
    """
    if not 0 < scale_lengths < math.inf:
        raise ConfigError(f"scale_lengths must be above 0, got {scale_lengths:g}")
    if scale_lengths > 1 and any(request.token_ids is not None for request in trace):
        raise ConfigError("a workload that holds its prompts can be scaled down, not up")

    def length(request: TraceRequest) -> int:
        # The last hash may stand for fewer tokens: it is scaled separately, so that the ones before stay aligned.
        whole, rest = divmod(request.prompt_tokens, TOKENS_PER_HASH) if request.hash_ids else (0, request.prompt_tokens)
        return max(1, whole * tokens_per_hash(scale_lengths) + round(rest * scale_lengths))

    return [
        replace(
            request,
            prompt_tokens=length(request),
            output_tokens=max(1, round(request.output_tokens * scale_lengths)),
            token_ids=None if request.token_ids is None else request.token_ids[: length(request)],
        )
        for request in trace
    ]


def as_requests(
    trace: Sequence[TraceRequest], *, scale_lengths: float = 1.0, seed: int = 0, end: int = END_TOKEN_ID
) -> list[BenchRequest]:
    """Return requests with the trace's arrival times, and its lengths, scaled; the same seed makes the same prompts.

    Equal hash ids become equal blocks of `512 * scale_lengths` tokens, so the trace's prefix sharing is preserved. If
    the trace holds the prompts themselves, they are truncated to the scaled length.

    Raises:
        ConfigError: see `scaled`.
    """
    block_len = tokens_per_hash(scale_lengths)

    # The blocks of a popular prefix are used thousands of times; the bound limits the memory for a long trace.
    @lru_cache(maxsize=4096)
    def block_tokens(hash_id: int) -> list[int]:
        return random_token_ids(random.Random(f"{seed}/block/{hash_id}"), block_len, end)

    def prompt(index: int, request: TraceRequest) -> list[int]:
        if request.token_ids is not None:
            return list(request.token_ids)
        if request.hash_ids is None:
            return random_token_ids(random.Random(f"{seed}/request/{index}"), request.prompt_tokens, end)
        return [token for hash_id in request.hash_ids for token in block_tokens(hash_id)][: request.prompt_tokens]

    return [
        BenchRequest(
            prompt_token_ids=prompt(index, request),
            max_tokens=request.output_tokens,
            arrival_s=request.arrival_s,
            client=request.client,
        )
        for index, request in enumerate(scaled(trace, scale_lengths))
    ]
