"""Random bodies are read or refused with a client error. tests/campaigns/fuzz_bodies.py sends them to a real server."""

from __future__ import annotations

import random

import pytest

from octavo.errors import RequestError
from octavo.request_limits import DEFAULT_LIMITS
from octavo.server.app import create_app
from octavo.server.bodies.body_reader import frame
from octavo.server.bodies.local_reader import LocalApisReader
from octavo.server.bodies.read_bodies import FollowUp
from octavo.server.errors import ApiError
from tests.campaigns.fuzz_fields import WEIGHTS, make_body
from tests.campaigns.fuzz_values import MAX_MODEL_LEN
from tests.server.fake_engine import VOCAB_SIZE, FakeEngine, InfillTokenizer

BODIES = 150
METHODS = {
    "/v1/completions": "completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "response",
    "/v1/responses/input_tokens": "response",
    "/v1/messages": "message",
    "/v1/messages/count_tokens": "count_tokens",
    "/v1/embeddings": "embedding",
    "/api/chat": "ollama_chat",
    "/api/generate": "ollama_generate",
    "/api/embed": "ollama_embed",
    "/api/embeddings": "ollama_embeddings",
    "/api/show": "model",
    "/api/pull": "model",
    "/completion": "llamacpp_completion",
    "/completions": "llamacpp_completion",
    "/infill": "llamacpp_infill",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}


def reader(*, strict: bool = False) -> LocalApisReader:
    return LocalApisReader(
        tokenizer=InfillTokenizer(),
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        max_model_len=MAX_MODEL_LEN,
        limits=DEFAULT_LIMITS,
        names=("fake",),
        strict=strict,
    )


@pytest.mark.parametrize("path", METHODS)
def test_a_random_body_is_read_or_refused(path: str) -> None:
    reads = reader()
    num_read = 0
    for seed in range(BODIES):
        body = make_body(random.Random(f"{path}-{seed}"), path)
        try:
            read = getattr(reads, METHODS[path])(body)
            if isinstance(read, FollowUp):
                reads.next_response(b"".join(frame(b'{"role": "user", "content": "x", "id": "a"}', b"", body)))
            num_read += 1
        except (ApiError, RequestError):
            pass  # any other exception would be a 500
    # Bodies that are all refused for the same field would show little.
    assert num_read > BODIES / 10


def test_every_body_is_fuzzed() -> None:
    endpoints = create_app(FakeEngine()).state.endpoints
    assert set(WEIGHTS) == set(METHODS) == {endpoint.path for endpoint in endpoints if endpoint.body is not None}
