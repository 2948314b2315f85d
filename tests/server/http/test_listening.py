"""Where a server listens besides a plain port: a Unix socket, and a port with HTTPS."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import ssl
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from octavo.errors import ConfigError
from octavo.server.config import MAX_UNIX_PATH, ServerConfig
from octavo.server.http.listening import UNIX_SOCKET_MODE, bind_unix, bound, log_failed_accepts
from tests.server.conftest import Running
from tests.server.server_process import ServerProcess
from tests.server.test_run import start

__all__ = ["start"]

BODY = {"prompt": "x", "max_tokens": 3}


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "octavo.sock")


def test_a_unix_socket_serves_its_owner_and_group(start_server: Callable[..., Running], path: str) -> None:
    server = start_server(uds=path)
    assert server.post("/v1/completions", BODY).status_code == 200
    with server.client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
        assert [line for line in response.iter_lines() if line][-1] == "data: [DONE]"
    assert stat.S_IMODE(os.stat(path).st_mode) == UNIX_SOCKET_MODE


def test_a_server_without_descriptors_says_so_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.new_event_loop()
    log_failed_accepts(loop)
    failed = {"message": "socket.accept() out of system resource", "exception": OSError(24, "Too many open files")}
    for _ in range(50):
        loop.call_exception_handler(failed)
    loop.call_exception_handler({"message": "something else"})
    loop.close()
    first, other = caplog.records
    assert first.getMessage().startswith("cannot accept connections: [Errno 24] Too many open files; raise the limit")
    assert (first.exc_info, other.getMessage()) == (None, "something else")


@pytest.mark.slow
def test_a_server_on_a_unix_socket_says_so_and_removes_it_at_its_end(
    start: Callable[..., ServerProcess], path: str
) -> None:
    server = start(uds=path)
    assert server.ready == f"Octavo serving fake on unix:{path}\n"
    with httpx.Client(transport=httpx.HTTPTransport(uds=path)) as client:
        assert client.get("http://localhost/ready").status_code == 200
    server.stop(signal.SIGTERM)
    assert server.process.wait(60) == 0
    assert not os.path.exists(path)


def test_what_a_killed_server_left_is_replaced(path: str) -> None:
    bind_unix(path).close()
    assert os.path.exists(path)
    with bound(ServerConfig(uds=path)) as listener:
        listener.listen()
        with pytest.raises(ConfigError, match="a server listens there already"):
            bind_unix(path)
    assert not os.path.exists(path)


def test_a_file_that_is_no_socket_is_left_alone(path: str) -> None:
    Path(path).write_text("mine")
    with pytest.raises(ConfigError, match="that file exists, and is not a socket"):
        bind_unix(path)
    assert Path(path).read_text() == "mine"


def test_a_folder_that_does_not_exist_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on .*/none/o\.sock: no such file or directory$"):
        bind_unix(str(tmp_path / "none" / "o.sock"))


def test_a_path_that_no_socket_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="uds must be a path of 1 to 107 bytes"):
        ServerConfig(uds="/" + "x" * MAX_UNIX_PATH)


@pytest.fixture
def certificate(tmp_path: Path) -> dict[str, str]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed, and makes the certificate")
    certfile, keyfile = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=octavo", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, *names, "-keyout", keyfile, "-out", certfile], check=True, capture_output=True)
    return {"ssl_certfile": certfile, "ssl_keyfile": keyfile}


def test_https_answers_whole_and_in_a_stream(start_server: Callable[..., Running], certificate: dict[str, str]) -> None:
    server = start_server(**certificate)
    assert server.url.startswith("https://")
    answer = server.post("/v1/completions", BODY)
    assert answer.status_code == 200
    with server.client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
        assert [line for line in response.iter_lines() if line][-1] == "data: [DONE]"


def test_a_client_that_does_not_trust_the_certificate_or_speaks_plain_http_gets_nothing(
    start_server: Callable[..., Running], certificate: dict[str, str]
) -> None:
    server = start_server(**certificate)
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(server.url + "/health")
    with pytest.raises(httpx.TransportError):
        httpx.get(server.url.replace("https", "http") + "/health")
    assert server.client.get("/health").status_code == 200


def test_old_tls_is_refused(start_server: Callable[..., Running], certificate: dict[str, str]) -> None:
    server = start_server(**certificate)
    context = ssl.create_default_context(cafile=certificate["ssl_certfile"])
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        socket.create_connection(("127.0.0.1", server.port)) as plain,
        pytest.raises((ssl.SSLError, ConnectionError)),
    ):
        context.wrap_socket(plain, server_hostname="127.0.0.1")
