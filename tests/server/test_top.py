"""`octavo top`: it shows what the live page shows, in any terminal, and says what keeps it from that."""

from __future__ import annotations

import http.client
import io
import itertools
import json
import os
import pty
import re
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.live import Live

from octavo.cli import main
from octavo.commands import top
from octavo.commands.top import LiveServer
from octavo.commands.top_screen import State, percentile, shares, shortened, table
from octavo.config import EngineConfig
from octavo.engine.live import LiveView
from octavo.errors import OctavoError
from octavo.request import Request, RequestId
from octavo.sampling_params import SamplingParams
from octavo.scheduler.assembly import assemble_cache, assemble_scheduler
from octavo.server.live_page import MOST_PAGES
from tests.server.real_engine import RealServer

pytestmark = pytest.mark.integration

STORY = "There was an old man with a beard, who said: it is just as I feared. " * 3
HEAD: dict[str, Any] = {"model": "m", "ttft_bounds": [1.0], "itl_bounds": [1.0]}
NOTHING: dict[str, Any] = {"totals": [0] * 5, "ttft": [0, 0], "itl": [0, 0], "counters": [0] * 7, "tiers": []}
SPEC = {"num_blocks": 4, "block_bytes": 64, "host_blocks": 8}
FIRST: dict[str, Any] = {"at": 1.0, "spec": SPEC, "all": ["0013", "0000"], **NOTHING}
DISPLACED = {"displaced": True}


def stream(*events: dict[str, Any] | str) -> bytes:
    """The answer of a server that sends these events and closes the connection."""
    texts = (event if isinstance(event, str) else json.dumps(event) for event in events)
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
        + "".join(f"data: {text}\n\n" for text in texts).encode()
    )


def refusal(status: int, body: str = "<html>a proxy") -> bytes:
    return f"HTTP/1.1 {status} No\r\nContent-Type: text/html\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


@contextmanager
def answering(*answers: bytes) -> Iterator[str]:
    """Yields the URL of a server with an answer for each connection; when it is left, all have been given."""

    def answer_all() -> None:
        for answer in answers:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as request:
                while request.readline().strip():
                    pass
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer_all, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(60)
        assert not thread.is_alive(), "it was not asked often enough"


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], tuple[str, str]]:
    """Runs `octavo top URL` in a terminal until it fails; returns what it drew and what it says at the end."""
    monkeypatch.setattr(top, "_RETRY_S", 0)
    monkeypatch.setattr(top, "_REDRAW_S", 0)

    def run(url: str) -> tuple[str, str]:
        drawn = io.StringIO()
        console = Console(file=drawn, force_terminal=True, width=200, height=24, _environ={"TERM": "xterm"})
        monkeypatch.setattr("rich.console.Console", lambda: console)
        assert main(["top", url]) == 1
        return drawn.getvalue(), capsys.readouterr().err

    return run


def test_top_shows_the_same_in_a_terminal(real: RealServer, capsys: pytest.CaptureFixture[str]) -> None:
    real.complete(STORY, max_tokens=2)
    assert main(["top", real.url, "--once"]) == 0
    out = capsys.readouterr().out
    assert "running" in out
    cached = real.core.scheduler.kv.pool.num_cached
    assert f"cached {cached}" in out


def test_top_follows_a_request_from_its_events_alone() -> None:
    state = State()
    nothing: dict[str, Any] = {"totals": [0] * 5, "ttft": [0, 0], "itl": [0, 0], "counters": [1, 0, 0, 2, 0, 0, 0]}
    nothing["tiers"] = [["disk", False, 7, 5]]
    state.take({"model": "m", "ttft_bounds": [1.0], "itl_bounds": [1.0]})
    request = {"id": "r", "tenant": "alice", "prompt": 9, "max": 5, "cache": None, "progress": [0, 0, 0, 0]}
    spec = {"num_blocks": 4, "block_bytes": 64, "host_blocks": 8}
    state.take({"at": 1.0, "spec": spec, "all": ["0013", "0000"], "added": [request], **nothing})
    state.take(
        {
            "at": 2.0,
            "blocks": [1, 5, 0],
            "updated": [["r", 1, 9, 3, 2, {"cached_tokens": 8, "reason": "cold"}]],
            **nothing,
        }
    )
    console = Console(width=160, height=30, record=True, file=io.StringIO())
    console.print(state.shown(console))
    text = console.export_text()
    assert re.search(r"r +alice +running +2 × +9 +8 +9 +3 of 5 +cold", text)
    assert "shared 1 (64 B)" in text
    assert "KV cache in use % 66.7" in text
    assert "2 of 8 blocks (128 B)" in text
    assert "7 blocks written, 5 read (closed after errors)" in text
    state.take({"at": 3.0, "removed": ["r"], **nothing})
    assert not state.requests


def test_top_shows_something_after_each_event_of_a_server(real: RealServer) -> None:
    """The first one only describes the server, which once ended `octavo top` with an IndexError."""
    state, console = State(), Console(width=100, record=True, file=io.StringIO())
    for news in itertools.islice(LiveServer(real.url).events(), 2):
        state.take(news)
        console.print(state.shown(console))
    assert "tiny: no figures yet" in (text := console.export_text())
    assert "KV cache in use %" in text


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (60, 15), (40, 24)])
def test_top_fits_its_terminal(width: int, height: int) -> None:
    state = State()
    nothing: dict[str, Any] = {"totals": [0] * 5, "ttft": [0, 0], "itl": [0, 0], "counters": [64, 9, 0, 2, 0, 0, 0]}
    state.take({"model": "m", "ttft_bounds": [1.0], "itl_bounds": [1.0]})
    requests = [
        {"id": f"cmpl-{'0' * 30}{i}", "tenant": "", "prompt": 999, "max": 999, "cache": None}
        | {"progress": [int(i < 64), 9, 5, 0]}
        for i in range(73)
    ]
    spec = {"num_blocks": 2001, "block_bytes": 1 << 20, "host_blocks": 8}
    codes = "0" + "0" * 3 + "1" * 1000 + "3" * 990 + "5" * 7
    state.take({"at": 1.0, "spec": spec, "all": [codes, ""], "added": requests, "tiers": [], **nothing})
    console = Console(width=width, height=height, record=True, file=io.StringIO(), no_color=True)
    console.print(state.shown(console))
    lines = console.export_text().rstrip("\n").split("\n")
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    (bar,) = (line for line in lines if line.startswith("blocks"))
    assert len(bar) == width - 1
    assert bar.split()[1] == "".join(sorted(bar.split()[1], key="·░▒▓█".index))
    assert {"·", "░", "▓", "█"} == set(bar.split()[1]), "told apart without colours, and none left out"
    if (width, height) != (60, 15):  # where there is no room for any
        assert lines[-1] == f"and {73 - sum('cmpl' in line for line in lines)} more"


def test_a_bar_is_divided_in_proportion() -> None:
    assert shares([0, 0], 10) == [0, 0]
    assert shares([1, 1, 1], 10) in ([4, 3, 3], [3, 4, 3], [3, 3, 4])
    assert shares([1, 10_000], 10) == [1, 9]
    assert sum(shares([1] * 5, 3)) == 3


def test_top_prints_rates_once_if_its_output_is_no_terminal(
    real: RealServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", real.url]) == 0
    assert "output tok/s 0.0" in (out := capsys.readouterr().out)
    assert re.search(r", the last [12] s", out)


def test_top_says_why_it_shows_nothing(real: RealServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", real.url.removeprefix("http://"), "--once"]) == 0
    capsys.readouterr()
    assert main(["top", f"{real.url}/elsewhere", "--once"]) == 1
    assert "answers 404" in capsys.readouterr().err


def test_a_quantile_is_linear_within_its_bucket() -> None:
    counts, bounds = [0, 2, 2, 0], [1.0, 2.0, 4.0]
    assert percentile(counts, bounds, 0.25) == 1.5
    assert percentile(counts, bounds, 0.75) == 3.0
    assert percentile([0] * 4, bounds, 0.5) is None


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:99999",
        "http://127.0.0.1:abc",
        "http://[::1",
        "http://a b",
        "http://a..b",
        "ftp://a",
        "http://:1",
    ],
)
def test_top_says_that_no_server_has_such_a_url(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", url, "--once"]) == 1
    assert "is not the URL of a server" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["k€", "a\nb", "schlüssel"])
def test_top_says_that_no_server_has_such_a_key(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--admin-key", key, "--once"]) == 1
    assert "printable ASCII" in (message := capsys.readouterr().err)
    assert key not in message


@pytest.mark.parametrize(
    ("url", "address"),
    [("http://[::1]", ("::1", 80)), ("https://a.example", ("a.example", 443)), ("http://[::1]:8000", ("::1", 8000))],
)
def test_top_finds_the_port_of_an_address(url: str, address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[str, int]] = []

    def connect(self: http.client.HTTPConnection) -> None:
        found.append((self.host, self.port))
        raise ConnectionRefusedError

    monkeypatch.setattr(http.client.HTTPConnection, "connect", connect)
    monkeypatch.setattr(http.client.HTTPSConnection, "connect", connect)
    with pytest.raises(ConnectionRefusedError):
        next(LiveServer(url).events())
    assert found == [address]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (refusal(502), "it answers 502;"),
        (refusal(503, '{"error": {"message": "It stops."}}'), "it answers 503: It stops.;"),
        (refusal(429), "it answers 429;"),
        (stream({"error": {"message": "The engine has stopped"}}, "[DONE]"), "ended it: The engine has stopped;"),
        (stream("[DONE]"), "the server closed the connection;"),
        (stream('{"spec": {"num_blocks'), "the connection broke in the middle of an event;"),
        (b"SSH-2.0\r\n", "no valid answer"),
    ],
    ids=["502", "503", "429", "error", "done", "broken", "another"],
)
def test_top_tries_again_while_a_server_restarts(
    answer: bytes, reason: str, watched: Callable[[str], tuple[str, str]]
) -> None:
    with answering(stream(HEAD, FIRST), answer, answer, stream(HEAD, FIRST, DISPLACED)) as url:
        drawn, message = watched(url)
    assert reason in drawn
    assert "trying again" in drawn
    assert "another page was opened" in message


def test_top_ends_when_another_page_takes_its_place(watched: Callable[[str], tuple[str, str]]) -> None:
    with answering(stream(HEAD, FIRST, DISPLACED)) as url:
        drawn, message = watched(url)
    assert "cached 1 (64 B)" in drawn, "what came before is shown"
    assert f"another page was opened: the server serves {MOST_PAGES} at once" in message


@pytest.mark.parametrize("status", [404, 429, 502])
def test_top_does_not_try_again_where_it_never_was_connected(
    status: int, watched: Callable[[str], tuple[str, str]]
) -> None:
    with answering(refusal(status)) as url:
        assert f"answers {status}: it is not an Octavo server" in watched(url)[1]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (stream(HEAD, {"error": {"message": "The engine has stopped"}}, "[DONE]"), "The engine has stopped"),
        (stream(HEAD), "before it sent any figures"),
        (stream(HEAD, DISPLACED), "another page was opened"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html>", "it is not an Octavo server"),
    ],
    ids=["error", "nothing", "displaced", "another"],
)
def test_top_once_says_why_it_shows_nothing(answer: bytes, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(answer) as url:
        assert main(["top", url, "--once"]) == 1
    captured = capsys.readouterr()
    assert reason in captured.err
    assert captured.out == ""


def test_top_draws_once_for_all_events_that_come_during_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    paused, all_read = threading.Event(), threading.Event()

    class Busy:
        url = "http://busy"

        def events(self, *, again: bool) -> Iterator[dict[str, Any]]:
            yield HEAD
            yield FIRST
            assert paused.wait(60)
            yield from ({"at": 1.0 + number / 10, **NOTHING} for number in range(1, 31))
            all_read.set()
            raise OctavoError("over")

    def sleep(seconds: float) -> None:
        assert seconds == top._REDRAW_S >= 0.5
        paused.set()
        assert all_read.wait(60)

    drawn: list[float] = []
    real_shown = State.shown

    def shown(self: State, *args: Any, **kwargs: Any) -> Any:
        drawn.append(self.history[-1]["at"] if self.history else 0.0)
        return real_shown(self, *args, **kwargs)

    monkeypatch.setattr(State, "shown", shown)
    monkeypatch.setattr(top, "time", SimpleNamespace(sleep=sleep))
    live = Live(console=Console(file=io.StringIO(), width=80, height=24), auto_refresh=False)
    with pytest.raises(OctavoError, match="over"):
        top._watch(Busy(), live)  # type: ignore[arg-type]
    assert [at for at in drawn if at] == [1.0, 4.0]


def test_top_counts_the_blocks_of_each_state() -> None:
    state = State()
    state.take(HEAD)
    state.take({**FIRST, "all": ["0" + "0112223334455667789:", "0" * 21]})
    assert state._tally() == [1, 2, 3, 3, 11]
    state.take({"at": 2.0, "blocks": [1, 10, 0, 2, 0, 0], **NOTHING})
    assert state._tally() == [1, 1, 3, 3, 12]


def a_row(number: int, tenant: str = "", preempted: str = "") -> dict[str, str]:
    return {
        "request": f"cmpl-8edd222cb2e646168d806f63d2880a43-{number}",
        "tenant": tenant,
        "state": "swapped out",
        "preempted": preempted,
        "prompt": "1,234",
        "cached": "1,024",
        "computed": "12,345",
        "output": f"{50 + number} of 2,048",
        "why no more cached": "evicted",
    }


@pytest.mark.parametrize(("tenant", "preempted"), [("", ""), ("ada", ""), ("a very long name of a tenant", "12 ×")])
def test_top_cuts_no_number_and_tells_requests_apart_at_80_columns(tenant: str, preempted: str) -> None:
    heading, *lines = table([a_row(number, tenant, preempted) for number in range(12)], 80)
    assert max(map(len, lines)) <= 80
    assert len({line.split()[0] for line in lines}) == 12
    for number, line in enumerate(lines):
        assert line.split()[0].startswith("cmpl-")
        assert line.split()[0].endswith(f"-{number}")
        assert "1,234" in line
        assert "1,024" in line
        assert line.endswith(f" {50 + number} of 2,048")
    assert heading.split()[-1] == "output"


def test_top_leaves_columns_out_rather_than_cut_a_number() -> None:
    rows = [a_row(number, "日本語のテナント", "2 ×") for number in range(3)]
    for width in range(1, 200):
        heading, *lines = table(rows, width)
        assert max(map(cell_len, (heading, *lines))) <= width
        numbers = [name for name in ("prompt", "cached", "computed", "output") if name in heading.split()]
        for line, row in zip(lines, rows, strict=True):
            assert all(f" {row[name]}" in line for name in numbers)
        assert len(numbers) == 4 or width < 80
        assert ("why no more cached" in heading) == (width >= 110)


def test_a_text_is_shortened_in_the_middle() -> None:
    assert shortened("cmpl-12345", 10) == "cmpl-12345"
    assert shortened("cmpl-12345", 7) == "cmp…345"
    assert shortened("cmpl-12345", 1) == "…"
    assert cell_len(shortened("日本語日本語", 6)) == 6


def test_top_obeys_no_id_that_holds_a_terminals_commands() -> None:
    rows = [a_row(1) | {"request": "r\x1b[2J\n"}]
    assert table(rows, 200)[1].startswith("r?[2J? ")


def test_top_counts_the_requests_that_a_server_does_not_send(real: RealServer) -> None:
    config = EngineConfig(num_blocks=33, max_num_seqs=4)
    cache = assemble_cache(config, real.core.scheduler.kv.spec, 33)
    scheduler = assemble_scheduler(config, cache, 64)
    for number in range(500):
        params = SamplingParams(max_tokens=4, n=1 + number % 2, temperature=1.0)
        scheduler.add(Request(RequestId(f"r{number}"), [5, 6, 7], params))
    state = State()
    state.take(HEAD)
    scheduler.schedule()
    state.take({"at": 1.0, **NOTHING, **json.loads(json.dumps(LiveView().look(scheduler)))})
    assert 200 < len(state.requests) < 250
    console = Console(width=80, height=30, file=io.StringIO(), record=True)
    console.print(state.shown(console))
    lines = console.export_text().splitlines()
    shown = sum(bool(re.match(r"r\d", line)) for line in lines)
    assert 3 < shown < 28
    assert lines[-1] == f"and {500 - shown} more"


def test_top_counts_no_request_twice_where_several_of_its_sequences_wait() -> None:
    """All three are sent: one runs with one of its four sequences, one is swapped out with two, one is new."""
    progress = {"a": [1, 9, 5, 3], "b": [2, 9, 5, 2], "c": [0, 0, 0, 0]}
    came = [
        {"id": name, "tenant": "", "prompt": 9, "max": 9, "n": 4, "cache": None, "progress": now}
        for name, now in progress.items()
    ]
    state = State()
    state.take(HEAD)
    state.take({**FIRST, "added": came, "counters": [1, 3 + 2 + 1, 2, 0, 0, 0, 0]})
    console = Console(width=80, height=30, file=io.StringIO(), record=True)
    console.print(state.shown(console))
    assert "more" not in console.export_text()


def test_q_quits(real: RealServer) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "octavo", "top", real.url]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    before = termios.tcgetattr(theirs)
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        seen = b""
        while b"tiny" not in seen:
            seen += os.read(ours, 4096)
        threading.Thread(target=lambda: [*iter(lambda: os.read(ours, 4096), b"")], daemon=True).start()
        os.write(ours, b"xq")
        assert process.wait(60) == 0
    assert termios.tcgetattr(theirs) == before
