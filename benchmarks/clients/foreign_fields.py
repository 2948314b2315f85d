"""Fields of llama.cpp's, Ollama's and vLLM's clients, as docs/serve/coming_from.md has them. Standard library only."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

from checks import MODEL, URL, check, run_all

# Fields, the expected status, and whether the header names the first of them as ignored.
FIELDS = [
    ({"cache_prompt": True, "id_slot": -1}, 200, False),
    ({"repeat_penalty": 1.1}, 200, False),
    ({"n_predict": 3}, 200, False),
    ({"max_tokens": -1, "stop": ["a", "e"]}, 200, False),
    ({"seed": -1}, 200, False),
    ({"mirostat": 0, "typical_p": 1.0, "dry_multiplier": 0.0, "xtc_probability": 0, "tfs_z": 1}, 200, False),
    ({"mirostat": 2}, 400, False),
    ({"samplers": ["top_k"]}, 200, True),
    ({"keep_alive": "5m"}, 200, False),
    ({"options": {"num_ctx": 4096}}, 200, True),
    ({"options": {"num_predict": 3, "temperature": 0.5, "repeat_penalty": 1.1}}, 200, False),
    ({"format": "json"}, 200, False),
    ({"format": {"type": "boolean"}}, 200, False),
    ({"format": "xml"}, 400, False),
    ({"think": False}, 200, False),
    ({"mm_processor_kwargs": None}, 200, False),
    ({"mm_processor_kwargs": {"a": 1}}, 400, False),
    ({"min_p": 0.1, "top_k": 5, "ignore_eos": True, "min_tokens": 1}, 200, False),
    ({"guided_choice": ["yes", "no"]}, 200, False),
    ({"response_format": {"type": "json_object"}}, 200, False),
    ({"logits_processors": ["x"]}, 400, False),
    ({"grammar": 'root ::= "yes" | "no"'}, 200, False),
    ({"json_schema": {"type": "boolean"}}, 200, False),
    ({"response_format": {"type": "json_object", "schema": {"type": "boolean"}}}, 200, False),
    ({"verbosity": "low", "prediction": {"type": "content", "content": "x"}}, 200, False),
    ({"stop": None, "store": True, "service_tier": "auto", "reasoning_effort": "none"}, 200, False),
]


def ask(fields: dict[str, object]) -> tuple[int, str]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **fields}
    if "n_predict" in fields:
        del body["max_tokens"]
    request = urllib.request.Request(
        f"{URL}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.headers.get("X-Octavo-Ignored-Fields", "")
    except urllib.error.HTTPError as error:
        return error.code, ""


for fields, status, ignored in FIELDS:

    @check(", ".join(f"{name}: {json.dumps(value)}" for name, value in fields.items()))
    def field(fields: dict[str, object] = fields, status: int = status, ignored: bool = ignored) -> str:
        found, header = ask(fields)
        assert found == status, f"{found} instead of {status}"
        assert (next(iter(fields)) in header) == ignored, f"the header is {header!r}"
        return "refused" if status == 400 else "ignored, and named" if ignored else "taken"


run_all()
