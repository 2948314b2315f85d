"""`POST /v1/completions` and `POST /v1/embeddings`."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.errors import RequestError
from octavo.logprobs import TokenLogprobs
from octavo.server.answer_json import dumps, event, json_bytes, json_pieces
from octavo.server.answers.generation import Answer, Job, OpenAIAnswer
from octavo.server.answers.logprobs import CompletionLogprobs, prompt_logprobs
from octavo.server.bodies.read_bodies import CompletionRequest, EmbeddingRequest
from octavo.server.errors import FAILED_STEP


class CompletionAnswer(OpenAIAnswer[CompletionRequest]):
    """One completion request.

    Choices are numbered as by OpenAI: completion i of prompt p is choice p * n + i.
    """

    def __init__(self, job: Job[CompletionRequest]) -> None:
        super().__init__(job, "text_completion", tells_pins=False)
        self._body = body = job.read.body
        self._n = job.read.params.n
        self._prompt_logprobs: dict[int, list[dict[str, dict[str, Any]] | None]] = {}
        # The choices whose first piece, which carries the prompt for `echo`, has been sent.
        self._begun: set[int] = set()
        num_choices = len(job.read.prompts) * self._n if body.logprobs is not None else 0
        self._logprobs = [
            CompletionLogprobs(
                job.texts,
                skip_special_tokens=body.sampling.get("skip_special_tokens", True),
                as_token_ids=bool(body.return_tokens_as_token_ids),
            )
            for _ in range(num_choices)
        ]

    def bulk(self) -> list[list[Any]]:
        lists: list[list[Any]] = list(self._prompt_logprobs.values())
        self._prompt_logprobs = {}
        return lists

    def assemble(self, outputs: list[RequestOutput]) -> list[bytes]:
        choices: list[dict[str, Any]] = []
        for prompt_index, output in enumerate(outputs):
            choices.extend(self._new_choices(prompt_index, output))
        return json_pieces({**self._head("text_completion"), "choices": choices, **self._totals()})

    def render(self, index: int, output: RequestOutput) -> bytes:
        choices = self._new_choices(index, output)
        tail = self._tail()
        return "".join([event(self._stream_head + dumps(choice) + tail) for choice in choices]).encode()

    def _new_choices(self, prompt_index: int, output: RequestOutput) -> list[dict[str, Any]]:
        if self._body.scores_only:
            for completion in output.outputs:
                completion.text, completion.token_ids, completion.logprobs = "", [], []
        self._count(prompt_index, output)
        return [
            self._choice(prompt_index, completion, output)
            for completion in output.outputs
            if completion.token_ids or completion.text or completion.finish_reason
        ]

    def _choice(self, prompt_index: int, completion: CompletionOutput, output: RequestOutput) -> dict[str, Any]:
        """Return the choice object for the next part of a completion."""
        index = prompt_index * self._n + completion.index
        text = completion.text
        token_ids: list[int] = completion.token_ids
        logprobs: list[TokenLogprobs | None] = list(completion.logprobs or ())
        first = index not in self._begun
        if first:
            self._begun.add(index)
            if self._body.echo:
                text = self._prompt_text(prompt_index) + text
                if self._logprobs:
                    token_ids = output.prompt_token_ids + token_ids
                    logprobs = [*(output.prompt_logprobs or ()), *logprobs]
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs[index].piece(token_ids, logprobs) if self._logprobs else None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if first and self._body.sampling.get("prompt_logprobs") is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs_of(prompt_index, output)
        if self._body.return_token_ids:
            choice["token_ids"] = completion.token_ids
            if first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def _prompt_text(self, prompt_index: int) -> str:
        prompt = self.job.read.prompts[prompt_index]
        if prompt.text is not None:
            return prompt.text
        params = self.job.read.params
        return self.job.engine.tokenizer.decode(list(prompt.token_ids), params.skip_special_tokens)

    def _prompt_logprobs_of(self, prompt_index: int, output: RequestOutput) -> list[dict[str, dict[str, Any]] | None]:
        """Return vLLM's `prompt_logprobs`, which all choices of a prompt share."""
        if prompt_index not in self._prompt_logprobs:
            given = output.prompt_logprobs or ()
            self._prompt_logprobs[prompt_index] = prompt_logprobs(self.job.texts, output.prompt_ids, given)
        return self._prompt_logprobs[prompt_index]


class EmbeddingAnswer(Answer[EmbeddingRequest]):
    """One embedding request, whose tokens are all the prompts'; the embeddings are in the order of the inputs."""

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
        job = self.job
        head = {"id": job.response_id, "object": "list", "created": job.created, "model": job.read.model}
        pieces = [json_bytes(head)[:-1] + b',"data":[']
        for index, embedding in enumerate(self.vectors(outputs)):
            # Encoded one by one, because encoding holds the interpreter's lock.
            encoded: Any = embedding
            if job.read.body.encoding_format == "base64":
                encoded = base64.b64encode(_little_endian(embedding)).decode()
            entry = {"object": "embedding", "index": index, "embedding": encoded}
            pieces.append(b"," * bool(index) + json_bytes(entry))
        usage = self.usage.report()
        del usage["completion_tokens"]
        pieces.append(b'],"usage":' + json_bytes(usage) + b"}")
        return pieces


def _little_endian(numbers: list[float]) -> bytes:
    """Pack numbers as little-endian float32, the format that OpenAI's clients read."""
    packed = array("f", numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
