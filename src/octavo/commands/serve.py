"""`octavo serve`: the HTTP server."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from octavo.commands.base import Command
from octavo.commands.options import add_engine_options, add_options, engine_options, given_options
from octavo.config import EngineConfig
from octavo.server.access import client_keys
from octavo.server.config import ServerConfig
from octavo.server.logs import configure_logging

if TYPE_CHECKING:
    from octavo import AsyncEngine


# Of the pins and of the queue, what one tenant may take where there are others.
SHARE_OF_SEVERAL = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "server options", ServerConfig)
    add_engine_options(parser, positional_model=True)


def run(args: argparse.Namespace) -> int:
    server_config = ServerConfig(**given_options(args, ServerConfig))
    config = share_among_tenants(EngineConfig.from_options(engine_options(args)), server_config)
    configure_logging(server_config.log_level, server_config.log_format)

    from octavo.server.run import serve

    def make_engine() -> AsyncEngine:
        # Torch is imported here, once the server holds its port: a port in use is told without that wait.
        from octavo import AsyncEngine
        from octavo.engine.builder import build_engine

        return AsyncEngine(build_engine(config), config.model)

    serve(make_engine, server_config)
    return 0


def share_among_tenants(config: EngineConfig, server: ServerConfig) -> EngineConfig:
    """With several tenants, limit each to half the pin budget and half the queue, unless a share was configured."""
    if len({client.tenant for client in client_keys(server).values()}) < 2:
        return config
    shares = {name: getattr(config, name) for name in ("pin_tenant_share", "queue_tenant_share")}
    return config.replace(**{name: SHARE_OF_SEVERAL if share is None else share for name, share in shares.items()})


COMMAND = Command("serve", "serve a model over HTTP, with OpenAI's API", add_arguments, run)
