"""Bodies that were read: what the engine is asked for, and what the answer needs of the body."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.sampling_params import SamplingParams
from octavo.server.bodies.fields import RequestBody
from octavo.server.bodies.openai_bodies import ChatBody, CompletionBody, EmbeddingBody
from octavo.server.bodies.prompts import EncodedPrompt
from octavo.server.bodies.tools import Speech

# A placeholder: the engine does not sample for embeddings.
_NO_PARAMS = SamplingParams(max_tokens=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """A body with prompts that was read; its bulky fields have been emptied.

    Attributes:
        origin: the body of another API that was translated into this one; None for OpenAI's.
        request_id: the id of the response, if it was needed for reading.
        predicted_ids: the tokens of `prediction`.
    """

    body: CompletionBody | ChatBody | EmbeddingBody
    model: str
    params: SamplingParams = _NO_PARAMS
    prompts: list[EncodedPrompt]
    cache_salt: str
    origin: RequestBody | None = None
    request_id: str = ""
    predicted_ids: tuple[int, ...] = ()

    @property
    def sent(self) -> RequestBody:
        """The body as the client sent it."""
        return self.body if self.origin is None else self.origin


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(ReadRequest):
    body: CompletionBody


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(ReadRequest):
    """A chat, which has one prompt.

    Attributes:
        echoed: the text that `echo` puts before the answer.
        speech: how the answer is to be parsed.
        items: all input items of a response, as the inside of a JSON list; empty if it is not to be stored.
        instructions: the instructions of a response.
    """

    body: ChatBody
    echoed: str = ""
    speech: Speech = field(default_factory=Speech)
    items: bytes = b""
    instructions: str | None = None

    @property
    def prompt(self) -> EncodedPrompt:
        return self.prompts[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest(ReadRequest):
    body: EmbeddingBody


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """A body that was answered while it was read.

    Attributes:
        content: the answer's JSON.
    """

    body: RequestBody
    content: bytes


@dataclass(frozen=True, slots=True)
class FollowUp:
    """A response's body that continues an earlier response or refers to its items, and cannot be read without them.

    Attributes:
        referenced: ids of the responses that items of the body refer to.
    """

    previous_response_id: str | None
    referenced: tuple[str, ...]
