"""`POST /v1/embeddings`."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from octavo.engine.outputs import RequestOutput
from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams
from octavo.server.answer_json import json_bytes
from octavo.server.answers.generation import Answer, Job
from octavo.server.bodies.body_reader import EmbeddingRequest
from octavo.server.engine_client import EngineClient
from octavo.server.errors import FAILED_STEP
from octavo.server.http.turnstile import Turnstile
from octavo.server.ids import new_id
from octavo.server.tenants.keys import Client

# A placeholder: the engine does not sample for embeddings.
_NO_PARAMS = SamplingParams(max_tokens=1)


def embedding_job(
    engine: EngineClient, read: EmbeddingRequest, client: Client, traceparent: str | None, turnstile: Turnstile
) -> Job:
    """Return the engine requests of a body."""
    client.check_prompts(len(read.prompts))
    context = client.context(new_id("embd"), read.body.priority, read.cache_salt)
    context = replace(context, traceparent=traceparent, pooling=engine.info.pooling)
    return Job(read.model, read.prompts, _NO_PARAMS, context, turnstile=turnstile)


class EmbeddingAnswer(Answer):
    """One embedding request, whose tokens are all the prompts'; the embeddings are in the order of the inputs."""

    def __init__(self, engine: EngineClient, job: Job, *, as_base64: bool = False) -> None:
        super().__init__(engine, job)
        self._as_base64 = as_base64

    async def whole(self) -> list[bytes]:
        try:
            return await super().whole()
        except RequestError as error:
            error.rename({"prompt": "input"})
            raise

    def weight(self, output: RequestOutput) -> int:
        return len(output.embedding or ())

    def vectors(self, outputs: Sequence[RequestOutput]) -> Iterator[list[float]]:
        """Yield the embedding of each output, and count its prompt's tokens."""
        for index, output in enumerate(outputs):
            if output.embedding is None:
                raise FAILED_STEP(output.request_id)
            self.usage.add_prompt(index, output)
            yield output.embedding

    def assemble(self, outputs: list[RequestOutput]) -> list[bytes]:
        """Return the response body, in pieces."""
        head = {"id": self.job.response_id, "object": "list", "created": self.job.created, "model": self.job.model}
        pieces = [json_bytes(head)[:-1] + b',"data":[']
        for index, embedding in enumerate(self.vectors(outputs)):
            # Encoded one by one, because encoding holds the interpreter's lock.
            pieces.append(b"," * bool(index) + self._entry(index, embedding))
        pieces.append(b'],"usage":' + json_bytes(self._usage()) + b"}")
        return pieces

    def _entry(self, index: int, embedding: list[float]) -> bytes:
        return json_bytes({"object": "embedding", "index": index, "embedding": self._encoded(embedding)})

    def _encoded(self, embedding: list[float]) -> Any:
        return base64.b64encode(_little_endian(embedding)).decode() if self._as_base64 else embedding

    def _usage(self) -> dict[str, Any]:
        usage = self.usage.report()
        del usage["completion_tokens"]
        return usage


def _little_endian(numbers: list[float]) -> bytes:
    """Pack numbers as little-endian float32, the format that OpenAI's clients read."""
    packed = array("f", numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
