"""The chat page at `/` in a real browser: it streams, stops, remembers, asks for a key, and shows text as text."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.server.chromium import EXECUTABLE, HOW_TO_GET_IT, Page, chromium
from tests.server.real_engine import RealServer, real_server, slowed_down

pytestmark = [pytest.mark.integration, pytest.mark.skipif(EXECUTABLE is None, reason=HOW_TO_GET_IT)]

READY = "typeof send === 'function' && $('model').value !== ''"
ABOUT = "[...document.querySelectorAll('.assistant .about')].map((line) => line.textContent)"


@pytest.fixture
def page() -> Iterator[Page]:
    with chromium() as page:
        yield page


def ask(page: Page, text: str) -> None:
    page.value(f"$('text').value = {json.dumps(text)}; $('ask').requestSubmit(); 0")


def test_a_chat_is_streamed_counted_and_kept(real: RealServer, page: Page) -> None:
    page.open(real.url)
    page.wait_for(READY)
    page.value("$('max_tokens').value = 8; $('max_tokens').onchange(); 0")
    hostile = "<img src=x onerror='document.title = 1'> What is the capital of France?"
    ask(page, hostile)
    first = page.wait_for(f"{ABOUT}[0]")
    assert "0 of " in first
    assert "prompt tokens cached" in first
    ask(page, "And of Japan?")
    second = page.wait_for(f"{ABOUT}[1]")
    cached, of = second.split(" · ")[2].removesuffix(" prompt tokens cached").split(" of ")
    assert 16 <= int(cached) < int(of)
    page.open(f"{real.url}/?again")
    page.wait_for(f"{READY} && {ABOUT}.length === 2")
    assert page.value("document.querySelector('.user').textContent") == hostile
    assert page.value("document.querySelectorAll('#messages img').length") == 0
    page.value("document.querySelector('#chats li button:last-child').click()")
    assert page.value("localStorage.getItem('octavo-chats')") == "[]"


def test_an_answers_marks_become_elements_and_its_html_stays_text(real: RealServer, page: Page) -> None:
    page.open(real.url)
    page.wait_for(READY)
    text = "A **bold** word, `a<b>` and 2**3**4.\n```python\n<i>x</i> = `1`\n```\n**<u>u</u>**"
    html = page.value(f"formatted({json.dumps(text)}).innerHTML").replace(' class=""', "")
    assert html == (
        "A <b>bold</b> word, <code>a&lt;b&gt;</code> and 2<b>3</b>4.\n"
        "<pre>&lt;i&gt;x&lt;/i&gt; = `1`\n</pre><b>&lt;u&gt;u&lt;/u&gt;</b>"
    )


def test_an_answer_is_stopped_by_escape(real: RealServer, page: Page) -> None:
    page.open(real.url)
    page.wait_for(READY)
    with slowed_down(real):
        ask(page, "Tell me a long story.")
        page.wait_for("document.querySelector('.assistant .text')?.textContent.length > 10 && !$('stop').hidden")
        page.value("dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'})); 0")
        assert "stopped" in page.wait_for(f"{ABOUT}[0]")
        assert page.value("$('stop').hidden && !$('send').hidden")


def test_a_server_with_keys_asks_for_one_and_the_tab_keeps_it(page: Page) -> None:
    with real_server({"api_key": ["client"], "admin_key": "admin-key"}, num_blocks=65) as guarded:
        page.open(guarded.url)
        page.wait_for("typeof send === 'function' && !$('key-form').hidden")
        for wrong in ("clien€t", "other"):
            page.value(f"$('status').textContent = ''; $('key').value = '{wrong}'; $('key-form').requestSubmit(); 0")
            page.wait_for("$('status').textContent.includes('Incorrect API key') && !$('key-form').hidden")
        page.value("$('key').value = ' client '; $('key-form').requestSubmit(); 0")
        page.wait_for(f"{READY} && $('key-form').hidden")
        assert page.value("sessionStorage.getItem('octavo-key')") == "client"
        assert page.value("Object.keys(localStorage).length") == 0


def test_an_error_of_the_server_is_shown_below_the_question(real: RealServer, page: Page) -> None:
    page.open(real.url)
    page.wait_for(READY)
    ask(page, "x " * 20_000)
    failed = page.wait_for("document.querySelector('.assistant .failed')?.textContent")
    assert "tokens" in failed
