"""`octavo route`: one address for several servers."""

from __future__ import annotations

import argparse
import logging
import os

from octavo.cluster.config import RouterConfig
from octavo.commands.options import add_options, given_options
from octavo.commands.settings import Settings
from octavo.server.config import KEY_OPTIONS, ServerConfig
from octavo.server.http.logs import configure_logging

logger = logging.getLogger("octavo.route")

DESCRIPTION = """\
Send each request to the server with most of its prompt cached, weighed against the servers' load. Start all servers
with the same --router-key and with --kv-events-config. The servers check tenants' keys and quotas; give the router the
same --keys-file, because each tenant's prompts are cached separately. Options may also come from the environment and
--config, as for `octavo serve`.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help='TOML file of options: strategy = "prefix", and so for every flag below; default: $OCTAVO_CONFIG',
    )
    add_options(parser, RouterConfig)
    add_options(parser, ServerConfig)


def run(args: argparse.Namespace) -> int:
    from octavo.cluster.app import route

    flags = {**given_options(args, ServerConfig), **given_options(args, RouterConfig)}
    settings = Settings((ServerConfig, RouterConfig), flags, os.environ, getattr(args, "config", None), [KEY_OPTIONS])
    config = ServerConfig(**settings.given(ServerConfig))
    router_config = RouterConfig(**settings.given(RouterConfig))
    configure_logging(config.log_level, config.log_format)
    settings.log()
    route(router_config, config)
    return 0
