import json
import os
import sys
import time

HOME = os.environ.get("PEERS_HOME", os.path.expanduser("~/.cache/peers"))
HF_DIR = os.path.join(HOME, "smollm2-hf")


MODEL = os.environ.get("MODEL", "smollm2")


def gguf(kind: str = "Q4_1") -> str:
    return os.path.join(HOME, f"{MODEL}-{kind}.gguf")


# Whether the engine's own speculation is on, by its name for llama.cpp.
SPECULATION = os.environ.get("SPECULATION", "")


def load() -> list[dict]:
    with open(sys.argv[1]) as f:
        return json.load(f)


def warm_up(work: list[dict]) -> list[dict]:
    """Return two of the requests, or where speculation is compared, one of tokens that help no draft."""
    if "SPECULATION" not in os.environ:
        return work[:2]
    return [{**r, "prompt_token_ids": [100 + i for i in range(len(r["prompt_token_ids"]))]} for r in work[:1]]


def report(engine, version, weights, work, generated, seconds, startup):
    prompt = sum(len(r["prompt_token_ids"]) for r in work)
    print(
        json.dumps(
            {
                "engine": engine,
                "version": version,
                "weights": weights + (f" {SPECULATION}" if SPECULATION else ""),
                "requests": len(work),
                "prompt_tokens": prompt,
                "output_tokens": generated,
                "seconds": round(seconds, 3),
                "output_tok_s": round(generated / seconds, 1),
                "startup_s": round(startup, 1),
            }
        ),
        flush=True,
    )


def timed(fn, *args):
    t = time.perf_counter()
    out = fn(*args)
    return out, time.perf_counter() - t
