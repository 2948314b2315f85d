import asyncio
import os
import subprocess
import time

import httpx
from common import HOME, SPECULATION, gguf, load, report, timed, warm_up

WEIGHTS = os.environ.get("WEIGHTS", "BF16")
URL = "http://127.0.0.1:8098"
work = load()
parallel = min(64, len(work))
longest = max(len(r["prompt_token_ids"]) + r["max_tokens"] for r in work) + 8


def start():
    p = subprocess.Popen(
        [
            os.path.join(HOME, "llamacpp/bin/llama-server"),
            "-m",
            gguf(WEIGHTS),
            "--host",
            "127.0.0.1",
            "--port",
            "8098",
            "-t",
            "2",
            "-tb",
            "2",
            "-np",
            str(parallel),
            "-c",
            str(parallel * longest),
            "-b",
            "2048",
            "-ub",
            "512",
            "--no-cache-prompt",
            *(["--spec-type", SPECULATION] if SPECULATION else []),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while True:
        if p.poll() is not None:
            raise SystemExit(f"llama-server ended with status {p.returncode}")
        try:
            if httpx.get(URL + "/health").status_code == 200:
                return p
        except httpx.TransportError:
            time.sleep(0.2)


async def run(w):
    async with httpx.AsyncClient(timeout=900, limits=httpx.Limits(max_connections=100)) as c:

        async def one(r):
            j = (
                await c.post(
                    URL + "/completion",
                    json={
                        "prompt": r["prompt_token_ids"],
                        "n_predict": r["max_tokens"],
                        "ignore_eos": True,
                        "temperature": 0,
                        "cache_prompt": False,
                    },
                )
            ).json()
            return j["tokens_predicted"]

        return sum(await asyncio.gather(*map(one, w)))


server, startup = timed(start)
try:
    asyncio.run(run(warm_up(work)))
    n, s = timed(lambda: asyncio.run(run(work)))
    report("llama.cpp", "llama-cpp-python 0.3.36", WEIGHTS, work, n, s, startup)
finally:
    server.terminate()
    server.wait()
