"""Take the screenshots of docs/serve/live_page.md from a running page: python scripts/live_page_screenshots.py [FOLDER]

Needs chromium. Each is taken when the page shows what it is about, so that no clock matters.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from octavo.workloads.server_process import running_server

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from tests.server.chromium import Page, chromium  # noqa: E402

LIVE = "document.getElementById('status')?.textContent === 'live'"
CHOOSE = "document.querySelector('#requests button').click()"
CHOSEN = "picked.computedBy && ofChosen.size"
FROM_BLOCKS = "document.querySelector('.bar').getBoundingClientRect().top - 4"
TO_BLOCKS = "document.querySelector('#blocks').getBoundingClientRect().bottom + 40"
TO_DETAILS = "document.querySelector('#below').getBoundingClientRect().bottom + 8"


def tokens(number: int, length: int) -> list[int]:
    return [100 + (number * 997 + i * 31) % 1000 for i in range(length)]


@contextmanager
def requests(url: str, bodies: list[dict[str, Any]]) -> Iterator[None]:
    """Have the server answer these while the body of the statement runs, and wait for the answers."""

    def complete(body: dict[str, Any]) -> None:
        fields = {"model": "smollm2", "ignore_eos": True, "seed": 1, **body}
        httpx.post(f"{url}/v1/completions", json=fields, timeout=600).raise_for_status()

    threads = [threading.Thread(target=complete, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join()


def small_pool(page: Page, folder: Path) -> None:
    """Copy-on-write, evictions and a preemption, in 256 blocks."""
    with running_server(["smollm2", "--num-blocks=257", "--max-model-len=512"]) as server:
        page.open(server.base_url + "/cache", 1000, 1000)
        page.wait_for(LIVE)
        samples = {"prompt": tokens(2, 72), "max_tokens": 300, "n": 4, "temperature": 1.0}
        with requests(server.base_url, [{"prompt": tokens(1, 100), "max_tokens": 100}]):
            pass
        with requests(server.base_url, [samples]):
            page.wait_for("arrows.length")
            page.value(CHOOSE)
            page.wait_for("arrows.length && document.querySelectorAll('#details .table button').length > 10")
            page.screenshot(folder / "live_page_copy_on_write.png", FROM_BLOCKS, TO_DETAILS)
        many = [{"prompt": tokens(10 + i, 100), "max_tokens": 200} for i in range(40)]
        with requests(server.base_url, many):
            page.wait_for("crosses.size > 20")
            page.wait_for("document.getElementById('log').textContent.includes('preempted')")
            page.value(CHOOSE)
            page.wait_for(CHOSEN)
            page.screenshot(folder / "live_page_preemption.png", FROM_BLOCKS, TO_DETAILS)


def busy_server(page: Page, folder: Path) -> None:
    """Many streams of prompts that partly begin alike, in light and dark."""
    with running_server(["smollm2", "--num-blocks=1201", "--max-model-len=1024", "--max-num-seqs=48"]) as server:
        page.open(server.base_url + "/cache", 1240, 1100)
        page.wait_for(LIVE)
        with requests(server.base_url, [{"prompt": tokens(100 + i, 300), "max_tokens": 17} for i in range(48)]):
            page.wait_for("counters[0] > 40")
        shared = tokens(1, 400)
        for dark in (False, True):
            page.prefer_dark(dark)
            start = 1000 * (1 + dark)
            prompts = [(shared if i % 3 == 0 else []) + tokens(start + i, 40 + 5 * i) for i in range(56)]
            with requests(server.base_url, [{"prompt": prompt, "max_tokens": 250} for prompt in prompts]):
                page.wait_for("counters[0] === 48 && codes.some((code) => code === 10)")
                page.wait_for("[...requests.values()].some((one) => one.progress[2] > 60)")
                page.value(CHOOSE)
                page.wait_for(CHOSEN + " && crosses.size > 3")
                page.screenshot(folder / ("live_page_dark.png" if dark else "live_page.png"))


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY / "docs" / "serve"
    with chromium() as page:
        small_pool(page, folder)
        busy_server(page, folder)


if __name__ == "__main__":
    main()
