"""The page at `/cache` in a real browser: what it draws of the cache, and what it does when something goes wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from octavo.server import live_page
from tests.ports import free_port
from tests.server.chromium import EXECUTABLE, HOW_TO_GET_IT, Page, chromium
from tests.server.real_engine import RealServer, real_server, revocable, slowed_down

STORY = "There was an old man with a beard, who said: it is just as I feared. " * 3

pytestmark = [pytest.mark.integration, pytest.mark.skipif(EXECUTABLE is None, reason=HOW_TO_GET_IT)]


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """One browser for all; each test opens what it looks at."""
    with chromium() as page:
        yield page


def test_a_browser_draws_the_page_and_follows_a_run(real: RealServer, page: Page) -> None:
    real.complete(STORY, max_tokens=1)
    page.open(f"{real.url}/cache")
    page.wait_for("typeof spec === 'object' && spec !== null && codes.length === 65")
    with slowed_down(real):
        thread = threading.Thread(target=lambda: real.complete([STORY, STORY], max_tokens=300))
        thread.start()
        page.wait_for("document.querySelectorAll('#requests tr').length === 2")
        page.wait_for("codes.some((code) => code > 3)")  # shared
        page.wait_for("[...document.querySelectorAll('#requests meter')].some((meter) => meter.value > 3)")
        page.value("document.querySelector('#requests button').click()")
        page.wait_for("document.querySelectorAll('#details .table button').length > 2")
        page.wait_for("ofChosen.size > 2 && [...ofChosen].every((block) => codes[block] >= 3)")
        # Its block table grows with it.
        page.wait_for(f"ofChosen.size > {page.value('ofChosen.size')}")
        page.wait_for("document.getElementById('log').textContent.includes('prefix hit')")
    thread.join()
    page.wait_for("document.getElementById('details').textContent.includes('It has ended')")
    # A block that then holds other tokens is struck out.
    assert page.value("(([block]) => (lose(block), !ofChosen.has(block)))(ofChosen)")
    assert page.value("document.querySelectorAll('#details .lost').length") > 0
    page.wait_for("document.querySelectorAll('#requests tr').length === 0")
    colours = page.value(
        "((blocks) => { const {width, height} = blocks, context = blocks.getContext('2d');"
        "return new Set(new Uint32Array(context.getImageData(0, 0, width, height).data.buffer)).size; })($('blocks'))"
    )
    assert colours >= 3, "free, cached and what is between the cells"
    left, top = page.value("(({left, top}) => [left, top])(document.getElementById('blocks').getBoundingClientRect())")
    page.click(left + page.value("3 * cell") - 2, top + 2)
    page.wait_for("document.getElementById('details').textContent.includes('Block 3')")
    page.value("chosen = 1; document.getElementById('blocks').focus()")
    page.press("ArrowRight")
    page.press("Enter")
    page.wait_for("document.getElementById('details').textContent.includes('Block 2')")


def test_blocks_of_an_ended_request_are_struck_out_once_others_take_them(page: Page) -> None:
    """The block that was not full is free at once, and taken again before anybody looks; of the full ones, some are."""
    with real_server(num_blocks=33) as server:
        chosen, next_one = [5 + i % 40 for i in range(8 * 16 + 3)], [50 + i % 41 for i in range(26 * 16)]
        server.complete([chosen[:40]], max_tokens=1)  # computes two of its blocks
        page.open(f"{server.url}/cache")
        page.wait_for("typeof spec === 'object' && spec !== null && codes.length === 33")
        with slowed_down(server):
            body = {"prompt": chosen, "max_tokens": 280, "stream": True, "ignore_eos": True}
            with server.client.stream("POST", "/v1/completions", json=body):
                page.wait_for("requests.size === 1 && [...requests.values()][0].progress[2] > 2")
                request_id = page.value("[...requests.keys()][0]")
                page.value("document.querySelector('#requests button').click()")
                page.wait_for("ofChosen.size > 8")
                thread = threading.Thread(target=lambda: server.complete([next_one], max_tokens=20))
                thread.start()
                page.wait_for("requests.size === 2")
            page.wait_for("document.getElementById('details').textContent.includes('It has ended')")
        thread.join()

        def computed_by(block: int) -> str:
            return server.client.get(f"/live/blocks/{block}").json()["computed_by"]

        cells = "[...document.querySelectorAll('#details .table button')]"
        blocks = page.value(f"{cells}.map((cell) => +cell.dataset.block)")
        lost = [block for block in blocks[:2] if computed_by(block) == request_id]
        lost += [block for block in blocks[2:] if computed_by(block) != request_id]
        assert 4 < len(lost) <= len(blocks) - 4
        struck = f"{cells}.filter((cell) => cell.className === 'lost').map((cell) => +cell.dataset.block)"
        page.wait_for(f"String({struck}) === '{','.join(map(str, lost))}'")
        assert page.value("[...ofChosen]") == [block for block in blocks if block not in lost]
        assert "What has become of its blocks" in page.value("document.getElementById('details').textContent")


def test_a_request_that_had_ended_when_it_was_clicked_has_no_blocks(real: RealServer, page: Page) -> None:
    page.open(f"{real.url}/cache")
    page.wait_for("typeof spec === 'object' && spec !== null && codes.length === 65")
    page.value("describe('requests', 'gone')")
    for _ in range(2):
        assert page.value("document.getElementById('details').textContent") == "Request goneIt has ended."
        page.value("(Object.assign(picked, { due: true, at: 0 }), refresh())")


def test_a_copy_and_an_eviction_are_seen_to_happen(real: RealServer, page: Page) -> None:
    page.open(f"{real.url}/cache")
    page.wait_for("typeof spec === 'object' && spec !== null && codes.length === 65")
    log = "document.getElementById('log').textContent"
    for name in ("point", "cross"):  # what draws an arrow and a cross
        page.value(f"window.drew_{name} = 0; ((draws) => {name} = (...a) => (drew_{name}++, draws(...a)))({name}); 0")
    with slowed_down(real):
        thread = threading.Thread(target=lambda: real.complete(STORY, n=2, temperature=1, seed=3, max_tokens=200))
        thread.start()
        page.wait_for("document.querySelectorAll('#requests button').length === 1")
        page.value("document.querySelector('#requests button').click()")
        page.wait_for("document.querySelectorAll('#details .table button').length > 2")
        page.wait_for(f"{log}.includes('copy-on-write: block ') && drew_point > 0")
    thread.join()
    page.wait_for("document.getElementById('details').textContent.includes('It has ended')")
    for number in range(8):  # twice what the cache holds
        real.complete(f"{number} {STORY}", max_tokens=1)
    page.wait_for(f"/evicted: [0-9]+ cached block/.test({log}) && drew_cross > 0")
    page.wait_for("document.querySelectorAll('#details .lost').length > 2")


def test_free_blocks_are_dark_where_the_browser_is(real: RealServer, page: Page) -> None:
    page.prefer_dark(True)
    try:
        page.open(f"{real.url}/cache")
        page.wait_for("typeof spec === 'object' && spec !== null && codes.length === 65")
        page.value("codes.fill(0); paint()")
        assert page.value("painted[1] === pixelOf(DARK_FREE)")
        page.prefer_dark(False)
        page.wait_for("(paint(), painted[1] === STATE_PIXELS[codes[1]])")
    finally:
        page.prefer_dark(False)


def test_the_share_of_the_cache_in_use_counts_what_requests_hold(real: RealServer, page: Page) -> None:
    page.open(f"{real.url}/cache")
    page.wait_for("typeof take === 'function'")
    assert page.value("share([0, 0, 1, 2, 3])") == 0.25, "free, cached, pinned and active, without the null block"


def test_a_page_survives_a_restart_of_the_server(page: Page) -> None:
    with real_server({"port": free_port()}, num_blocks=65) as first:
        page.open(f"{first.url}/cache")
        page.wait_for("typeof spec === 'object' && spec !== null && codes.length === 65")
    page.wait_for("document.getElementById('status').textContent.includes('trying again')")
    with real_server({"port": first.port}, num_blocks=33) as second:
        page.wait_for("codes.length === 33 && document.getElementById('status').textContent === 'live'")
        second.complete(STORY, max_tokens=4)
        page.wait_for("codes.some((code) => code === 1)")  # what was computed is cached


def test_a_hundred_thousand_blocks_have_each_its_colour(real: RealServer, page: Page) -> None:
    page.open(f"{real.url}/cache")
    page.wait_for("typeof take === 'function'")
    page.value(
        "take = () => 0; spec = {num_blocks: 100001, block_size: 16, block_bytes: 1024, host_blocks: 0}; layOut();"
        "counters = [0, 0, 0, 0, 0, 0]; owners = new Uint16Array(100001);"
        "codes = Uint8Array.from({length: 100001}, (_, block) => block % 11); paint()"
    )
    assert page.value("cell") == 2
    at = "const x = (block - 1) % columns * cell, y = Math.floor((block - 1) / columns) * cell"
    pixel = "new Uint32Array(context.getImageData(x, y, 1, 1).data.buffer)[0]"
    wrong = page.value(
        "(() => { const context = document.getElementById('blocks').getContext('2d'); let wrong = 0;"
        f"for (let block = 1; block < 100001; block += 997) {{ {at}; "
        f"if ({pixel} !== STATE_PIXELS[block % 11]) wrong++; }} return wrong; }})()"
    )
    assert wrong == 0


FORM = "document.getElementById('key-form')"
STATUS = "document.getElementById('status').textContent"


def submit(page: Page, key: str, times: int = 1) -> None:
    page.value(f"$('key').value = {json.dumps(key)}; for (let i = 0; i < {times}; i++) {FORM}.requestSubmit(); 0")


def test_a_key_that_no_header_can_carry_is_an_incorrect_one(page: Page) -> None:
    with real_server({"admin_key": "admin-key", "api_key": ["client"]}, num_blocks=65) as guarded:
        page.open(f"{guarded.url}/cache")
        page.wait_for(f"typeof follow === 'function' && !{FORM}.hidden")
        for wrong in ("admin-key€", "admin\u200b-key", "client"):
            page.value("say('')")
            submit(page, wrong)
            page.wait_for(f"{STATUS}.includes('Incorrect API key') && !{FORM}.hidden")
        page.value("sessionStorage.setItem('octavo-admin-key', 'admin-key€')")
        page.open(f"{guarded.url}/cache?again")
        page.wait_for(f"typeof follow === 'function' && !{FORM}.hidden && {STATUS}.includes('API key')")
        page.value(
            "window.signals = [];"
            "((real) => { fetch = (path, how) => (signals.push(how.signal), real(path, how)); })(fetch)"
        )
        submit(page, "admin-key€")
        submit(page, " admin-key ", times=2)
        page.wait_for(f"{STATUS} === 'live' && {FORM}.hidden && codes.length === 65")
        assert page.value("signals.filter((signal) => !signal.aborted).length") == 1, "one stream"


def test_a_page_asks_for_no_other_key_where_none_would_do(page: Page) -> None:
    with real_server({"api_key": ["client"]}, num_blocks=33) as keyless:
        page.open(f"{keyless.url}/cache")
        page.wait_for(f"typeof follow === 'function' && !{FORM}.hidden")
        submit(page, "client")
        page.wait_for(f"{STATUS}.includes('no admin key')")
        assert page.value(f"{FORM}.hidden")


def test_a_page_whose_key_is_revoked_asks_for_another(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with revocable(tmp_path, monkeypatch) as (server, revoke):
        page.open(f"{server.url}/cache")
        page.wait_for(f"typeof follow === 'function' && !{FORM}.hidden")
        submit(page, "admin-key")
        page.wait_for(f"{STATUS} === 'live' && {FORM}.hidden")
        revoke()
        page.wait_for(f"{STATUS}.includes('Incorrect API key') && !{FORM}.hidden")
        submit(page, "another-key")
        page.wait_for(f"{STATUS} === 'live' && {FORM}.hidden")


def test_a_displaced_page_says_so_and_opens_again_by_a_click(
    real: RealServer, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_page, "MOST_PAGES", 1)
    again = "document.getElementById('again')"
    page.open(f"{real.url}/cache")
    page.wait_for(f"typeof follow === 'function' && {STATUS} === 'live' && {again}.hidden")
    with httpx.stream("GET", f"{real.url}/live/events") as other:
        lines = other.iter_lines()
        assert next(lines)
        page.wait_for(f"{STATUS}.includes('Another page was opened') && !{again}.hidden")
        page.value(f"{again}.click()")
        page.wait_for(f"{STATUS} === 'live' && {again}.hidden")
        assert any("displaced" in line for line in lines)


def test_what_has_the_focus_keeps_it_while_the_page_changes(real: RealServer, page: Page) -> None:
    page.open(f"{real.url}/cache")
    page.wait_for("typeof spec === 'object' && spec !== null && codes.length === 65")
    with slowed_down(real):
        thread = threading.Thread(target=lambda: real.complete(f"focus {STORY}", max_tokens=200))
        thread.start()
        page.wait_for("document.querySelectorAll('#requests button').length === 1")
        page.value("document.querySelector('#requests button').focus()")
        page.press("Enter")
        page.wait_for("ofChosen.size > 2")
        page.value("window.focused = document.querySelectorAll('#details .table button')[2]; focused.focus()")
        text = page.value("document.querySelector('#details .table').textContent")
        page.wait_for(f"document.querySelector('#details .table').textContent !== {json.dumps(text)}")
        assert page.value("document.activeElement === focused && focused.isConnected")
        page.press("Enter")
        page.wait_for("document.querySelector('#details h2').textContent.startsWith('Block ')")
        assert page.value("document.activeElement.textContent").startswith("Block "), "what was pressed is gone"
    thread.join()


def test_a_link_in_the_log_and_a_row_that_moves_keep_the_focus(real: RealServer, page: Page) -> None:
    page.open(f"{real.url}/cache")
    page.wait_for("typeof spec === 'object' && spec !== null && codes.length === 65")
    page.value("take = () => 0; happen('copied', [['first', 3, 4]])")
    page.value("document.querySelector('#log button').focus(); happen('copied', [['first', 5, 6]])")
    assert page.value("document.querySelector('#log').textContent").endswith("block 3 → 4, block 5 → 6 for first")
    assert page.value("document.activeElement.textContent") == "first"
    one = "{tenant: '', prompt: 9, max: 9, cache: null, "
    page.value(f"requests = new Map(['a', 'b'].map((id) => [id, {one} id, progress: [RUNNING, 0, 0, 0]}}])); list()")
    page.value("document.querySelectorAll('#requests button')[1].focus()")
    page.value("requests.get('a').progress = [WAITING, 0, 0, 1]; list()")
    assert page.value("document.querySelector('#requests').textContent").startswith("b")
    assert page.value("document.activeElement.textContent") == "b"


def test_requests_that_are_not_listed_are_counted(page: Page) -> None:
    with real_server(num_blocks=33, max_num_seqs=2) as server:
        page.open(f"{server.url}/cache")
        page.wait_for("typeof spec === 'object' && spec !== null && codes.length === 33")
        with slowed_down(server):
            body = {"prompt": [[5, 6, 7]] * 350, "max_tokens": 300, "stream": True, "ignore_eos": True}
            with server.client.stream("POST", "/v1/completions", json=body):
                page.wait_for("counters[0] + counters[1] === 350")
                others = "document.getElementById('others').textContent"
                page.wait_for(f"{others} === `and ${{350 - document.querySelectorAll('#requests tr').length}} more`")
        page.wait_for(f"{others} === 'No request runs or waits.'")


def test_a_hidden_tab_keeps_no_old_arrows(real: RealServer, page: Page) -> None:
    page.open(f"{real.url}/cache")
    page.wait_for("typeof spec === 'object' && spec !== null && codes.length === 65 && history.length > 0")
    page.value("requestAnimationFrame = () => 0; window.clock = performance.now(); performance.now = () => clock; 0")
    page.value(
        "window.look = (copied) => take({ ...history.at(-1), tiers, copied });"
        "for (let i = 0; i < 90; i++) { clock += 100; look([['r', 1, 2], ['r', 1, 3]]); }"
    )
    assert 0 < page.value("arrows.length") <= 2 * (3000 / 100 + 1)
