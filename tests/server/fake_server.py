"""A process that serves a `FakeEngine`: `python -m tests.server.fake_server PORT STEP_SECONDS SHUTDOWN_TIMEOUT [JSON]`.

JSON is an object of further server options. Once its standard input has a line, steps take no time any more.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from typing import Any

from octavo.errors import ConfigError
from octavo.server.config import ServerConfig
from octavo.server.run import serve
from tests.server.fake_engine import FakeEngine


def make_engine(step_seconds: float) -> Any:
    print("loading the model", flush=True)
    engine = FakeEngine(step_seconds=step_seconds)
    threading.Thread(target=hurry_when_told, args=(engine,), daemon=True).start()
    return engine


def hurry_when_told(engine: FakeEngine) -> None:
    if sys.stdin.readline():
        engine.step_seconds = 0.0


def main() -> int:
    port, step_seconds, shutdown_timeout, *more = sys.argv[1:]
    options = json.loads(more[0]) if more else {}
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO if more else logging.WARNING)
    try:
        config = ServerConfig(port=int(port), shutdown_timeout=float(shutdown_timeout), **options)
        serve(lambda: make_engine(float(step_seconds)), config)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    print("gone in peace", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
