"""The endpoints of llama.cpp's own API; `/tokenize` and `/detokenize` take its fields too."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

import octavo
from octavo.errors import RequestError
from octavo.server.answers.llamacpp import LlamaCppAnswer, properties, slots
from octavo.server.answers.logprobs import TokenTexts
from octavo.server.bodies.body_reader import CompletionRequest
from octavo.server.bodies.llamacpp_body import InfillBody, LlamaCppBody
from octavo.server.engine_client import EngineClient
from octavo.server.handling import Handling
from octavo.server.route import Endpoint, json_response
from octavo.server.tenants.auth import client_of


class LlamaCppApi:
    """The request handlers."""

    def __init__(self, engine: EngineClient, handling: Handling) -> None:
        self._engine = engine
        self._handling = handling
        self._texts = TokenTexts(engine)

    def endpoints(self) -> list[Endpoint]:
        example = {"prompt": "Once upon a time", "n_predict": 16}
        between = {"input_prefix": "def add(a, b):\n    return ", "input_suffix": "\n", "n_predict": 16}
        return [
            Endpoint(
                *("POST", "/completion", self.create_completion),
                *("LlamaCppCompletion", "Continue a prompt, by llama.cpp's API"),
                body=LlamaCppBody,
                example=example,
                streams=True,
            ),
            Endpoint(
                *("POST", "/completions", self.create_completion, "LlamaCppCompletion", "As /completion"),
                body=LlamaCppBody,
                example=example,
                streams=True,
            ),
            Endpoint(
                *("POST", "/infill", self.fill_in),
                *("LlamaCppCompletion", "Text between a prefix and a suffix, by llama.cpp's API"),
                body=InfillBody,
                example=between,
                streams=True,
            ),
            Endpoint(
                *("GET", "/props", self.show_properties),
                *("LlamaCppProperties", "What the server serves, by llama.cpp's API"),
            ),
            Endpoint(
                *("GET", "/slots", self.list_slots),
                *("LlamaCppSlots", "How many sequences can run, and how many of the client's do"),
            ),
        ]

    async def create_completion(self, request: Request) -> Response:
        return await self._completion(request, "llamacpp_completion")

    async def fill_in(self, request: Request) -> Response:
        return await self._completion(request, "llamacpp_infill")

    async def _completion(self, request: Request, method: str) -> Response:
        read: CompletionRequest = await self._handling.read(request, method)
        answer = LlamaCppAnswer(self._engine, self._texts, read, self._handling.job(request, read, "cmpl"))
        body = read.origin
        assert isinstance(body, LlamaCppBody)
        return await self._handling.respond(request, body, answer, streams=body.streams)

    async def list_slots(self, request: Request) -> Response:
        """List as many slots as sequences can run, and those of the client's own tenant as taken."""
        tenant, info = client_of(request.scope).tenant, self._engine.info
        running = await self._engine.ask(
            lambda core: sum(seq.request.tenant == tenant for seq in core.scheduler.running)
        )
        return json_response(slots(info.max_num_seqs, running, info.max_model_len))

    async def show_properties(self, request: Request) -> Response:
        try:
            template = self._engine.tokenizer.chat_template_text
        except RequestError:  # no tokenizer
            template = ""
        names, length = self._handling.names, self._engine.info.max_model_len
        defaults = self._engine.info.default_sampling
        return json_response(properties(names, length, template, octavo.__version__, defaults))
