"""The page at `/cache`: what it is sent is what the cache is, and nobody else's business."""

from __future__ import annotations

import itertools
import json
import re
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from octavo.config import EngineConfig
from octavo.engine import live
from octavo.engine.live import ACTIVE, MOST_WAITING, LiveView, block_codes
from octavo.request import Request, RequestId
from octavo.sampling_params import SamplingParams
from octavo.scheduler.assembly import assemble_cache, assemble_scheduler
from octavo.scheduler.plan import StepResult
from octavo.scheduler.scheduler import Scheduler
from octavo.server import live_page
from octavo.server.live_page import MOST_PAGES, pause
from tests.server.conftest import wait_until
from tests.server.real_engine import RealServer, real_server, revocable, slowed_down

ADMIN = {"Authorization": "Bearer admin-key"}
STORY = "There was an old man with a beard, who said: it is just as I feared. " * 3


class Shown:
    """What a page knows, from the events alone."""

    def __init__(self) -> None:
        self.codes = np.zeros(0, np.uint8)
        self.tenants: list[str] = []
        self.requests: dict[str, list[int]] = {}

    def take(self, news: dict[str, Any]) -> None:
        news = json.loads(json.dumps(news))
        self.tenants = news.get("tenants", self.tenants)
        if "all" in news:
            self.codes = np.array([ord(code) - 48 for code in news["all"][0]], np.uint8)
        changes = np.array(news.get("blocks", []), np.int64).reshape(-1, 3)
        self.codes[changes[:, 0]] = changes[:, 1]
        for request in news.get("added", ()):
            self.requests[request["id"]] = request["progress"]
        for request_id, *progress in news.get("updated", ()):
            self.requests[request_id] = progress[:4]
        for request_id in news.get("removed", ()):
            del self.requests[request_id]


def events(real: RealServer, count: int, headers: dict[str, str] | None = None) -> list[dict[str, Any]]:
    with real.client.stream("GET", "/live/events", headers=headers or {}) as response:
        assert response.status_code == 200, response.read()
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        return [json.loads(next(lines)) for _ in range(count)]


def bare_scheduler(real: RealServer, num_blocks: int) -> Scheduler:
    """One without a model, for two sequences at once."""
    config = EngineConfig(num_blocks=num_blocks, max_num_seqs=2)
    return assemble_scheduler(config, assemble_cache(config, real.core.scheduler.kv.spec, num_blocks), 64)


def test_changes_add_up_to_the_cache_as_it_is_at_every_look(real: RealServer, monkeypatch: pytest.MonkeyPatch) -> None:
    core, view, shown = real.core, LiveView(), Shown()
    num_looks = num_partial = 0
    real_update = core.scheduler.update

    def update(*args: Any) -> Any:
        nonlocal num_looks, num_partial
        updates = real_update(*args)
        news = view.look(core.scheduler)
        shown.take(news)
        num_looks += 1
        num_partial += "all" not in news
        assert shown.codes.tolist() == block_codes(core.scheduler.kv).tolist()
        assert shown.requests.keys() == set(core.scheduler.live)
        counts = np.array(core.scheduler.kv.pool.blocks.references)
        assert ((shown.codes >= ACTIVE) == (counts > 0)).all()
        return updates

    monkeypatch.setattr(core.scheduler, "update", update)
    for start in range(6):
        real.complete([STORY[start:], STORY, f"{start} {STORY}"], max_tokens=12, n=2, temperature=1.0)
    assert core.scheduler.kv.evicted.count > 0
    assert num_looks > num_partial > 20


def test_a_look_names_the_blocks_evicted_and_copied_since_the_last(
    real: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, view, evicted, copied = real.core, LiveView(), list[int](), list[Any]()
    view.look(core.scheduler)
    kv = core.scheduler.kv
    before = kv.evicted.count, kv.copied.count
    pool, named = core.scheduler.kv.pool, list[int]()
    monkeypatch.setattr(pool, "_on_evict", (*pool._on_evict, named.extend))
    real_update = core.scheduler.update

    def update(*args: Any) -> Any:
        updates = real_update(*args)
        news = view.look(core.scheduler)
        evicted.extend(news.get("evicted", ()))
        copied.extend(news.get("copied", ()))
        return updates

    monkeypatch.setattr(core.scheduler, "update", update)
    for start in range(6):
        real.complete([f"{start} {STORY}", f"{start + 10} {STORY}"], max_tokens=12, n=2, temperature=1.0)
    assert evicted == named
    assert len(evicted) == kv.evicted.count - before[0] > 0
    assert len(copied) == kv.copied.count - before[1] > 0
    assert all(source != copy for _, source, copy in copied)
    assert "evicted" not in view.look(core.scheduler)


def test_of_many_waiting_requests_few_are_looked_at(real: RealServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand of them once took 59 ms of the engine's thread."""
    looked_at: list[str] = []
    real_progress = live._progress

    def progress(request: Request, *args: Any, **kwargs: Any) -> list[int]:
        looked_at.append(request.request_id)
        return real_progress(request, *args, **kwargs)

    monkeypatch.setattr(live, "_progress", progress)
    scheduler = bare_scheduler(real, num_blocks=9)
    for number in range(500):
        scheduler.add(Request(RequestId(f"r{number}"), [5, 6, 7], SamplingParams(max_tokens=4)))
    scheduler.schedule()
    shown = LiveView().look(scheduler)
    assert len(looked_at) == MOST_WAITING + 2
    assert [one["progress"][0] for one in shown["added"]] == [1] * 2 + [0] * MOST_WAITING
    assert shown["unlisted"] == 500 - 2 - MOST_WAITING


def test_a_cached_block_has_the_tenant_of_a_request_that_nobody_saw_run(real: RealServer) -> None:
    scheduler, view = bare_scheduler(real, num_blocks=9), LiveView()
    view.look(scheduler)
    tokens = list(range(5, 5 + 2 * scheduler.kv.spec.block_size))
    scheduler.add(Request(RequestId("r"), tokens, SamplingParams(max_tokens=1), tenant="alice"))
    while scheduler.has_work:
        plan = scheduler.schedule()
        scheduler.update(plan, StepResult((1,) * plan.num_draws))
    news = view.look(scheduler)
    changes = np.array(news["blocks"]).reshape(-1, 3)
    owners = changes[changes[:, 1] == live.CACHED, 2]
    assert len(owners) == 2
    assert {news["tenants"][owner] for owner in owners} == {"alice"}


def test_a_request_in_host_memory_is_swapped_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with real_server(num_blocks=17, preemption_mode="swap", swap_space=1 << 24) as server:
        core, seen, view = server.core, set[int](), LiveView()
        real_update = core.scheduler.update

        def update(*args: Any) -> Any:
            updates = real_update(*args)
            news = view.look(core.scheduler)
            seen.update(progress[1] for progress in news.get("updated", ()))
            return updates

        monkeypatch.setattr(core.scheduler, "update", update)
        server.complete([[number] * 30 for number in range(5, 13)], max_tokens=60)
        assert core.stats.gauges().num_preemptions > 0
    assert {live.RUNNING, live.SWAPPED} <= seen


def test_the_first_event_is_all_there_is_and_later_ones_are_changes(real: RealServer) -> None:
    real.complete(STORY, max_tokens=2)
    head, first = events(real, 2)
    assert head["model"] == "tiny"
    assert first["spec"]["num_blocks"] == 65
    assert len(first["all"][0]) == len(first["all"][1]) == 65
    assert first["totals"][1] == real.core.stats.generation_tokens


def test_with_no_page_open_nothing_is_looked_at(real: RealServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveView, "look", lambda *_: pytest.fail("somebody looked"))
    real.complete("x", max_tokens=3)


@pytest.mark.slow
def test_a_request_and_a_block_say_who_they_are(real: RealServer) -> None:
    with slowed_down(real):
        thread = threading.Thread(target=lambda: real.complete(f"new {STORY}", max_tokens=300))
        thread.start()
        wait_until(lambda: any(r.sequences[0].num_output_tokens > 2 for r in real.core.scheduler.requests))
        running = real.core.scheduler.requests
        request_id = running[0].request_id
        request = real.client.get(f"/live/requests/{request_id}").json()
        block = request["sequences"][0]["tables"][0][1]
        found = real.client.get(f"/live/blocks/{block}").json()
    thread.join()
    assert found["holders"][0]["id"] == request_id
    assert (found["state"], found["holders"][0]["index"]) == ("active", 1)
    assert "text" not in found, "without the option it is nobody's to read"
    later = real.client.get(f"/live/blocks/{block}").json()
    assert (later["state"], later["holders"], later["computed_by"]) == ("cached", [], request_id)
    assert real.client.get(f"/live/requests/{request_id}").status_code == 404
    assert real.client.get("/live/blocks/65").status_code == 404
    assert real.client.get("/live/blocks/0").status_code == 404


def test_blocks_say_which_request_computed_them(real: RealServer) -> None:
    request_id = real.complete(f"computed {STORY}", max_tokens=2)["id"]
    pool = real.core.scheduler.kv.pool
    pairs = real.client.get("/live/blocks", params={"ids": ",".join(map(str, range(66)))}).json()["computed_by"]
    assert [block for block, _ in pairs] == list(range(66))
    assert [block for block, owner in pairs if owner is not None] == pool.blocks.published().tolist()
    assert sum(owner is not None and owner in request_id for _, owner in pairs) > 2
    for wrong in ("", "x", "1,", "1,-2", "1.5", "9" * 10, ",".join(["1"] * 257)):
        answer = real.client.get("/live/blocks", params={"ids": wrong})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "ids")


def test_a_page_is_sent_what_each_tier_holds(tmp_path: Path) -> None:
    with real_server(num_blocks=33, kv_disk=str(tmp_path), kv_host_memory=1 << 20) as server:
        server.complete(STORY, max_tokens=2)
        (store,) = server.core.stats.stores
        stored = store.counters.write.blocks
        first = events(server, 2)[1]
        host = server.core.scheduler.kv.hierarchy.host
        assert first["spec"]["host_blocks"] == host.num_slots > 0
        ((*tier, written, read),) = first["tiers"]
        assert (tier, read) == (["disk", True], 0)
        assert stored <= written <= store.counters.write.blocks


def test_the_colours_differ_for_the_colour_blind() -> None:
    """In CIELAB, after the dichromats' matrices of Machado, Oliveira and Fernandes (2009)."""
    script = (Path(live_page.__file__).with_name("static") / "blocks.js").read_text()
    for name, shown in (("STATES", (0, 1, 2, 3, 4, 10)), ("TENANTS", range(8))):
        found = re.search(rf"const {name} = (\[.*?\]);", script)
        assert found is not None
        colours = [json.loads(found[1])[i] for i in shown]
        dark = re.search(r'DARK_FREE = "(.*?)"', script)
        assert dark is not None
        for sight, matrix in SIGHT.items():
            for one, other in itertools.combinations([*colours, dark[1]], 2):
                assert np.linalg.norm(_lab(one, matrix) - _lab(other, matrix)) > 12, (sight, one, other)


SIGHT = {
    "normal": np.eye(3),
    "protanopia": np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
    "deuteranopia": np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
    "tritanopia": np.array([[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]]),
}


def _lab(colour: str, sight: np.ndarray) -> np.ndarray:
    srgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(to_xyz @ np.clip(sight @ linear, 0, 1) / [0.9505, 1.0, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize(("page", "count"), [("/", 2), ("/cache", 4)])
def test_a_page_is_in_the_package_and_loads_nothing_from_elsewhere(real: RealServer, page: str, count: int) -> None:
    named = re.findall(r'(?:href|src)="(live/.*?)"', real.client.get(page).text)
    assert len(named) == count
    kinds = {"css": "text/css", "js": "text/javascript", page: "text/html"}
    for path in (page, *(f"/{name}" for name in named)):
        answer, kind = real.client.get(path), kinds[path.rpartition(".")[2]]
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kind)
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        for forbidden in ("http://", "https://", "innerHTML", "onclick="):
            assert forbidden not in answer.text


def test_only_an_admin_sees_the_data_of_a_server_with_keys() -> None:
    options = {"admin_key": "admin-key", "api_key": ["client"], "live_page_text": True}
    with real_server(options, num_blocks=33) as guarded:
        assert guarded.client.get("/cache").status_code == 200
        for path in ("/live/events", "/live/requests/x", "/live/blocks?ids=1", "/live/blocks/1"):
            assert guarded.client.get(path).status_code == 401
            assert guarded.client.get(path, headers={"Authorization": "Bearer client"}).status_code == 401
        assert events(guarded, 2, ADMIN)[1]["spec"]
        client = {"Authorization": "Bearer client"}
        body = {"prompt": STORY, "max_tokens": 1}
        assert guarded.client.post("/v1/completions", json=body, headers=client).status_code == 200
        block = int(np.flatnonzero(block_codes(guarded.core.scheduler.kv))[0])
        assert guarded.client.get(f"/live/blocks/{block}", headers=ADMIN).json()["text"] in STORY
    with real_server({"api_key": ["client"]}, num_blocks=33) as keyless:
        answer = keyless.client.get("/live/events", headers=client)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "no_admin_key")


def test_a_stream_ends_when_its_key_is_revoked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with revocable(tmp_path, monkeypatch) as (server, revoke):
        with httpx.stream("GET", f"{server.url}/live/events", headers=ADMIN) as response:
            lines = response.iter_lines()
            assert '"model"' in next(lines)
            revoke()
            wait_until(lambda: server.server.server_state.tasks == set())
        assert server.client.get("/live/events", headers=ADMIN).status_code == 401


@pytest.mark.parametrize("took", [1e-5, 1e-3, 0.05])
def test_all_pages_together_take_less_than_a_hundredth_of_the_engines_time(took: float) -> None:
    for num_pages in range(1, MOST_PAGES + 1):
        assert num_pages * took / pause(took, num_pages) < 0.01
        assert pause(took, num_pages) >= live_page.INTERVAL_S


def test_a_page_counts_the_others_that_are_open(real: RealServer, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def counting(took: float, num_pages: int) -> float:
        counted.append(num_pages)
        return 0.01

    monkeypatch.setattr(live_page, "pause", counting)
    with ExitStack() as pages:
        kept = []
        for _ in range(2):
            kept.append(pages.enter_context(httpx.stream("GET", real.url + "/live/events")).iter_lines())
            assert next(kept[-1])
        wait_until(lambda: 2 in counted)


@pytest.mark.slow
def test_one_page_too_many_takes_the_place_of_the_first_and_none_holds_up_a_shutdown() -> None:
    with ExitStack() as pages, real_server({"shutdown_timeout": 60}, num_blocks=33) as server:
        kept = []
        for _ in range(MOST_PAGES + 2):
            response = pages.enter_context(httpx.stream("GET", server.url + "/live/events"))
            lines = (line for line in response.iter_lines() if line)
            assert '"model"' in next(lines)
            kept.append(lines)  # else it would close the response now
        for first in kept[:2]:
            *_, last = first
            assert last == 'data: {"displaced":true}'
        server.complete(STORY, max_tokens=1)
        for lines in kept[2:]:
            finished = 0
            while not finished:
                news = json.loads(next(lines).removeprefix("data: "))
                assert "displaced" not in news
                finished = news["totals"][4]
        assert server.client.get("/load").json()["server_load"] == 0
        server.server.should_exit = True
        wait_until(lambda: server.server.server_state.tasks == set())


def test_a_closed_page_makes_room_for_another() -> None:
    with ExitStack() as pages, real_server(num_blocks=33) as server:
        first = pages.enter_context(httpx.stream("GET", server.url + "/live/events")).iter_lines()
        assert next(first)
        for _ in range(2 * MOST_PAGES):
            events(server, 2)
            wait_until(lambda: len(server.server.server_state.tasks) == 1)
        server.server.should_exit = True
        assert not any("displaced" in line for line in first)
