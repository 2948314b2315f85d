from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.workloads.server_process import ServerStartError, fetch_json, running_server

HEALTHY = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
        self.wfile.write(json.dumps(sys.argv[1:]).encode())
    def log_message(self, *args): pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler)
print("WARNING a line of the log on the way", file=sys.stderr, flush=True)
print(f"Octavo serving a model on http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
"""


def test_a_server_is_awaited_passed_its_options_and_stopped() -> None:
    with running_server(["--max-num-seqs=3"], [sys.executable, "-c", HEALTHY]) as server:
        arguments = fetch_json(server.base_url + "/health")
        assert "--max-num-seqs=3" in arguments
        assert arguments[arguments.index("--port") + 1] == "0", "a port chosen for it could be taken before it is bound"
        assert server.startup_s > 0
        assert server.pid is not None
        assert str(os.getpid()) in Path(f"/proc/{server.pid}/status").read_text()
    with pytest.raises(ConfigError, match="cannot read"):
        fetch_json(server.base_url + "/health", timeout_s=60)


def test_an_answer_that_is_an_error_is_told_with_its_status() -> None:
    with (
        running_server([], [sys.executable, "-c", HEALTHY]) as server,
        pytest.raises(ConfigError, match="answered 404"),
    ):
        fetch_json(server.base_url + "/v1/models")


def test_a_server_that_does_not_start_is_told_with_its_last_words() -> None:
    with (
        pytest.raises(ServerStartError, match="code 3 at its start: no such model"),
        running_server([], [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]),
    ):
        pass
