"""`octavo serve`: the HTTP server."""

from __future__ import annotations

import argparse
import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.checkpoint.model_source import load_model_config, model_of, tokenizer_of
from octavo.commands.interrupt import Interrupt, remembered_interrupt
from octavo.commands.options import add_options, given_options
from octavo.commands.settings import Settings, add_config_option
from octavo.commands.torch_start import collection_paused, import_torch_to_serve, load_torch_libraries
from octavo.config import SERVER_DEFAULTS, EngineConfig
from octavo.errors import ConfigError
from octavo.server.config import KEY_OPTIONS, ServerConfig
from octavo.server.engine_options import check_role, share_among_tenants
from octavo.server.http.logs import configure_logging
from octavo.server.interpreter_settings import return_free_memory

if TYPE_CHECKING:
    from octavo import AsyncEngine

logger = logging.getLogger("octavo.serve")

DESCRIPTION = """\
Serve a model over HTTP, with OpenAI's API. Every option can also be set in the environment (OCTAVO_MAX_NUM_SEQS=64) or
in a TOML file (max_num_seqs = 64); flags override the environment, which overrides the file.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_option(parser)
    add_options(parser, ServerConfig)
    add_options(parser, EngineConfig, positional_model=True)


def run(args: argparse.Namespace) -> int:
    flags = {**given_options(args, ServerConfig), **given_options(args, EngineConfig)}
    settings = Settings(
        (ServerConfig, EngineConfig), flags, os.environ, getattr(args, "config", None), [KEY_OPTIONS], SERVER_DEFAULTS
    )
    server_config = ServerConfig(**settings.given(ServerConfig))
    configure_logging(server_config.log_level, server_config.log_format)
    config = share_among_tenants(EngineConfig.from_options(settings.given(EngineConfig)), server_config)
    check_role(config, server_config)
    config.require_packages()
    server_config.require_packages()
    settings.log()
    logger.info("loading %s", config.model)
    if config.node_rank > 0:
        _compute(config)
        return 0
    with remembered_interrupt() as interrupt:
        _serve(config, server_config, interrupt)
    return 0


def _compute(config: EngineConfig) -> None:
    """Compute for machine 0, which serves."""
    load_torch_libraries()
    from octavo.engine.ranks import serve_ranks

    # No handler of Python's runs while C++ waits for machine 0.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    check_files(config)
    serve_ranks(config)


def _serve(config: EngineConfig, server_config: ServerConfig, interrupt: Interrupt) -> None:
    load_torch_libraries()
    with collection_paused():
        from octavo.server.run import serve

    interrupt.check()

    def make_engine() -> AsyncEngine:
        # Torch is only imported once the server holds its port and its files are there: it takes a second.
        check_files(config)
        tokenizer = None
        with collection_paused(), interrupt.held():
            if load_model_config(model_of(config)).runs_natively:
                from octavo.server.bodies.reader_pool import start_ahead
                from octavo.text.tokenizer_loading import begin_loading

                # A large vocabulary takes 200 MB while it is loaded: those go back before the weights are read.
                if (tokenizer := begin_loading(config)) is not None:
                    tokenizer.add_done_callback(lambda _: return_free_memory())
                    start_ahead(tokenizer_of(config))
                import_torch_to_serve()
            from octavo import AsyncEngine
            from octavo.engine.builder import build_engine

        core = build_engine(config, tokenizer)
        watchdog = server_config.watchdog_timeout or None
        engine = AsyncEngine(core, config.model, watchdog_seconds=watchdog, prepare_grammars=True)
        engine.stats.tracer = tracer
        interrupt.check()
        return engine

    tracer = None
    if server_config.otlp_traces_endpoint is not None:
        from octavo.observe.tracing import otlp_tracer

        tracer = otlp_tracer(server_config.otlp_traces_endpoint, config.model)
    try:
        serve(make_engine, server_config, check_interrupt=interrupt.check)
    finally:
        if tracer is not None:
            tracer.close()


def check_files(config: EngineConfig) -> None:
    """Raise the error of a model or a file that is not there.

    Raises:
        ModelNotFoundError: there is no such model.
        ConfigError: a file cannot be read; the message names its option.
    """
    model_of(config)
    files = {"chat_template": config.chat_template}
    if str(config.kv_cache_dtype).endswith(".toml"):
        files["kv_cache_dtype"] = config.kv_cache_dtype
    for name, path in files.items():
        try:
            if path is not None:
                Path(path).expanduser().open("rb").close()
        except OSError as error:
            raise ConfigError(f"{name}: cannot read {path}: {error.strerror}") from error
    for name, place, is_folder in [("kv_disk", config.kv_disk, True), ("record_plans", config.record_plans, False)]:
        if place is not None and (problem := _cannot_write(Path(place).expanduser(), is_folder)):
            raise ConfigError(f"{name}: cannot write {place}: {problem}")


def _cannot_write(path: Path, is_folder: bool) -> str | None:
    """Return why a file or a folder cannot be made or written there; None if it can be written."""
    if path.exists():
        return None if path.is_dir() == is_folder else f"it is a {'file' if is_folder else 'folder'}"
    # A folder is made with those above it.
    above = next(folder for folder in path.absolute().parents if folder.exists()) if is_folder else path.parent
    if not above.is_dir():
        return f"{above} is a file" if above.exists() else f"there is no folder {above}"
    return None if os.access(above, os.W_OK) else f"{above} is not writable"
