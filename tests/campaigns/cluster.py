"""Servers, a router and Redis as processes on hosts of their own, whose links can be cut and slowed down.

    10.98.0.254   this program: clients, probes     ┐
    10.98.0.2     redis                             │  a bridge in this process's network namespace; each host is
    10.98.0.10    router                            │  another namespace, with a link to the bridge
    10.98.0.11 …  servers                           ┘

Without the right to make namespaces, hosts are addresses of the loopback interface, and links cannot be changed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROUTER_KEY, ADMIN_KEY, SECRET = "way-to-the-servers", "a-key-of-the-admin", "only our servers know it"
PORT, LENT, EVENTS, REPLAY, REDIS_PORT = 8000, 9400, 5557, 5558, 6379
START_SECONDS = 180.0
# Whatever is expected to take less time than computing a block of the tiny model: every load is made.
_ALWAYS_LOAD = (
    "from octavo.tiers.lower import LowerTiers; assert LowerTiers._is_worth; "
    "LowerTiers._is_worth = lambda *_: True; "
    "import sys; from octavo.cli import main; sys.exit(main(sys.argv[1:]))"
)


def can_isolate() -> bool:
    """Return whether this user may make network namespaces here."""
    if shutil.which("unshare") is None or shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    trial = "ip link add br0 type bridge && mount -t tmpfs none /run"
    return subprocess.run([*_unshare(), "sh", "-c", trial], capture_output=True, check=False).returncode == 0


def isolated(argv: list[str]) -> list[str]:
    """Return the command that runs another in network and mount namespaces of its own."""
    return [*_unshare(), *argv]


def _unshare() -> list[str]:
    # Whatever is left dies with the first process of the namespace.
    own = ["--net", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child"]
    return ["unshare", *own, *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]


class Network:
    """The bridge, and the links of hosts to it.

    Args:
        is_isolated: whether this process runs in namespaces of its own (`isolated`).
    """

    def __init__(self, *, is_isolated: bool) -> None:
        self.is_isolated = is_isolated
        if is_isolated:
            _run("ip link set lo up")
            _run("ip link add br0 type bridge")
            _run("ip addr add 10.98.0.254/24 dev br0")
            _run("ip link set br0 up")
            _run("mount -t tmpfs none /run")
            Path("/run/netns").mkdir()

    def host(self, name: str, number: int) -> Host:
        if not self.is_isolated:
            return Host(name, f"127.98.0.{number}", ())
        address = f"10.98.0.{number}"
        _run(f"ip netns add {name}")
        _run(f"ip link add to-{name} type veth peer name eth0 netns {name}")
        _run(f"ip link set to-{name} master br0 up")
        for command in (f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up"):
            _run(f"ip -n {name} {command}")
        return Host(name, address, ("ip", "netns", "exec", name))


@dataclass(frozen=True)
class Host:
    """A machine with a link, which may be cut (nothing arrives, nothing is refused) or slow, in both directions."""

    name: str
    address: str
    inside: tuple[str, ...]

    def cut(self) -> None:
        _run(f"ip link set to-{self.name} nomaster")

    def join(self) -> None:
        _run(f"ip link set to-{self.name} master br0")

    def slow(self, rate: str) -> None:
        limit = f"root tbf rate {rate} burst 16kb latency 200ms"
        _run(f"tc qdisc replace dev to-{self.name} {limit}")
        _run(f"tc -n {self.name} qdisc replace dev eth0 {limit}")

    def hurry(self) -> None:
        _run(f"tc qdisc del dev to-{self.name} root")
        _run(f"tc -n {self.name} qdisc del dev eth0 root")

    def part_from(self, other: Host) -> None:
        """Let nothing reach the other host."""
        _run(f"ip -n {self.name} route add blackhole {other.address}/32")

    def meet(self, other: Host) -> None:
        _run(f"ip -n {self.name} route del blackhole {other.address}/32")


@dataclass
class Server:
    """A process on a host, which can be killed, frozen and started again with the same command."""

    host: Host
    argv: list[str]
    log: Path
    health: str | None = None
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _frozen_s: float = 0.0
    _frozen_at: float | None = None

    @property
    def frozen_s(self) -> float:
        """Seconds that it has been frozen, in all."""
        return self._frozen_s + (0.0 if self._frozen_at is None else time.monotonic() - self._frozen_at)

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def url(self) -> str:
        return f"http://{self.host.address}:{PORT}"

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self.host.inside, *self.argv], stdin=subprocess.DEVNULL, stdout=log, stderr=log, close_fds=True
            )

    def is_ready(self) -> bool:
        if self.health is None:
            return True
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"{self.name} has ended: {self.log.read_text(errors='replace')[-2000:]}")
        try:
            return httpx.get(self.url + self.health, timeout=1).status_code == 200
        except httpx.HTTPError:
            return False

    def wait_ready(self) -> None:
        until = time.monotonic() + START_SECONDS
        while not self.is_ready():
            if time.monotonic() > until:
                raise RuntimeError(f"{self.name} is not ready: {self.log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def freeze(self) -> None:
        self.send(signal.SIGSTOP)
        self._frozen_at = time.monotonic()

    def thaw(self) -> None:
        self._frozen_s, self._frozen_at = self.frozen_s, None
        self.send(signal.SIGCONT)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.wait()

    def wait(self) -> None:
        assert self._process is not None
        self._process.wait(60)

    def children(self) -> list[int]:
        """The processes that it started."""
        assert self._process is not None
        tasks = Path(f"/proc/{self._process.pid}/task").glob("*/children")
        return [int(child) for task in tasks for child in task.read_text().split()]


def operate(server: Server, path: str, key: str = ADMIN_KEY) -> httpx.Response:
    """Read from a server as an operator; raises `httpx.HTTPError`."""
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.get(server.url + path, headers=headers, timeout=5).raise_for_status()


def counters(server: Server) -> dict[str, float]:
    """Sums of a server's counters, by name."""
    found: dict[str, float] = {}
    for line in operate(server, "/metrics").text.splitlines():
        if not line.startswith("#"):
            name = line.partition("{")[0].partition(" ")[0]
            found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
    return found


class Cluster:
    """Two servers with stores and a neighbour each, one of two ranks, a router and Redis; and a server for references.

    Args:
        folder: for logs and stores; `model` in it is the model, `keys.toml` the keys.
    """

    def __init__(self, folder: Path, network: Network) -> None:
        self.network = network
        self._folder = folder
        serving = ["--model", str(folder / "model"), "--keys-file", str(folder / "keys.toml"), "--no-access-log"]
        serving += ["--deterministic", "--num-threads", "1", "--max-model-len", "2048"]
        self.redis = self._redis(network.host("redis", 2))
        stored = ["--kv-host-memory", "4MiB", "--kv-demotion", "all", "--kv-disk-size", "8MiB"]
        stored += ["--kv-remote", f"redis://{self.redis.host.address}:{REDIS_PORT}/0"]
        self.servers = [
            self._replica(network.host("a", 11), [*serving, *stored], is_near=True),
            self._replica(network.host("b", 12), [*serving, *stored], is_near=True),
            self._replica(network.host("c", 13), [*serving, "--tensor-parallel-size", "2"], is_near=False),
        ]
        reference = network.host("alone", 20)
        self.reference = self._octavo(
            reference, ["serve", *serving, "--host", reference.address, "--no-enable-prefix-caching"]
        )
        host = network.host("router", 10)
        named = [argument for server in self.servers for argument in ("--worker", server.url)]
        routing = ["route", "--host", host.address, "--keys-file", str(folder / "keys.toml"), "--no-access-log"]
        self.router = self._octavo(host, [*routing, *named], health="/health")

    def all(self) -> list[Server]:
        return [self.redis, *self.servers, self.router]

    def close(self) -> None:
        for server in [*self.all(), self.reference]:
            if server._process is not None and server._process.poll() is None:
                server.kill()

    def _octavo(
        self, host: Host, arguments: list[str], health: str = "/ready", program: tuple[str, ...] = ("-m", "octavo")
    ) -> Server:
        argv = [sys.executable, *program, *arguments, "--port", str(PORT)]
        return Server(
            host, ["env", f"OCTAVO_ROUTER_KEY={ROUTER_KEY}", *argv], self._folder / f"{host.name}.log", health
        )

    def _replica(self, host: Host, options: list[str], *, is_near: bool) -> Server:
        events: dict[str, Any] = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{EVENTS}"}
        events["replay_endpoint"] = f"tcp://*:{REPLAY}"
        options = [*options, "--kv-events-config", json.dumps(events), "--num-blocks", "257", "--swap-space", "0"]
        if is_near:
            options += ["--kv-neighbours", f"{host.address}:{LENT}", "--kv-remote-secret", SECRET]
            options += ["--kv-disk", str(self._folder / f"disk-{host.name}")]
        return self._octavo(host, ["serve", "--host", host.address, *options], program=("-c", _ALWAYS_LOAD))

    def _redis(self, host: Host) -> Server:
        folder = self._folder / "redis"
        folder.mkdir(exist_ok=True)
        options = ["--bind", host.address, "--port", str(REDIS_PORT), "--protected-mode", "no", "--dir", str(folder)]
        options += ["--save", "", "--maxmemory", "32mb", "--maxmemory-policy", "allkeys-lru"]
        return Server(host, ["redis-server", *options], self._folder / "redis.log")


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)
