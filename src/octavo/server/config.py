"""The options of the HTTP server, declared once for the flags, variables and TOML keys of `octavo serve`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import ClassVar, Literal

from octavo.dialect.formats import REASONING_PARSERS, TOOL_CALL_PARSERS
from octavo.errors import ConfigError, shown
from octavo.option import Options, option, options_of
from octavo.server.keys import check_key
from octavo.units import BYTES, SECONDS

API_KEY_VARIABLE = "OCTAVO_API_KEY"
ADMIN_KEY_VARIABLE = "OCTAVO_ADMIN_KEY"

# Linux's limit in bytes; other systems allow a few bytes less.
MAX_UNIX_PATH = 107

# Options that hold a server's keys; only those of the source with the highest precedence are used.
KEY_OPTIONS = frozenset({"api_key", "keys_file"})


def _check_uds(path: str, name: str) -> None:
    if not 0 < len(os.fsencode(path)) <= MAX_UNIX_PATH:
        raise ConfigError(f"{name} must be a path of 1 to {MAX_UNIX_PATH} bytes, got {shown(path)}")


def _check_root_path(path: str, name: str) -> None:
    if path and (not path.startswith("/") or path.endswith("/")):
        raise ConfigError(f"{name} must begin with / and not end with it, got {path!r}")


def _check_url(url: str, name: str) -> None:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{name} must be an http or https URL, got {shown(url)}")


_address = partial(option, group="address options")
_access = partial(option, group="access options (docs/operate/keys.md)")
_router = partial(option, group="router options (docs/operate/route.md)")
_api = partial(option, group="API options")
_log = partial(option, group="log and monitoring options")
_connection = partial(option, group="connection options")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits(Options):
    """The limits of a server: connections, request bodies and stored responses.

    They are the entries of the option `server_limits`, and a table of docs/operate/limits.md.
    """

    max_connections: int = option(
        1024,
        "open connections; a new one replaces the one that has been idle longest, or gets 503 with Retry-After if "
        "none is idle",
        least=1,
    )
    header_timeout: float = option(
        10.0, "seconds to receive a request's header; then 408, and the connection is closed", unit=SECONDS, above=0
    )
    body_timeout: float = option(
        30.0,
        "seconds to receive a body, plus one second per 64 KiB; then 408, and the connection is closed",
        unit=SECONDS,
        above=0,
    )
    write_timeout: float = option(
        30.0,
        "seconds after which a client that reads nothing of its answer is disconnected and its request ended",
        unit=SECONDS,
        above=0,
    )
    keep_alive_timeout: float = option(5.0, "seconds that an idle connection is kept open", unit=SECONDS, above=0)
    max_body_size: int = option("16MiB", "size of a request body; a larger one gets 413", unit=BYTES, least=1)
    max_total_body_size: int = option(
        "256MiB",
        "size of all bodies being received or parsed, excluding the first 64 KiB of each; beyond it, the oldest "
        "body of the tenant with the most gets 503",
        unit=BYTES,
        least=1,
    )
    max_body_seconds: float = option(
        10.0,
        "seconds to parse one large body or one chat: JSON, chat template and tokenizer",
        unit=SECONDS,
        above=0,
        most=inf,
    )
    max_body_memory: int = option("1GiB", "memory of the process that parses it", unit=BYTES, least=1)
    max_stored_responses: int = option(
        "64MiB",
        "memory for stored responses (previous_response_id); one tenant may use a quarter; the oldest are dropped "
        "first; 0: store none",
        unit=BYTES,
        least=0,
    )

    def _check_together(self) -> None:
        if self.max_total_body_size < self.max_body_size:
            raise ConfigError(
                f"max_total_body_size ({self.max_total_body_size}) must be at least max_body_size "
                f"({self.max_body_size}): no body of that size could be received"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(Options):
    """The options of one server, checked at construction; raises `ConfigError` with the value in the message."""

    REMOVED: ClassVar = {
        **{name: f"it is an entry of --server-limits, as in {name}=…" for name in options_of(ServerLimits)},
        "max_stored_tenant_responses": "a tenant may take a quarter of max_stored_responses, in --server-limits",
    }

    host: str = _address("127.0.0.1", "address to listen on; 0.0.0.0: all interfaces")
    port: int = _address(8000, "port to listen on; 0: any free port", least=0, most=65535)
    uds: str | None = _address(
        None,
        "Unix socket to listen on instead of a port; its owner and group may connect",
        metavar="PATH",
        check=_check_uds,
    )
    ssl_certfile: str | None = _address(
        None, "certificate chain (PEM), to serve HTTPS; needs --ssl-keyfile", metavar="FILE", needs="ssl_keyfile"
    )
    ssl_keyfile: str | None = _address(
        None, "private key (PEM) of --ssl-certfile", metavar="FILE", needs="ssl_certfile"
    )
    root_path: str = _address(
        "", "path prefix that a reverse proxy strips, such as /llm", metavar="PATH", check=_check_root_path
    )

    api_key: Sequence[str] = _access(
        (),
        "API key for clients; repeat for several, each its own tenant; visible in `ps`: prefer --keys-file; "
        f"default: ${API_KEY_VARIABLE}, separated by commas",
        metavar="KEY",
        check=check_key,
        secret=True,
    )
    keys_file: str | None = _access(
        None, "TOML file of tenants, their keys and limits, instead of --api-key; reread on SIGHUP", metavar="FILE"
    )
    admin_key: str | None = _access(
        None,
        "key for /debug and /reset_prefix_cache, which are otherwise open only to tenants with admin = true in "
        f"the keys file; visible in `ps`; default: ${ADMIN_KEY_VARIABLE}",
        metavar="KEY",
        check=check_key,
        secret=True,
    )
    metrics_access: Literal["open", "admin"] = _access(
        "open",
        "who may read /metrics; admin: only with an admin key; per-tenant metrics always need one",
    )
    live_page_text: bool = _access(
        False, "show the text of cached tokens on the live page (/cache), with an admin key only"
    )
    shared_prefix_cache: bool = _access(
        False, "share cached prefixes between tenants: more hits, but a tenant can detect what others have sent"
    )
    allow_unauthenticated: bool = _access(False, "allow addresses other than loopback without API keys")
    allowed_hosts: Sequence[str] = _access(
        (),
        "without API keys: an additional Host name to accept, apart from IP addresses, localhost and this "
        "machine's name; may be repeated; *: any",
        metavar="NAME",
    )
    allowed_origins: Sequence[str] = _access(
        (),
        "origin whose web pages may use the server (CORS), such as https://chat.example; may be repeated; *: any",
        metavar="URL",
    )

    router_key: str | None = _router(
        None,
        "key shared with `octavo route`; required to send token ids in place of a prompt; visible in `ps`: prefer "
        "$OCTAVO_ROUTER_KEY",
        metavar="KEY",
        check=check_key,
        secret=True,
    )
    register_with: Sequence[str] = _router(
        (),
        "URL of a router (octavo route --accept-workers) to register with; may be repeated",
        metavar="URL",
        check=_check_url,
    )
    advertised_url: str | None = _router(
        None,
        "URL at which routers reach this server; default: its host name and port",
        metavar="URL",
        check=_check_url,
    )
    role: Literal["both", "prefill", "decode"] = _router(
        "both",
        "requests that routers send here; decode: answers whose long prompts another server computes; prefill: "
        "those prompts; both: either",
    )

    served_model_name: Sequence[str] = _api(
        (), "model name for clients, instead of --model; may be repeated", metavar="NAME"
    )
    tool_call_parser: Literal["auto", "none", *TOOL_CALL_PARSERS] = _api(  # type: ignore[valid-type]
        "auto", "format of the model's tool calls; auto: detected from its chat template, else hermes; none: off"
    )
    enable_auto_tool_choice: bool = _api(True, "let the model decide to call tools")
    reasoning_parser: Literal["auto", "none", *REASONING_PARSERS] = _api(  # type: ignore[valid-type]
        "auto",
        "format of the model's reasoning, returned as reasoning_content; auto: detected from its chat template; "
        "none: off",
    )
    strict_requests: bool = _api(False, "reject unknown request fields with a 400 instead of ignoring them")

    log_level: Literal["debug", "info", "warning", "error"] = _log("info", "lowest severity to log")
    log_format: Literal["text", "json"] = _log("text", "format of the log on standard error; json: one object per line")
    access_log: bool = _log(True, "log one line per request, without its text")
    otlp_traces_endpoint: str | None = _log(
        None,
        "OpenTelemetry collector for request traces, such as http://127.0.0.1:4318/v1/traces; needs octavo[otel]",
        metavar="URL",
        packages=("otel", "opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"),
        check=_check_url,
    )
    watchdog_timeout: float = _log(
        60.0,
        "report an engine step that takes longer than this (log, /metrics, /health, /ready); 0: never",
        unit=SECONDS,
        least=0,
    )

    server_limits: ServerLimits = _connection(  # noqa: RUF009 (the default is frozen)
        ServerLimits(),
        "limits of connections, bodies and stored responses, such as max_body_size=32MiB,max_connections=4096; "
        "docs/operate/limits.md lists all",
        metavar="NAME=N,…",
    )
    request_timeout: float | None = _connection(
        None,
        "end unfinished requests with an error after this time, including time in the queue; default: never",
        unit=SECONDS,
        above=0,
    )
    shutdown_timeout: float = _connection(
        30.0,
        "time for running requests to finish after Ctrl-C or SIGTERM",
        unit=SECONDS,
        least=0,
        most=inf,
    )

    def _check_together(self) -> None:
        if self.register_with and self.router_key is None:
            raise ConfigError("register_with needs router_key, with which this server identifies itself to the router")
        if self.register_with and self.uds is not None and self.advertised_url is None:
            raise ConfigError("register_with with uds needs advertised_url: a router cannot reach a Unix socket")
        if self.keys_file is not None and self.api_key:
            raise ConfigError("give either keys_file or api_key: the file holds all keys")

    @property
    def accepted_admin_key(self) -> str | None:
        """The admin key from the options or, if not given, from the environment."""
        return self.admin_key or next(iter(_keys_of_environment(ADMIN_KEY_VARIABLE)), None)

    @property
    def accepted_keys(self) -> Sequence[str]:
        """The API keys from the options or, if not given, from the environment.

        Raises:
            ConfigError: the environment variable is set but holds no key; serving without keys cannot be what was
                meant.
        """
        has_keys = self.api_key or self.keys_file is not None
        return self.api_key if has_keys else _keys_of_environment(API_KEY_VARIABLE)


def _keys_of_environment(variable: str) -> Sequence[str]:
    """Return the keys of a server that was not started by a command, which reads the environment itself."""
    if (text := os.environ.get(variable)) is None:
        return ()
    option = options_of(ServerConfig)["api_key"]
    keys: Sequence[str] = option.checked(option.parse(text, f"the environment variable {variable}"), variable)
    return keys
