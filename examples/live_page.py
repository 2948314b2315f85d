"""Send a running server requests that make paging visible on its live page. Open URL in a browser meanwhile.

A small pool shows the most, because its cells are large and evictions begin soon:

    octavo serve --num-blocks 257 --max-model-len 512
    python examples/live_page.py [URL] [PAUSE]        PAUSE: seconds before each scene, to read what to look for

If the server has API keys, set OCTAVO_API_KEY to one of them.
"""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx


def main(url: str = "http://127.0.0.1:8000", pause: str = "8") -> None:
    # The server takes several keys from the same variable, split at commas.
    key = os.environ.get("OCTAVO_API_KEY", "").split(",")[0].strip()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url, timeout=600, headers=headers) as client:
        models = client.get("/v1/models")
        models.raise_for_status()
        model = models.json()["data"][0]["id"]

        def scene(title: str, what_to_see: str, requests: list[dict[str, Any]]) -> None:
            print(f"\n{title}\n    {what_to_see}")
            time.sleep(float(pause))
            evicted = evictions(client)
            with ThreadPoolExecutor(len(requests)) as threads:
                answers = list(threads.map(lambda fields: complete(client, model, fields), requests))
            prompt = sum(usage["prompt_tokens"] for usage in answers)
            cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in answers)
            print(
                f"    {cached} of {prompt} prompt tokens came from the cache, {evictions(client) - evicted} evictions"
            )

        def story(number: int, length: int = 100) -> list[int]:
            return [10 + (number * 997 + i * 31) % 200 for i in range(length)]

        scene(
            "1. One request",
            "Its prompt takes blocks at once (active), its answer one more every 16 tokens: click it, and its block "
            "table grows. At the end its full blocks turn cached: their keys and values are still there, for whichever "
            "begins with the same tokens.",
            [{"prompt": story(1), "max_tokens": 250}],
        )
        scene(
            "2. Prefix sharing",
            "Three requests begin with the same 100 tokens. The cells of six full blocks turn darker: shared by 3. "
            "What differs, the rest of each prompt and its answer, is in blocks of its own.",
            [{"prompt": [*story(1), 10 + i], "max_tokens": 200} for i in range(3)],
        )
        scene(
            "3. Copy-on-write",
            "Four samples of one prompt share its blocks, the last one, half full, too. Who writes into that one first "
            "gets a copy of it (arrows): click the request, and compare the four block tables.",
            [{"prompt": story(2, 72), "max_tokens": 200, "n": 4, "temperature": 1.0}],
        )
        scene(
            "4. Eviction",
            "Sixty other prompts. When no block is free any more, the cached ones that were not used for longest are "
            "taken (crossed), the end of a prefix before its beginning.",
            [{"prompt": story(3 + i), "max_tokens": 8} for i in range(60)],
        )
        scene(
            "5. Too late",
            "The first prompt again. Its blocks are gone, and the last column says so: evicted.",
            [{"prompt": story(1), "max_tokens": 200}],
        )
        scene(
            "6. Preemption",
            "Thirty requests whose answers need more blocks than there are. Some give theirs back and wait, those that "
            "came last first; they resume from host memory (swapped out) or are computed again.",
            [{"prompt": story(100 + i), "max_tokens": 200} for i in range(30)],
        )


def complete(client: httpx.Client, model: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Request a completion of exactly `max_tokens` tokens and return its usage."""
    response = client.post("/v1/completions", json={"model": model, "ignore_eos": True, "seed": 1, **fields})
    response.raise_for_status()
    usage: dict[str, Any] = response.json()["usage"]
    return usage


def evictions(client: httpx.Client) -> int:
    metrics = client.get("/metrics")
    metrics.raise_for_status()
    lines = metrics.text.splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("octavo:evicted_blocks_total")))


if __name__ == "__main__":
    main(*sys.argv[1:])
