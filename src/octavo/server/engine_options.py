"""Engine options that follow from the server's own options."""

from __future__ import annotations

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.server.access import client_keys
from octavo.server.config import ServerConfig

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
