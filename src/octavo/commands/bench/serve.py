"""`octavo bench serve`: an open-loop client for this server, or any other with OpenAI's completions API."""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from octavo.commands.bench.workload_options import Workload, WorkloadOptions, clip_to_model, load_requests
from octavo.commands.common_options import add_json_option
from octavo.commands.options import add_options, engine_argv, given_options
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.option import option
from octavo.units import SECONDS
from octavo.workloads import report, serving
from octavo.workloads.http import PostUrl
from octavo.workloads.server_process import RunningServer, fetch_json, running_server
from octavo.workloads.serving import Target
from octavo.workloads.workload import BenchRequest, arrival_times

EXIT_ERROR = 1

DESCRIPTION = "Send streaming completions at their scheduled times (open loop) and report latency and throughput."


_client = partial(option, group="client options")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(WorkloadOptions):
    """The options of `octavo bench serve`."""

    base_url: str | None = _client(
        None,
        "URL of a running server, which knows the model as --model (default: start one with the engine options)",
        metavar="URL",
    )
    api_key: str | None = _client(None, "key to send as a bearer token", metavar="KEY", secret=True)
    request_rate: float | None = _client(
        None, "requests per second, or inf (default: a trace's own arrival times, else inf)", above=0, most=math.inf
    )
    burstiness: float = _client(
        1.0, "how evenly requests arrive; 1: Poisson; below: in bursts; above: more evenly", above=0
    )
    max_concurrency: int | None = _client(None, "maximum number of requests in flight", least=1)
    timeout: float = _client(600.0, "timeout of a request", unit=SECONDS, above=0)
    return_token_ids: bool = _client(
        True, "request the token ids of each chunk (default: on; off for a server that refuses the field)"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_option(parser)
    add_options(parser, ServeOptions)
    add_options(parser, EngineConfig, positional_model=True)


def run(args: argparse.Namespace) -> int:
    options = given_options(args, EngineConfig)
    asked = ServeOptions(**given_options(args, ServeOptions))
    _check(asked, options)
    work = load_requests(asked)
    with _server(asked, options) as (server, started):
        model, max_model_len = _served_model(server.base_url, asked.api_key)
        target = Target(
            base_url=server.base_url,
            model=(None if started else options.get("model")) or model,
            api_key=asked.api_key,
            return_token_ids=asked.return_token_ids,
            timeout_s=asked.timeout,
        )
        work = clip_to_model(work, max_model_len)
        arrivals, how = _arrivals(asked, work)
        asyncio.run(_warm_up(target, asked.token_id_end))
        cpu = time.process_time()
        records = asyncio.run(serving.run_load(target, work.requests, arrivals, asked.max_concurrency))
        cpu = time.process_time() - cpu
    figures = serving.summary(records)
    result: dict[str, Any] = {"bench": "serve", "base_url": server.base_url, "model": target.model}
    if started:
        result |= {"options": options, "startup_s": round(server.startup_s, 3)}
    result |= {"workload": work.name, "clipped": work.num_clipped, "arrivals": how}
    result |= {"max_concurrency": asked.max_concurrency, **figures}
    result |= {"client_cpu_share": round(cpu / max(figures["duration_s"], 1e-9), 4), "machine": report.machine()}
    print(report.as_json_line(result) if args.json else report.as_table(result))
    return EXIT_ERROR if figures["failed"] else 0


def _check(asked: ServeOptions, options: Mapping[str, Any]) -> None:
    if asked.base_url is None:
        return
    try:
        PostUrl.parse(asked.base_url)
    except ValueError as error:
        raise ConfigError(f"--base-url: {error}") from error
    if set(options) - {"model"}:
        raise ConfigError(
            f"engine options ({', '.join(sorted(set(options) - {'model'}))}) have no effect on the server at --base-url"
        )


@contextmanager
def _server(asked: ServeOptions, options: Mapping[str, Any]) -> Iterator[tuple[RunningServer, bool]]:
    """Yield the server to measure, and whether this command started it."""
    if asked.base_url is not None:
        url = asked.base_url.rstrip("/").removesuffix("/v1")
        yield RunningServer(url, 0.0), False
        return
    argv = engine_argv(options)
    if asked.api_key:
        argv.append(f"--api-key={asked.api_key}")
    with running_server(argv) as server:
        yield server, True


def _served_model(base_url: str, api_key: str | None) -> tuple[str, int | None]:
    """Return the first model's name, and its length limit if the server reports it (vLLM's extension)."""
    models = fetch_json(base_url + "/v1/models", api_key)
    try:
        first = models["data"][0]
        return str(first["id"]), first.get("max_model_len")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ConfigError(f"{base_url}/v1/models lists no model") from error


def _arrivals(asked: ServeOptions, work: Workload) -> tuple[list[float], str]:
    """Return the arrival time of each request, and a description of the arrivals for the report."""
    if asked.request_rate is None and work.trace_arrivals is not None:
        return work.trace_arrivals, "trace"
    rate = math.inf if asked.request_rate is None else asked.request_rate
    times = list(arrival_times(len(work.requests), rate, asked.burstiness, asked.workload_seed))
    return times, "all at once" if rate == math.inf else f"{rate:g} a second, burstiness {asked.burstiness:g}"


async def _warm_up(target: Target, token_id_end: int) -> None:
    """Send one short request, whose tokens share no prefix with the workload's.

    Raises:
        ConfigError: the request failed; all others would fail too, each after its own wait.
    """
    request = BenchRequest([max(0, token_id_end - 1 - i) for i in range(8)], 4)
    record = (await serving.run_load(replace(target, timeout_s=target.timeout_s), [request], [0.0]))[0]
    if record.error is not None:
        raise ConfigError(f"the warm-up request to {target.base_url} failed: {record.error}")
