"""The examples of llama.cpp's server README, for its own API. Standard library only."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from checks import URL, check, run_all

STEPS = "Building a website can be done in 10 simple steps:"


def sent(path: str, body: dict[str, Any] | None = None) -> bytes:
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read()


def got(path: str, body: dict[str, Any] | None = None) -> Any:
    return json.loads(sent(path, body))


@check("POST /completion")
def completion() -> str:
    answer = got("/completion", {"prompt": STEPS, "n_predict": 16})
    assert answer["stop"]
    assert answer["tokens_predicted"] <= 16
    assert answer["timings"]["predicted_ms"] > 0
    assert answer["timings"]["prompt_ms"] > 0
    return f"{answer['timings']['predicted_per_second']:.0f} tokens/s"


@check("POST /completion, streaming")
def stream() -> None:
    body = {"prompt": STEPS, "n_predict": 16, "temperature": 0}
    events = sent("/completion", {**body, "stream": True}).decode().split("\n\n")[:-1]
    told = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [event["stop"] for event in told] == [False] * (len(told) - 1) + [True]
    assert "".join(event["content"] for event in told) == got("/completion", body)["content"]


@check("POST /completion with the samplers of its README")
def samplers() -> None:
    body = {"prompt": STEPS, "n_predict": 4, "temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    body |= {"typical_p": 1.0, "repeat_penalty": 1.1, "repeat_last_n": 64, "presence_penalty": 0, "seed": -1}
    body |= {"mirostat": 0, "dry_multiplier": 0, "xtc_probability": 0, "cache_prompt": True, "id_slot": -1}
    assert got("/completion", {**body, "samplers": ["top_k", "temperature"]})["content"]


@check("POST /completion with n_probs, logit_bias and a grammar")
def constrained() -> None:
    answer = got("/completion", {"prompt": STEPS, "n_predict": 2, "n_probs": 3})
    assert [len(token["top_logprobs"]) for token in answer["completion_probabilities"]] == [3, 3]
    (first, *_) = answer["completion_probabilities"]
    other = got(
        "/completion", {"prompt": STEPS, "n_predict": 1, "temperature": 0, "logit_bias": [[first["id"], False]]}
    )
    assert other["stop"]
    assert got("/completion", {"prompt": STEPS, "grammar": 'root ::= "yes" | "no"'})["content"] in ("yes", "no")
    assert got("/completion", {"prompt": STEPS, "json_schema": {"type": "boolean"}})["content"] in ("true", "false")


@check("POST /completion with several prompts, and with token ids")
def prompts() -> None:
    several = got("/completion", {"prompt": [STEPS, "Once"], "n_predict": 2})
    assert [answer["index"] for answer in several] == [0, 1]
    tokens = got("/tokenize", {"content": STEPS})["tokens"]
    assert got("/completion", {"prompt": tokens, "n_predict": 2})["tokens_evaluated"] == len(tokens)


@check("POST /tokenize and /detokenize")
def tokens() -> None:
    pieces = got("/tokenize", {"content": STEPS, "add_special": False, "with_pieces": True})["tokens"]
    assert "".join(piece["piece"] for piece in pieces) == STEPS
    assert got("/detokenize", {"tokens": [piece["id"] for piece in pieces]})["content"] == STEPS


@check("GET /props and /health")
def properties() -> None:
    assert got("/props")["default_generation_settings"]["n_ctx"]
    assert got("/health") == {"status": "ok"}


@check("what is not there is an error in its form")
def missing() -> None:
    try:
        got("/apply-template", {"messages": []})
    except urllib.error.HTTPError as error:
        told = json.loads(error.read())
    assert told["error"]["code"] == 404


if __name__ == "__main__":
    run_all()
