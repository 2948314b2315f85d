"""A process that serves a `FakeEngine`: `python -m tests.server.fake_server PORT STEP_SECONDS SHUTDOWN_TIMEOUT`."""

from __future__ import annotations

import sys

from octavo.errors import ConfigError
from octavo.server.config import ServerConfig
from octavo.server.run import serve
from tests.server.fake_engine import FakeEngine


def make_engine(step_seconds: float) -> FakeEngine:
    print("loading the model", flush=True)
    return FakeEngine(step_seconds=step_seconds)


def main() -> int:
    port, step_seconds, shutdown_timeout = sys.argv[1:]
    try:
        config = ServerConfig(port=int(port), shutdown_timeout=float(shutdown_timeout))
        serve(lambda: make_engine(float(step_seconds)), config)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    print("gone in peace", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
