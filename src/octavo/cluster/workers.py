"""The servers behind a router: their addresses, their models, and whether they accept requests.

a list, a file, DNS, registrations ──> URLs ──check──> Worker: its description and its state
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from octavo.cluster.config import RouterConfig, checked_url
from octavo.cluster.connections import Connections, Headers, ServerAnswer
from octavo.errors import ConfigError
from octavo.server.routers import WORKER_PATH

logger = logging.getLogger("octavo.route")

REGISTERED_SECONDS = 30.0
_CHECK_SECONDS = 2.0
_MOST_FAILURES = 2
# Delay before a server that failed a check is checked again.
_AGAIN_SECONDS = 0.25
_READY = 200
_MOST_SHOWN = 200


class RoutedPrompt(NamedTuple):
    """A prompt in the form that an index uses.

    Attributes:
        token_ids: its tokens; empty if unknown.
        scope: the part of the cache that it may see, see `cache_scope`.
    """

    token_ids: Sequence[int] = ()
    scope: str = ""


@dataclass(eq=False, slots=True)
class Worker:
    """One server.

    Attributes:
        facts: the response of `/router/worker`; empty until it has answered. `learn` replaces it.
        names: the names of its model.
        group: what servers must have in common to share an index: names, tokens, and size of blocks.
        is_healthy: whether it accepts requests.
        num_failures: number of consecutive failed checks.
        in_flight: number of this router's requests that it has not finished.
        checking: held during a check, because its result is applied in several steps.
        worker_id: its id, which is the same in every router.
    """

    url: str
    connections: Connections
    facts: Mapping[str, Any] = field(default_factory=dict)
    is_healthy: bool = False
    num_failures: int = 0
    in_flight: int = 0
    checking: asyncio.Lock = field(default_factory=asyncio.Lock)
    worker_id: int = field(init=False)
    names: tuple[str, ...] = field(init=False)
    group: str = field(init=False)

    def __post_init__(self) -> None:
        self.learn(self.facts)
        self.worker_id = int.from_bytes(blake2b(self.url.encode(), digest_size=6).digest(), "big")

    def learn(self, facts: Mapping[str, Any]) -> None:
        """Replace what is known of it; `names` and `group` are kept, because every request compares all servers'."""
        publishes = (facts.get("kv_events") or {}).get("endpoint") is not None
        self.facts, self.names = facts, tuple(facts.get("names", ()))
        self.group = "|".join(map(str, (*self.names, facts.get("fingerprint"), facts.get("block_size"), publishes)))

    @property
    def role(self) -> str:
        """Its role, as in `ServerConfig.role`."""
        return str(self.facts.get("role", "both"))

    def post(
        self, target: str, headers: Headers, body: bytes, prompt: RoutedPrompt
    ) -> AbstractAsyncContextManager[ServerAnswer]:
        """Send a request; `prompt` is what the router knows of its prompt."""
        return self.connections.request("POST", target, headers, body)

    def event_address(self, name: str) -> str | None:
        """Return where it publishes events (`endpoint`) or repeats them (`replay_endpoint`), as seen from here."""
        address = (self.facts.get("kv_events") or {}).get(name)
        if not address or not address.startswith("tcp://"):
            return address
        return f"tcp://{self._reachable(address.removeprefix('tcp://'))}"

    @property
    def neighbour_address(self) -> str | None:
        """The address at which it serves blocks to others, as seen from here; None if it does not."""
        address = self.facts.get("kv_neighbours")
        return None if address is None else self._reachable(address)

    def _reachable(self, address: str) -> str:
        """Return `HOST:PORT` with the host of its URL, if the address is of every interface or of its own machine."""
        host, _, port = address.rpartition(":")
        is_pattern = host in ("*", "[::]", "0.0.0.0") or host.startswith("127.") or host == "localhost"
        own = urlsplit(self.url).hostname or ""
        return f"{(f'[{own}]' if ':' in own else own) if is_pattern else host}:{port}"


class Workers:
    """All servers, checked in the background.

    Args:
        key: the router's key.
        connect: makes the connections to a server, given a URL.

    Attributes:
        on_up: called with a server that begins to accept requests, that has restarted, or that has missed a check: its
            events may be seconds late, because TCP doubles the wait before each attempt to send them again.
        on_down: called with one that no longer accepts requests, or is no longer listed.
    """

    def __init__(self, config: RouterConfig, key: str, connect: Callable[[str], Connections] = Connections) -> None:
        self._config = config
        self._headers = ((b"authorization", f"Bearer {key}".encode()),)
        self._connect = connect
        self._by_url: dict[str, Worker] = {}
        self._registered: dict[str, float] = {}  # by URL: until when
        self._file: tuple[float, tuple[str, ...]] = (0.0, ())
        self._dns: tuple[str, ...] = ()
        self.on_up: Callable[[Worker], Any] = lambda worker: None
        self.on_down: Callable[[Worker], Any] = lambda worker: None

    def __iter__(self) -> Any:
        return iter(list(self._by_url.values()))

    def healthy(self, model: str | None = None) -> list[Worker]:
        """Return those that take requests, for a model if one is named."""
        return [each for each in self if each.is_healthy and (model is None or model in each.names)]

    def answering(self, model: str | None) -> list[Worker]:
        """Return the healthy ones that answered the last check; all healthy ones if none did."""
        healthy = self.healthy(model)
        return [each for each in healthy if not each.num_failures] or healthy

    def register(self, url: str) -> None:
        self._registered[checked_url(url)] = time.monotonic() + REGISTERED_SECONDS

    def unregister(self, url: str) -> None:
        self._registered.pop(url.rstrip("/"), None)

    async def run(self) -> None:
        """Find servers periodically, and check each in a task of its own, so that one that hangs delays no other."""
        checked = set[Worker]()
        async with asyncio.TaskGroup() as checks:
            while True:
                with _logged("finding servers"):
                    await self._find()
                for worker in set(self) - checked:
                    checks.create_task(self._check_periodically(worker))
                checked = set(self)
                await asyncio.sleep(self._config.health_interval)

    async def check_all(self) -> None:
        """Find the servers, and check each once."""
        await self._find()
        await asyncio.gather(*map(self._check, self))

    async def _find(self) -> None:
        urls = await self._urls()
        for url in self._by_url.keys() - urls:
            worker = self._by_url.pop(url)
            async with worker.checking:
                await self._down(worker, "it is no longer named")
            worker.connections.close()
        for url in urls - self._by_url.keys():
            self._by_url[url] = Worker(url, self._connect(url))

    async def _check_periodically(self, worker: Worker) -> None:
        """Check a server periodically while it is listed."""
        while self._by_url.get(worker.url) is worker:
            with _logged("a check of a server"):
                await self._check(worker)
            is_missed = worker.is_healthy and worker.num_failures
            await asyncio.sleep(min(self._config.health_interval, _AGAIN_SECONDS if is_missed else math.inf))

    async def suspect(self, worker: Worker) -> None:
        """Check a server at once after a lost connection, and send it nothing more if it does not answer."""
        worker.num_failures = max(worker.num_failures, _MOST_FAILURES - 1)
        if worker.checking.locked():  # many requests are lost at once, and one check is enough for all
            async with worker.checking:
                return
        await self._check(worker)

    def close(self) -> None:
        for worker in self:
            worker.connections.close()

    async def _check(self, worker: Worker) -> None:
        async with worker.checking:
            if self._by_url.get(worker.url) is worker:
                await self._check_locked(worker)

    async def _check_locked(self, worker: Worker) -> None:
        try:
            async with asyncio.timeout(_CHECK_SECONDS):
                for path in ("/ready", WORKER_PATH):
                    status, body = await worker.connections.get(path, self._headers)
                    if status != _READY:
                        text = body[:_MOST_SHOWN].decode(errors="replace")
                        await self._down(worker, f"{path} answers {status}: {text}")
                        return
                facts = json.loads(body)
        except Exception as error:  # whatever a server answers, the others go on
            worker.num_failures += 1
            if worker.num_failures >= _MOST_FAILURES or not worker.is_healthy:
                await self._down(worker, f"it does not answer: {type(error).__name__} {error}".strip())
            return
        has_missed, worker.num_failures = worker.num_failures > 0, 0
        if worker.is_healthy and facts != worker.facts:
            await self._down(worker, "it was restarted")
        worker.learn(facts)
        if has_missed or not worker.is_healthy:
            try:
                await self.on_up(worker)
            except Exception:
                logger.exception("cannot follow the cache of %s: it is routed to by load only", worker.url)
        if not worker.is_healthy:
            worker.is_healthy = True
            logger.info("%s now gets requests for %s", worker.url, ", ".join(worker.names))

    async def _down(self, worker: Worker, reason: str) -> None:
        if not worker.is_healthy:
            logger.debug("%s gets no requests: %s", worker.url, reason)
            return
        worker.is_healthy = False
        logger.warning("%s gets no requests: %s", worker.url, reason)
        try:
            await self.on_down(worker)
        except Exception:
            logger.exception("cannot remove the cache of %s from the index", worker.url)
        if worker.num_failures >= _MOST_FAILURES:
            worker.connections.close()  # it hangs, and requests would wait for it forever

    async def _urls(self) -> set[str]:
        now = time.monotonic()
        self._registered = {url: until for url, until in self._registered.items() if until > now}
        urls = {checked_url(url) for url in (*self._config.worker, *self._registered)}
        if self._config.workers_file is not None:
            urls.update(self._of_file(Path(self._config.workers_file)))
        if self._config.workers_dns is not None:
            urls.update(await self._of_dns(self._config.workers_dns))
        return urls

    def _of_file(self, path: Path) -> Iterable[str]:
        """Return the URLs in the file; if it cannot be read, the previous ones."""
        try:
            changed = path.stat().st_mtime
            if changed != self._file[0]:
                lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
                self._file = changed, tuple(checked_url(line, str(path)) for line in lines if line)
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            logger.error("keeping the previous servers of %s: %s", path, error)
        return self._file[1]

    async def _of_dns(self, address: str) -> Iterable[str]:
        """Return a URL for each address of a name; if the look-up fails, the previous ones."""
        host, _, port = address.rpartition(":")
        with suppress(OSError):
            found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
            addresses = {str(entry[4][0]) for entry in found}
            self._dns = tuple(
                f"http://[{each}]:{port}" if ":" in each else f"http://{each}:{port}" for each in addresses
            )
        return self._dns


@contextmanager
def _logged(work: str) -> Iterator[None]:
    """Log an error of something that is done again later."""
    try:
        yield
    except Exception:
        logger.exception("%s failed: it is tried again", work)
