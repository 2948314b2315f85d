"""`octavo route`: one address for several servers."""

from __future__ import annotations

import argparse
import logging
import os

from octavo.cluster.config import RouterConfig
from octavo.commands.options import add_options, given_options
from octavo.commands.settings import Settings, add_config_option
from octavo.errors import require_packages
from octavo.server.config import KEY_OPTIONS, ServerConfig
from octavo.server.http.logs import configure_logging

logger = logging.getLogger("octavo.route")

DESCRIPTION = """\
Send each request to the server that has most of its prompt cached, weighed against load (docs/operate/route.md). All
servers need the same --router-key, --kv-events-config and, if there is one, --keys-file.
"""


# Options that only a server has: those of its engine, its answers and its registration with routers.
_OF_SERVERS = {
    *("served_model_name", "tool_call_parser", "enable_auto_tool_choice", "reasoning_parser", "strict_requests"),
    *("role", "register_with", "advertised_url", "live_page_text", "otlp_traces_endpoint", "watchdog_timeout"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_option(parser)
    add_options(parser, RouterConfig)
    add_options(parser, ServerConfig, omit=_OF_SERVERS)


def run(args: argparse.Namespace) -> int:
    require_packages("octavo route", "route", "httptools")
    from octavo.cluster.app import route

    flags = {**given_options(args, ServerConfig), **given_options(args, RouterConfig)}
    configs, path = (ServerConfig, RouterConfig), getattr(args, "config", None)
    settings = Settings(configs, flags, os.environ, path, [KEY_OPTIONS], omit=_OF_SERVERS)
    config = ServerConfig(**settings.given(ServerConfig))
    router_config = RouterConfig(**settings.given(RouterConfig))
    configure_logging(config.log_level, config.log_format)
    settings.log()
    route(router_config, config)
    return 0
