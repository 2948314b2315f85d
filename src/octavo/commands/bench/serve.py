"""`octavo bench serve`: an open-loop client for this server, or any other with OpenAI's completions API."""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from octavo.commands.bench.workload_options import Workload, add_workload_options, clip_to_model, load_requests
from octavo.commands.common_options import add_json_option
from octavo.commands.options import add_options, engine_argv, given_options
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.workloads import report, serving
from octavo.workloads.http import PostUrl
from octavo.workloads.server_process import RunningServer, fetch_json, running_server
from octavo.workloads.serving import Target
from octavo.workloads.workload import BenchRequest, arrival_times

EXIT_ERROR = 1

DESCRIPTION = "Send streaming completions at their scheduled times (open loop) and report latency and throughput."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("client options")
    group.add_argument(
        "--base-url",
        metavar="URL",
        help="URL of a running server, which knows the model as --model (default: start one with the engine options)",
    )
    group.add_argument("--api-key", metavar="KEY", help="key to send as a bearer token")
    group.add_argument(
        "--request-rate",
        type=float,
        metavar="X",
        help="requests per second, or inf (default: a trace's own arrival times, else inf)",
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="X",
        help="how evenly requests arrive; 1: Poisson; below: in bursts; above: more evenly",
    )
    group.add_argument("--max-concurrency", type=int, metavar="N", help="maximum number of requests in flight")
    group.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="timeout of a request")
    group.add_argument(
        "--return-token-ids",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="request the token ids of each chunk (default: on; off for a server that refuses the field)",
    )
    add_json_option(parser)
    add_workload_options(parser)
    add_options(parser, EngineConfig, positional_model=True)


def run(args: argparse.Namespace) -> int:
    options = given_options(args, EngineConfig)
    _check(args, options)
    work = load_requests(args)
    with _server(args, options) as (server, started):
        model, max_model_len = _served_model(server.base_url, args.api_key)
        target = Target(
            base_url=server.base_url,
            model=(None if started else options.get("model")) or model,
            api_key=args.api_key,
            return_token_ids=args.return_token_ids,
            timeout_s=args.timeout,
        )
        work = clip_to_model(work, max_model_len)
        arrivals, how = _arrivals(args, work)
        asyncio.run(_warm_up(target, args.token_id_end))
        cpu = time.process_time()
        records = asyncio.run(serving.run_load(target, work.requests, arrivals, args.max_concurrency))
        cpu = time.process_time() - cpu
    figures = serving.summary(records)
    result: dict[str, Any] = {"bench": "serve", "base_url": server.base_url, "model": target.model}
    if started:
        result |= {"options": options, "startup_s": round(server.startup_s, 3)}
    result |= {"workload": work.name, "clipped": work.num_clipped, "arrivals": how}
    result |= {"max_concurrency": args.max_concurrency, **figures}
    result |= {"client_cpu_share": round(cpu / max(figures["duration_s"], 1e-9), 4), "machine": report.machine()}
    print(report.as_json_line(result) if args.json else report.as_table(result))
    return EXIT_ERROR if figures["failed"] else 0


def _check(args: argparse.Namespace, options: Mapping[str, Any]) -> None:
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency must be at least 1, got {args.max_concurrency}")
    if not args.timeout > 0:
        raise ConfigError(f"--timeout must be above 0, got {args.timeout:g}")
    if args.base_url is None:
        return
    try:
        PostUrl.parse(args.base_url)
    except ValueError as error:
        raise ConfigError(f"--base-url: {error}") from error
    if set(options) - {"model"}:
        raise ConfigError(
            f"engine options ({', '.join(sorted(set(options) - {'model'}))}) have no effect on the server at --base-url"
        )


@contextmanager
def _server(args: argparse.Namespace, options: Mapping[str, Any]) -> Iterator[tuple[RunningServer, bool]]:
    """Yield the server to measure, and whether this command started it."""
    if args.base_url is not None:
        url = args.base_url.rstrip("/").removesuffix("/v1")
        yield RunningServer(url, 0.0), False
        return
    argv = engine_argv(options)
    if args.api_key:
        argv.append(f"--api-key={args.api_key}")
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


def _arrivals(args: argparse.Namespace, work: Workload) -> tuple[list[float], str]:
    """Return the arrival time of each request, and a description of the arrivals for the report."""
    if args.request_rate is None and work.trace_arrivals is not None:
        return work.trace_arrivals, "trace"
    rate = math.inf if args.request_rate is None else args.request_rate
    times = list(arrival_times(len(work.requests), rate, args.burstiness, args.workload_seed))
    return times, "all at once" if rate == math.inf else f"{rate:g} a second, burstiness {args.burstiness:g}"


async def _warm_up(target: Target, token_id_end: int) -> None:
    """Send one short request, whose tokens share no prefix with the workload's.

    Raises:
        ConfigError: the request failed; all others would fail too, each after its own wait.
    """
    request = BenchRequest([max(0, token_id_end - 1 - i) for i in range(8)], 4)
    record = (await serving.run_load(replace(target, timeout_s=target.timeout_s), [request], [0.0]))[0]
    if record.error is not None:
        raise ConfigError(f"the warm-up request to {target.base_url} failed: {record.error}")
