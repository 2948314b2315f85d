"""Every option of the HTTP server, declared once: `octavo serve` makes its flags from this."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.config import option, parse_bytes
from octavo.errors import ConfigError

API_KEY_VARIABLE = "OCTAVO_API_KEY"
ADMIN_KEY_VARIABLE = "OCTAVO_ADMIN_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The options of one server. Validated at construction; raises `ConfigError` with the value in the message."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = option(8000, "port to listen on; 0 picks a free one")
    served_model_name: Sequence[str] = option(
        (), "name that requests give for the model, instead of --model; may be given several times"
    )
    api_key: Sequence[str] = option(
        (), f"key that clients must send; may be given several times; default: ${API_KEY_VARIABLE}, split at commas"
    )
    admin_key: str | None = option(
        None, f"key that opens /debug; without one nobody may ask there; default: ${ADMIN_KEY_VARIABLE}"
    )
    max_body_size: int | str = option("16MiB", "largest request body, in bytes or as '16MiB'; larger ones get a 413")
    shutdown_timeout: float = option(
        30.0, "seconds that running requests may take to finish after the first Ctrl-C or SIGTERM"
    )

    def __post_init__(self) -> None:
        for name in ("served_model_name", "api_key"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
            if not all(getattr(self, name)):
                raise ConfigError(f"{name} must not be empty")
        if self.admin_key is not None and not self.admin_key.strip():
            raise ConfigError("admin_key must not be empty")
        if isinstance(self.max_body_size, str):
            object.__setattr__(self, "max_body_size", parse_bytes(self.max_body_size))
        if self.body_limit < 1:
            raise ConfigError(f"max_body_size must be positive, got {self.max_body_size}")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        if not self.shutdown_timeout >= 0:
            raise ConfigError(f"shutdown_timeout must not be negative, got {self.shutdown_timeout}")

    @property
    def body_limit(self) -> int:
        """`max_body_size` as a number of bytes."""
        return int(self.max_body_size)

    @property
    def accepted_admin_key(self) -> str | None:
        """The admin key given, or else that of the environment."""
        return (self.admin_key or os.environ.get(ADMIN_KEY_VARIABLE, "")).strip() or None

    @property
    def accepted_keys(self) -> tuple[str, ...]:
        """The keys given, or else those of the environment; none means that no key is asked for."""
        if self.api_key:
            return tuple(self.api_key)
        return tuple(key for part in os.environ.get(API_KEY_VARIABLE, "").split(",") if (key := part.strip()))
