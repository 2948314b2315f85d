"""Test whether a tenant can find out, from `cached_tokens` or by timing, what another tenant has sent.

    python -m tests.campaigns.isolation [--store hashed]    or radix, routed, host, disk, redis; default: all

Over HTTP, with two keys; with `routed`, through a router that knows what is cached. With `host`, the device's cache is
so small that what a trial looks for has been evicted to host memory; with `disk` and `redis`, the server is restarted
before the trials. In each trial the victim sends a random prompt. Then the probing tenant sends that prompt and one
that nobody has sent, and so does the victim. The time to the first token is measured. An attacker who takes fast
answers for cached ones is a classifier; its area under the ROC curve (AUC) is 0.5 if the times reveal nothing. The
victim's own times are the control: if they did not tell hits apart, the measurement could not either.

Every trial also counts cached tokens: the prober's must be 0, with any `cache_salt` that it may forge. A store gets as
many trials as fit into its minutes; fewer trials make the interval wider. Exits with 1 if isolation is broken.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import this_machine
from octavo.request import cache_scope
from octavo.workloads.server_process import running_server
from tests.ports import free_port
from tests.redis_server import RedisServer

DEVICE = ("hashed", "radix", "routed")
ROUTER_KEY = "way-to-the-server"
STORES = (*DEVICE, "host", "disk", "redis")
PROMPT_TOKENS = 128
# Blocks on the device where a store below it is probed: twelve prompts. And prompts between a secret and its trial.
SMALL_POOL, GROUP = 100, 10
# Trials without which nothing is said, and seconds in which a victim may send prompts, however slow starts were.
LEAST, LEAST_PLANTING = 8, 10.0
VOCABULARY = 49_152
KEYS = """
[tenants.victim]
keys = ["sk-victim"]
[tenants.prober]
keys = ["sk-prober"]
"""
FORGED_SALTS = ("victim", "tenant", "sk-victim", "", cache_scope("victim", None, ""), cache_scope("prober", None, ""))


@dataclass
class Findings:
    """What one store revealed.

    Attributes:
        own_cached, other_cached: most cached tokens reported to the victim and to the prober in any trial.
        forged_cached: most reported to the prober, over all forged salts.
        loaded_bytes: bytes of keys and values that were read from the store, if it is not the device's.
        cross, control: (seconds of prompts that the victim had sent, seconds of fresh ones).
    """

    store: str
    trials: int = 0
    own_cached: int = 0
    own_least: int = PROMPT_TOKENS
    other_cached: int = 0
    forged_cached: int = 0
    forged_requests: int = 0
    loaded_bytes: int = 0
    cross: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    control: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    def note_own(self, cached: int) -> None:
        self.own_cached, self.own_least = max(self.own_cached, cached), min(self.own_least, cached)

    def note_other(self, cached: int) -> None:
        self.other_cached = max(self.other_cached, cached)


def auc(known: list[float], fresh: list[float]) -> float:
    """The probability that a prompt sent before is answered faster than a fresh one; ties count half."""
    times = np.concatenate([known, fresh])
    ranks = np.empty(len(times))
    ranks[np.argsort(times, kind="stable")] = np.arange(1, len(times) + 1)
    for value in np.unique(times):
        ranks[times == value] = ranks[times == value].mean()
    beaten = ranks[len(known) :].sum() - len(fresh) * (len(fresh) + 1) / 2
    return float(beaten / (len(known) * len(fresh)))


def auc_range(known: list[float], fresh: list[float], rounds: int = 100) -> tuple[float, float]:
    """A 95 % confidence interval of the AUC, by bootstrap."""
    rng = np.random.default_rng(0)
    first, second = np.array(known), np.array(fresh)
    found = [auc(list(rng.choice(first, len(first))), list(rng.choice(second, len(second)))) for _ in range(rounds)]
    low, high = np.percentile(found, [2.5, 97.5])
    return float(low), float(high)


class Tenant:
    """Sends prompts with one key, each on a connection of its own."""

    def __init__(self, port: int, key: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._headers = {"Content-Type": "application/json", "x-api-key": key}

    def send(self, prompt: list[int], **fields: Any) -> tuple[float, int]:
        """Send a prompt; returns the seconds to the (only) token and the cached tokens of the usage."""
        body = json.dumps({"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields})
        began = time.perf_counter()
        self._connection.request("POST", "/v1/completions", body, self._headers)
        response = self._connection.getresponse()
        raw = response.read()
        seconds = time.perf_counter() - began
        self._connection.close()  # the server would close it while the other tenant sends many prompts
        if response.status != 200:
            raise SystemExit(f"the server answered {response.status}: {raw[:300]!r}")
        return seconds, json.loads(raw)["usage"]["prompt_tokens_details"]["cached_tokens"]


def random_prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(1000, VOCABULARY) for _ in range(PROMPT_TOKENS)]


@contextmanager
def tenants_of(*options: str) -> Iterator[tuple[Tenant, Tenant, Callable[[], int]]]:
    """Run a server; yields the victim, the prober, and a function that returns the bytes read from lower stores."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as keys:
        keys.write(KEYS)
        keys.flush()
        common = ("--keys-file", keys.name, "--no-access-log")
        with ExitStack() as stack:
            server = stack.enter_context(running_server([*common, *options]))
            address = server.base_url
            if ROUTER_KEY in options:
                command = (sys.executable, "-m", "octavo", "route")
                routing = ("--worker", address, "--router-key", ROUTER_KEY)
                address = stack.enter_context(running_server([*common, *routing], command)).base_url
            port = int(address.rpartition(":")[2])
            victim, prober = Tenant(port, "sk-victim"), Tenant(port, "sk-prober")
            rng = random.Random()
            for _ in range(4):  # threads and connections warm up
                victim.send(random_prompt(rng))
                prober.send(random_prompt(rng))

            def loaded() -> int:
                with urllib.request.urlopen(f"{server.base_url}/metrics") as response:
                    lines = response.read().decode().splitlines()
                read = [line for line in lines if line.startswith("octavo:tier_read_bytes_total")]
                # What a store has read has come to host memory, and counts there too.
                lowest = [line for line in read if 'tier="host"' not in line] or read
                return sum(int(float(line.rpartition(" ")[2])) for line in lowest)

            yield victim, prober, loaded


def options_of(store: str, stack: ExitStack) -> list[str]:
    """Return the options of a server that keeps the victim's blocks in `store`; `stack` closes what they need."""
    if store == "routed":
        addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        events = {"enable_kv_cache_events": True, "endpoint": addresses[0], "replay_endpoint": addresses[1]}
        return ["--router-key", ROUTER_KEY, "--kv-events-config", json.dumps(events), "--num-blocks", "4000"]
    if store in DEVICE:
        return ["--prefix-cache", store, "--num-blocks", "4000"]
    options = ["--num-blocks", str(SMALL_POOL), "--kv-host-memory", "1GiB", "--kv-demotion", "all"]
    if store == "disk":
        options += ["--kv-disk", stack.enter_context(tempfile.TemporaryDirectory()), "--kv-disk-size", "8GiB"]
    elif store == "redis":
        redis = RedisServer()
        stack.callback(redis.close)
        options += ["--kv-remote", redis.url]
    return options


def plant(victim: Tenant, rng: random.Random, count: int, until: float = float("inf")) -> list[list[int]]:
    """Let the victim send up to `count` random prompts, until the time `until`; returns them."""
    prompts: list[list[int]] = []
    while len(prompts) < count and time.monotonic() < until:
        prompts.append(random_prompt(rng))
        victim.send(prompts[-1])
    return prompts


def probe(store: str, trials: int, seconds: float, model: str) -> Findings:
    """Run up to `trials` trials within about `seconds`, starts of servers included."""
    found = Findings(store)
    began = time.monotonic()
    rng = random.Random(1)
    with ExitStack() as stack:
        options = [model, *options_of(store, stack)]
        planted: list[list[int]] = []
        if store in ("disk", "redis"):
            with tenants_of(*options) as (victim, _, _):
                planted = plant(victim, rng, trials, max(began + seconds / 3, time.monotonic() + LEAST_PLANTING))
        with tenants_of(*options) as (victim, prober, loaded):
            until = began + seconds
            while found.trials < trials and (found.trials < LEAST or time.monotonic() < until):
                secrets = planted[found.trials :][:GROUP] if planted else plant(victim, rng, GROUP)
                if not secrets:
                    break
                if store == "host":  # evict the last of them
                    plant(prober, rng, SMALL_POOL * 16 // PROMPT_TOKENS + 1)
                for secret in secrets:
                    if found.trials >= LEAST and time.monotonic() > until:
                        break
                    one_trial(found, rng, secret, victim, prober)
            forge(found, rng, victim, prober)
            found.loaded_bytes = loaded()
    return found


def forge(found: Findings, rng: random.Random, victim: Tenant, prober: Tenant) -> None:
    """Let the prober look for one prompt with salts that might be the victim's."""
    secret = random_prompt(rng)
    victim.send(secret)
    victim.send(secret, cache_salt="victim")
    for salt in FORGED_SALTS:
        _, cached = prober.send(secret, cache_salt=salt)
        found.forged_cached += cached
        found.forged_requests += 1


def one_trial(found: Findings, rng: random.Random, secret: list[int], victim: Tenant, prober: Tenant) -> None:
    """Run one trial, in random order so that drift over time has no effect; every fourth has the control too."""
    asked = [(prober, secret, found.cross[0]), (prober, random_prompt(rng), found.cross[1])]
    if found.trials % 4 == 0:
        asked += [(victim, secret, found.control[0]), (victim, random_prompt(rng), found.control[1])]
    found.trials += 1
    rng.shuffle(asked)
    for tenant, prompt, times in asked:
        seconds, cached = tenant.send(prompt)
        times.append(seconds)
        if tenant is prober:
            found.note_other(cached)
        elif times is found.control[0]:
            found.note_own(cached)


def faults(found: dict[str, Any]) -> list[str]:
    """Return what of a summary breaks isolation, or shows that the measurement could not have seen a breach."""
    cross, control = found["cross"], found["control"]
    checks = {
        f"the other tenant was told of {found['other_cached']} cached tokens": found["other_cached"] > 0,
        f"forged salts were told of {found['forged_cached']} cached tokens": found["forged_cached"] > 0,
        f"times tell another's prompts: AUC {cross['auc']}": cross["auc"] > 0.55 and cross["range"][0] > 0.5,
        f"times do not even tell one's own prompts: AUC {control['auc']}": control["range"][1] < 0.9,
        "a prompt of the tenant's own was not cached": found["own_least"] == 0,
        "nothing was read from the store": found["store"] not in DEVICE and found["loaded_bytes"] == 0,
    }
    return [f"{found['store']}: {fault}" for fault, is_present in checks.items() if is_present]


def summary(found: Findings) -> dict[str, Any]:
    numbers = asdict(found)
    for name in ("cross", "control"):
        known, fresh = numbers.pop(name)
        numbers[name] = {
            "auc": round(auc(known, fresh), 3),
            "range": [round(bound, 3) for bound in auc_range(known, fresh)],
            "known_ms": round(1e3 * float(np.median(known)), 2),
            "fresh_ms": round(1e3 * float(np.median(fresh)), 2),
            "samples": [len(known), len(fresh)],
        }
    return numbers


def write(summaries: dict[str, Any], folder: Path) -> None:
    rows = []
    for store in STORES:
        if (told := summaries.get(store)) is None:
            continue
        cross, control = told["cross"], told["control"]
        rows.append(
            f"| {store} | {told['own_least']} to {told['own_cached']} | {told['other_cached']} | "
            f"{told['forged_cached']} in {told['forged_requests']} requests | {cross['auc']:.3f} "
            f"({cross['range'][0]:.3f} to {cross['range'][1]:.3f}) | {cross['known_ms']:.1f} / "
            f"{cross['fresh_ms']:.1f} | {sum(cross['samples'])} | {control['auc']:.3f} | "
            f"{control['known_ms']:.1f} / {control['fresh_ms']:.1f} | {sum(control['samples'])} | "
            f"{told.get('loaded_bytes', 0) / 2**20:.0f} |"
        )
    text = f"""# What one tenant learns of another's cache

`python -m tests.campaigns.isolation`; SmolLM2-135M, prompts of {PROMPT_TOKENS} random tokens;
{this_machine.name()}. The script says how each number comes about.

Cached tokens, of {PROMPT_TOKENS}, that the same tenant and another were told, and that another was told with forged
salts; AUC across tenants, and of a tenant's own prompts, each with the median milliseconds of prompts sent before and
of fresh ones, and the number of times taken.

| store | same | other | forged | AUC across (95 %) | ms | times | AUC own | ms | times | read, MiB |
|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|
{chr(10).join(rows)}

An AUC of 0.5 says nothing; the aims are at most 0.55 across tenants, and at least 0.9 for a tenant's own prompts, which
shows that the clock would have told. "read" is what was read from the store below the device: the victim's blocks.
"""
    (folder / "isolation.json").write_text(json.dumps(summaries, indent=1) + "\n")
    (folder / "isolation.md").write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", choices=STORES, action="append", help="default: all")
    parser.add_argument("--trials", type=int, default=400, help="at most, for each store")
    parser.add_argument("--minutes", type=float, default=2.75, help="at most, for each store")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--folder",
        type=this_machine.output_folder,
        default=str(this_machine.results_folder()),
        help="folder of the results",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the findings and write nothing")
    args = parser.parse_args()
    path = args.folder / "isolation.json"
    broken: list[str] = []
    for store in args.store or STORES:
        told = summary(probe(store, args.trials, 60 * args.minutes, args.model))
        print(json.dumps(told), flush=True)
        broken += faults(told)
        if not args.dry_run:
            summaries = json.loads(path.read_text()) if path.exists() else {}
            write({**summaries, store: told}, args.folder)
    print(*broken, sep="\n", file=sys.stderr)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
