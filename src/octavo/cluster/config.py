"""The options of `octavo route`, in addition to those of every HTTP server (`ServerConfig`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal
from urllib.parse import urlsplit

from octavo.errors import ConfigError, shown
from octavo.option import Options, check_address, option
from octavo.units import SECONDS

_workers = partial(option, group="workers (docs/operate/route.md)")
_choice = partial(option, group="selection of a server")


def checked_url(url: str, name: str = "a worker") -> str:
    """Return a server's URL without a trailing slash; raises `ConfigError` if it is not a URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.rstrip("/") or parts.query:
        raise ConfigError(f"{name} must be a URL such as http://10.0.0.7:8000, got {shown(url)}")
    return url.rstrip("/")


def _check_urls(url: str, name: str) -> None:
    checked_url(url, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(Options):
    """The options of one router, checked at construction; raises `ConfigError` with the value in the message."""

    worker: Sequence[str] = _workers(
        (),
        "URL of a server, such as http://10.0.0.7:8000; may be repeated",
        metavar="URL",
        check=_check_urls,
    )
    workers_file: str | None = _workers(
        None, "file with one server URL per line, reread when it changes; # begins a comment", metavar="FILE"
    )
    workers_dns: str | None = _workers(
        None,
        "name whose addresses are all servers, such as a headless Kubernetes service; looked up repeatedly",
        metavar="HOST:PORT",
        check=check_address,
    )
    accept_workers: bool = _workers(
        False, "let servers register at POST /workers with the router key; each must repeat it within 30 seconds"
    )
    health_interval: float = _workers(
        1.0,
        "time between health checks of a server; after one failed check, new requests go to other servers; after "
        "two, or a lost connection, its running requests end",
        unit=SECONDS,
        above=0,
    )
    tokenizer: Sequence[str] = _workers(
        (),
        "tokenizer for prompts: a folder, hub id or GGUF file, as for `octavo serve`; may be repeated for several "
        "models; default: the servers' model names",
        metavar="MODEL",
    )

    strategy: Literal["prefix", "least_loaded", "round_robin"] = _choice(
        "prefix",
        "how to choose a server; prefix: the one with most of the prompt cached, weighed against its load; the "
        "others ignore prompts",
    )
    selection_timeout: float = _choice(
        0.25, "time for the index to choose a server, before the least loaded one is used", unit=SECONDS, above=0
    )
    prefill_tokens: int = _choice(
        512,
        "smallest number of uncached prompt tokens that are computed on another server (--role prefill or both) "
        "for a server of --role decode",
        least=1,
    )
    replica_sync_port: int | None = _choice(
        None, "port on which this router shares its choices with other routers (unencrypted)", least=1, most=65535
    )
    replica_sync_peers: Sequence[str] = _choice(
        (),
        "address of another router's sync port, such as tcp://10.0.0.8:9092; may be repeated",
        metavar="ADDRESS",
    )

    def _check_together(self) -> None:
        if not (self.worker or self.workers_file or self.workers_dns or self.accept_workers):
            raise ConfigError("no servers: give --worker, --workers-file, --workers-dns or --accept-workers")
        if self.replica_sync_peers and self.replica_sync_port is None:
            raise ConfigError("replica_sync_peers needs replica_sync_port")
