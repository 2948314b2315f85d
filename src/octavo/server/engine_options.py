"""Engine options that follow from the server's own options."""

from __future__ import annotations

from typing import Any

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.server.access import client_keys
from octavo.server.config import ServerConfig

# Defaults of a server where they differ from those of `LLM`: with a seed that others know, a client could predict what
# is drawn for another; without a latency target, one long prompt would hold all streams for as long as a step takes.
DEFAULTS: dict[str, Any] = {"seed": None, "itl_slo_ms": 500.0}
# Share of the pin budget and of the queue that one tenant may take if there are several.
SHARE_OF_SEVERAL = 0.5


def check_role(config: EngineConfig, server: ServerConfig) -> None:
    """Raise `ConfigError` if prompts are to be computed apart, but their blocks cannot be handed over."""
    if server.role != "both" and config.kv_neighbours is None:
        raise ConfigError(
            f"role {server.role} needs kv_neighbours, because the server that answers fetches a prompt's blocks from "
            "the one that computed it"
        )


def share_among_tenants(config: EngineConfig, server: ServerConfig) -> EngineConfig:
    """With several tenants, limit each to half the pin budget and half the queue, unless a share was configured."""
    if len({client.tenant for client in client_keys(server).values()}) < 2:
        return config
    return config if config.tenant_share is not None else config.replace(tenant_share=SHARE_OF_SEVERAL)
