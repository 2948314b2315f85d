"""The options of the HTTP server; the flags of `octavo serve` are derived from them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from octavo.config import parse_bytes
from octavo.dialect.formats import REASONING_PARSERS, TOOL_CALL_PARSERS
from octavo.errors import ConfigError, shown
from octavo.option import option
from octavo.server.tenants.keys import check_key

API_KEY_VARIABLE = "OCTAVO_API_KEY"
ADMIN_KEY_VARIABLE = "OCTAVO_ADMIN_KEY"

# Linux's limit in bytes; other systems allow a few bytes less.
MAX_UNIX_PATH = 107

LOG_LEVELS, LOG_FORMATS = ("debug", "info", "warning", "error"), ("text", "json")
METRICS_ACCESS = ("open", "admin")
PARSER_CHOICES = ("auto", "none", *TOOL_CALL_PARSERS)
REASONING_CHOICES = ("auto", "none", *REASONING_PARSERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The options of one server, validated at construction; raises `ConfigError` with the value in the message."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = option(8000, "port to listen on; 0 picks a free one")
    uds: str | None = option(
        None, "path of a Unix socket to listen on instead; its owner and group may connect", metavar="PATH"
    )
    served_model_name: Sequence[str] = option(
        (), "name of the model in requests, instead of --model; may be given several times", metavar="NAME"
    )
    api_key: Sequence[str] = option(
        (),
        "key that clients must send; may be given several times, each a tenant of its own; shows in `ps`: prefer "
        f"--keys-file; default: ${API_KEY_VARIABLE}, split at commas",
        metavar="KEY",
        secret=True,
    )
    keys_file: str | None = option(
        None, "TOML file of tenants and their keys, instead of --api-key; reread on SIGHUP", metavar="FILE"
    )
    admin_key: str | None = option(
        None,
        "key for /debug and /reset_prefix_cache, which are closed without one (or a tenant with admin = true in the "
        f"keys file); shows in `ps`; default: ${ADMIN_KEY_VARIABLE}",
        metavar="KEY",
        secret=True,
    )
    metrics_access: Literal["open", "admin"] = option(
        "open",
        "who may read /metrics; admin: requests with an admin key only; numbers by tenant always need an admin key",
    )
    shared_prefix_cache: bool = option(
        False, "share cached prefixes between tenants: faster, but each can find out what others have sent"
    )
    allow_unauthenticated: bool = option(False, "listen on addresses other than loopback without API keys")
    allowed_hosts: Sequence[str] = option(
        (),
        "without API keys: a host name that requests may use, besides addresses, localhost and the machine's own name; "
        "may be given several times; *: any",
        metavar="NAME",
    )
    allowed_origins: Sequence[str] = option(
        (),
        "origin whose web pages may use the server (CORS), such as https://chat.example; may be given several times; "
        "*: any",
        metavar="URL",
    )
    max_body_size: int | str = option("16MiB", "maximum size of a request body; larger ones get a 413")
    max_total_body_size: int | str = option(
        "256MiB",
        "maximum size of all bodies being received or read, beyond the first 64 KiB of each; above it, the tenant with "
        "the most gets a 503 for the oldest of its bodies",
    )
    ssl_certfile: str | None = option(None, "certificate chain (PEM): serve HTTPS; needs --ssl-keyfile", metavar="FILE")
    ssl_keyfile: str | None = option(None, "private key (PEM) of --ssl-certfile", metavar="FILE")
    root_path: str = option("", "path prefix that a proxy in front removes, such as /llm", metavar="PATH")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "lowest severity that is logged")
    log_format: Literal["text", "json"] = option(
        "text", "format of the log, on standard error; json: one object per line"
    )
    access_log: bool = option(True, "log a line for every request, without its prompt and answer")
    max_connections: int = option(
        1024,
        "maximum number of open connections; one more closes the one that has waited for a request for the longest, or "
        "gets a 503 if all have one",
    )
    header_timeout: float = option(10.0, "time in which a client must send a request's header", metavar="SECONDS")
    body_timeout: float = option(
        30.0,
        "time in which a client must send a request's body, in addition to one second per 64 KiB",
        metavar="SECONDS",
    )
    keep_alive_timeout: float = option(5.0, "time that a connection without a request is kept open", metavar="SECONDS")
    write_timeout: float = option(
        30.0, "time after which a client that reads nothing of its answer is disconnected", metavar="SECONDS"
    )
    request_timeout: float | None = option(
        None,
        "time after which an unfinished request ends with an error, queueing included; default: none",
        metavar="SECONDS",
    )
    max_stored_responses: int | str = option(
        "64MiB", "memory for stored responses (previous_response_id) of all tenants; 0: none are stored"
    )
    max_stored_tenant_responses: int | str = option(
        "16MiB", "memory for stored responses of one tenant; the oldest are dropped"
    )
    tool_call_parser: Literal[*PARSER_CHOICES] = option(  # type: ignore[valid-type]
        "auto", "format of the model's tool calls; auto: the one in its chat template, or hermes"
    )
    reasoning_parser: Literal[*REASONING_CHOICES] = option(  # type: ignore[valid-type]
        "auto", "format of the model's reasoning, returned as reasoning_content; auto: the one in its chat template"
    )
    strict_requests: bool = option(
        False, "refuse unknown fields of a request (400) instead of ignoring them with a warning"
    )
    live_page_text: bool = option(
        False, "show the text of a block's tokens on the live page (at /), to holders of an admin key only"
    )
    max_body_seconds: float = option(
        10.0,
        "time that reading one large body may take: its JSON, the chat template and the tokenizer",
        metavar="SECONDS",
    )
    max_body_memory: int | str = option("1GiB", "memory that reading one large body, or one chat, may take")
    watchdog_timeout: float = option(
        60.0,
        "time after which an engine step that has not finished is reported (log, /metrics, /health, /ready), but not "
        "stopped; 0: never",
        metavar="SECONDS",
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "OpenTelemetry collector for traces of all requests, such as http://127.0.0.1:4318/v1/traces; needs "
        "octavo[otel]",
        metavar="URL",
    )
    shutdown_timeout: float = option(
        30.0, "time that running requests have to finish after the first Ctrl-C or SIGTERM", metavar="SECONDS"
    )

    def __post_init__(self) -> None:
        for name in ("served_model_name", "api_key", "allowed_hosts", "allowed_origins"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
            if not all(getattr(self, name)):
                raise ConfigError(f"{name} must not be empty")
        for key in self.api_key:
            check_key(key, "api_key")
        if self.admin_key is not None:
            check_key(self.admin_key, "admin_key")
        if self.keys_file is not None and self.api_key:
            raise ConfigError("give either keys_file or api_key: the file holds all keys")
        for name in ("max_body_size", "max_total_body_size", "max_body_memory"):
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, parse_bytes(value))
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("max_stored_responses", "max_stored_tenant_responses"):
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, parse_bytes(value))
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.total_body_limit < self.body_limit:
            raise ConfigError(
                f"max_total_body_size ({self.total_body_limit}) must be at least max_body_size ({self.body_limit}): no "
                "body of that size could be received"
            )
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        for name in ("header_timeout", "body_timeout", "keep_alive_timeout", "write_timeout"):
            if not 0 < getattr(self, name) < inf:
                raise ConfigError(f"{name} must be a positive number of seconds, got {getattr(self, name)}")
        if self.request_timeout is not None and not 0 < self.request_timeout < inf:
            raise ConfigError(f"request_timeout must be a positive number of seconds, got {self.request_timeout}")
        if self.uds is not None and not 0 < len(os.fsencode(self.uds)) <= MAX_UNIX_PATH:
            raise ConfigError(f"uds must be a path of 1 to {MAX_UNIX_PATH} bytes, got {shown(self.uds)}")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("ssl_certfile and ssl_keyfile go together: give both, or neither")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"root_path must begin with / and not end with it, got {self.root_path!r}")
        choices_of = {"log_level": LOG_LEVELS, "log_format": LOG_FORMATS, "metrics_access": METRICS_ACCESS}
        choices_of |= {"tool_call_parser": PARSER_CHOICES, "reasoning_parser": REASONING_CHOICES}
        for name, choices in choices_of.items():
            if (value := getattr(self, name)) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        if self.max_connections < 1:
            raise ConfigError(f"max_connections must be at least 1, got {self.max_connections}")
        if not self.max_body_seconds > 0:
            raise ConfigError(f"max_body_seconds must be positive, got {self.max_body_seconds}")
        if not 0 <= self.watchdog_timeout < inf:
            raise ConfigError(f"watchdog_timeout must be a number of seconds, 0 or more, got {self.watchdog_timeout}")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"otlp_traces_endpoint must be an http or https URL, got {shown(endpoint)}")
        if not self.shutdown_timeout >= 0:
            raise ConfigError(f"shutdown_timeout must not be negative, got {self.shutdown_timeout}")

    @property
    def body_limit(self) -> int:
        """`max_body_size` as a number of bytes."""
        return int(self.max_body_size)

    @property
    def total_body_limit(self) -> int:
        """`max_total_body_size` as a number of bytes."""
        return int(self.max_total_body_size)

    @property
    def stored_responses_limit(self) -> int:
        """`max_stored_responses` as a number of bytes."""
        return int(self.max_stored_responses)

    @property
    def stored_tenant_responses_limit(self) -> int:
        """`max_stored_tenant_responses` as a number of bytes."""
        return int(self.max_stored_tenant_responses)

    @property
    def body_memory(self) -> int:
        """`max_body_memory` as a number of bytes."""
        return int(self.max_body_memory)

    @property
    def accepted_admin_key(self) -> str | None:
        """The admin key from the options or, if not given, from the environment."""
        if self.admin_key is not None:
            return self.admin_key
        return next(iter(_keys_of_environment(ADMIN_KEY_VARIABLE)), None)

    @property
    def accepted_keys(self) -> tuple[str, ...]:
        """The API keys from the options or, if not given, from the environment.

        Raises:
            ConfigError: the environment variable is set but holds no key; serving without keys cannot be what was
                meant.
        """
        if self.api_key or self.keys_file is not None:
            return tuple(self.api_key)
        return _keys_of_environment(API_KEY_VARIABLE)


def _keys_of_environment(variable: str) -> tuple[str, ...]:
    value = os.environ.get(variable)
    if value is None:
        return ()
    keys = tuple(key for part in value.split(",") if (key := part.strip()))
    if not keys:
        raise ConfigError(f"the environment variable {variable} is set but holds no key: set one, or unset it")
    for key in keys:
        check_key(key, f"a key of ${variable}")
    return keys
