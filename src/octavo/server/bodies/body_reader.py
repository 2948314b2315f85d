"""Turns the bytes of a body into requests for the engine: checked here, rendered and tokenised in `prompt_encoder`.

The code is pure, so it can run in any thread or process; `reader_pool` decides where.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from hashlib import blake2b
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from jiter import from_json

import octavo
from octavo.errors import FieldError, RequestError, shortened
from octavo.request_limits import RequestLimits
from octavo.sampling_params import SamplingParams
from octavo.server.answer_json import json_bytes
from octavo.server.apis import new_id
from octavo.server.bodies.chat_messages import cache_marks, checked_messages
from octavo.server.bodies.fields import RequestBody, drop_unknown, fields_of, filled, json_object
from octavo.server.bodies.foreign_fields import translate
from octavo.server.bodies.messages_body import CountTokensBody, MessagesBody
from octavo.server.bodies.openai_bodies import ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody, TokenizeBody
from octavo.server.bodies.prompts import GivenPromptEncoder, PromptEncoder, split_prompts
from octavo.server.bodies.read_bodies import ChatRequest, CompletionRequest, EmbeddingRequest, FollowUp, ReadAnswer
from octavo.server.bodies.responses_body import (
    ResponsesBody,
    page,
    references,
    repeatable,
    resolved,
    response_id_of,
    response_of,
    with_ids,
)
from octavo.server.bodies.tools import Dialects, Speech, checked_tools
from octavo.server.engine_client import TokenizerLike
from octavo.server.errors import MODEL_MISSING
from octavo.structured_outputs import StructuredOutputsParams
from octavo.text.chat_template import is_plain
from octavo.text.prompt_checks import check_token_ids

Body = TypeVar("Body", bound=RequestBody)

# Of a prediction, by token of the model's context.
_MOST_PREDICTED_CHARACTERS = 8


class BodyReader:
    """Reads bodies for one model; it is immutable and can be pickled.

    Every public method takes a body's bytes, and raises `RequestError`, naming the field, or `ApiError` if the body
    cannot be served.

    Attributes:
        has_plain_template: whether the time and the memory to render a chat are bounded by its length.

    Args:
        tokenizer: the model's tokenizer; if None, prompts must be token ids.
        hidden_size: number of dimensions of an embedding.
        names: names under which the model is served; the first is used if a body names none.
        strict: refuse unknown fields instead of ignoring them.
        default_sampling: values of sampling fields that a body does not give.
        tool_call_parser, reasoning_parser: names of formats, or "auto" to detect them in the chat template.
    """

    def __init__(
        self,
        *,
        tokenizer: TokenizerLike | None,
        vocab_size: int,
        hidden_size: int,
        max_model_len: int,
        limits: RequestLimits,
        names: Sequence[str],
        strict: bool = False,
        default_sampling: Mapping[str, Any] | None = None,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> None:
        self.tokenizer = tokenizer
        self._prompts = PromptEncoder(tokenizer, vocab_size, max_model_len)
        self._vocab_size = vocab_size
        self._hidden_size = hidden_size
        self._max_model_len = max_model_len
        self._limits = limits
        self._names = tuple(names)
        self._strict = strict
        self._default_sampling = dict(default_sampling or {})
        template = "" if tokenizer is None else tokenizer.chat_template_text
        render = None if tokenizer is None else tokenizer.apply_chat_template
        self._dialects = Dialects(template, tool_call_parser, reasoning_parser, render)
        self._parsers = tool_call_parser, reasoning_parser
        self.has_plain_template = bool(template) and is_plain(template)

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which the model is served."""
        return self._names

    @property
    def prompt_settings(self) -> dict[str, Any]:
        """The inputs of a prompt's tokens other than the body and the tokenizer, as keywords of a reader."""
        return {
            "vocab_size": self._vocab_size,
            "hidden_size": self._hidden_size,
            "max_model_len": self._max_model_len,
            "default_sampling": self._default_sampling,
            "tool_call_parser": self._parsers[0],
            "reasoning_parser": self._parsers[1],
        }

    def prompt_fingerprint(self) -> str:
        """Return a digest of all that a prompt's tokens depend on besides the body: readers with equal ones agree."""
        parts = [octavo.__version__, json.dumps(self.prompt_settings, sort_keys=True)]
        if self.tokenizer is not None:
            parts += [self.tokenizer.to_json(), self.tokenizer.chat_template_text]
        digest = blake2b(digest_size=16)
        for part in parts:
            encoded = part.encode()
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        return digest.hexdigest()

    def given(self, framed: bytes) -> Any:
        """Read a body whose one prompt a router has tokenised: `frame(method, packed token ids, body)`."""
        method, packed, raw = unframed(framed)
        reader = copy(self)
        reader._prompts = GivenPromptEncoder(self._prompts, np.frombuffer(packed, "<i4").tolist())
        return getattr(reader, method.decode())(raw)

    def served_name(self, model: str | None) -> str:
        """Return the model name for the response; if the client names none, the first served name."""
        if model is None:
            return self._names[0]
        # Ollama's clients add this tag to names without one.
        if model not in self._names and model.removesuffix(":latest") not in self._names:
            raise MODEL_MISSING(shortened(model))
        return model

    @property
    def has_tools(self) -> bool:
        """Whether the format of the model's tool calls is known."""
        return self._dialects.has_calls

    @property
    def has_reasoning(self) -> bool:
        """Whether the format of the model's reasoning is known."""
        return self._dialects.has_reasoning

    def completion(self, raw: bytes) -> CompletionRequest:
        body, model = self._parse(CompletionBody, raw)
        return self._read_completion(body, model, keeps_text=bool(body.echo))

    def _read_completion(self, body: CompletionBody, model: str, *, keeps_text: bool) -> CompletionRequest:
        params = body.sampling_params(self._vocab_size, self._limits, self._default_sampling)
        kept = self._prompts.kept_tokens(body.truncate_prompt_tokens, params.max_tokens or 1)
        given = split_prompts(body.prompt)
        self._limits.check_prompts(len(given), params.num_sequences, params.width_param)
        prompts = [
            self._prompts.encode(prompt, body.add_special_tokens is not False, keeps_text=keeps_text, kept=kept)
            for prompt in given
        ]
        return CompletionRequest(
            body=body.without_bulk(), model=model, params=params, prompts=prompts, cache_salt=body.cache_salt or ""
        )

    def embedding(self, raw: bytes) -> EmbeddingRequest:
        body, model = self._parse(EmbeddingBody, raw)
        body.check_for(self._hidden_size, self._limits)
        kept = self._prompts.kept_tokens(body.truncate_prompt_tokens, 0)
        given = split_prompts(body.input, "input")
        with about("input"):
            self._limits.check_prompts(len(given), 1, "n")
            prompts = [
                self._prompts.encode(prompt, body.add_special_tokens is not False, kept=kept) for prompt in given
            ]
        return EmbeddingRequest(
            body=body.without_bulk(), model=model, prompts=prompts, cache_salt=body.cache_salt or ""
        )

    def chat(self, raw: bytes) -> ChatRequest:
        body, model = self._parse(ChatBody, raw)
        return self._read_chat(body, model)

    def message(self, raw: bytes) -> ChatRequest:
        body, model = self._parse(MessagesBody, raw)
        self._limits.check_messages(len(body.messages))
        return self._translated(body, model, body.chat())

    def count_tokens(self, raw: bytes) -> ReadAnswer:
        body, model = self._parse(CountTokensBody, raw)
        self._limits.check_messages(len(body.messages))
        chat = self._translated(body, model, body.chat())
        return ReadAnswer(body.without_bulk(), json_bytes({"input_tokens": len(chat.prompt.token_ids)}))

    def response(self, raw: bytes) -> ChatRequest | FollowUp:
        body, model = self._parse(ResponsesBody, raw)
        referenced = dict.fromkeys(response_of(item_id) for item_id in references(body.items()).values())
        if body.previous_response_id or referenced:
            return FollowUp(body.previous_response_id or None, tuple(referenced))
        return self._read_response(body, model)

    def next_response(self, framed: bytes) -> ChatRequest:
        """Read a response's body that continues others: `frame(items of the previous one, referenced items, body)`."""
        before, referenced, raw = unframed(framed)
        body, model = self._parse(ResponsesBody, raw)
        return self._read_response(body, model, before, referenced)

    def _read_response(
        self, body: ResponsesBody, model: str, before: bytes = b"", referenced: bytes = b""
    ) -> ChatRequest:
        earlier = _items(before)
        given = body.items()
        with body.names_errors():
            self._limits.check_messages(len(earlier) + len(given), "items")
        request_id = new_id("resp")
        given = with_ids(resolved(given, chain(earlier, _items(referenced))), response_id_of(request_id), earlier)
        read = self._translated(body, model, body.chat(earlier + given))
        items = (
            b",".join(part for part in (before, repeatable("input", given)[1:-1]) if part) if body.is_stored else b""
        )
        return replace(read, items=items, instructions=body.instructions, request_id=request_id)

    def input_items(self, framed: bytes) -> bytes:
        """Return a page of a response's input items as JSON: `frame(items, query)`."""
        items, query = unframed(framed)
        return json_bytes(page(_items(items), from_json(query)))

    def _translated(self, body: RequestBody, model: str, chat: dict[str, Any]) -> ChatRequest:
        """Read the chat that another API's body was translated into; `origin` becomes that body."""
        with body.names_errors():
            read = self._read_chat(filled(ChatBody, {**chat, "model": model}, self._limits), model)
        return replace(read, origin=body.without_bulk())

    def _read_chat(self, body: ChatBody, model: str) -> ChatRequest:
        params = body.sampling_params(self._vocab_size, self._limits, self._default_sampling)
        messages = checked_messages(body.messages, self._limits)
        tools = checked_tools(body.tools, body.tool_choice, self._limits)
        calls = self._dialects.calls_for(tools)
        variables = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", body.reasoning_effort)
            if body.reasoning_effort == "none":
                variables.setdefault("enable_thinking", False)
        if body.verbosity is not None:
            variables.setdefault("verbosity", body.verbosity)
        kept = self._prompts.kept_tokens(body.truncate_prompt_tokens, params.max_tokens or 1)
        chat = self._dialects.chat(messages, tools)
        prompt, text = self._prompts.render(body, chat, variables, cache_marks(body.messages), kept)
        dialect = self._dialects.of_answer(calls, tools, text)
        if constraint := self._dialects.constraint(dialect, tools, parallel=body.parallel_tool_calls is not False):
            params = self._constrained(params, constraint)
        elif params.structured_outputs is not None and (part := dialect.reasoning_part()) is not None:
            params = replace(params, structured_outputs=replace(params.structured_outputs, reasoning=part))
        if dialect.keeps_special_tokens and "skip_special_tokens" not in body.sampling:
            params = replace(params, skip_special_tokens=False)
        return ChatRequest(
            body=body.without_bulk(),
            model=model,
            params=params,
            prompts=[prompt],
            cache_salt=body.cache_salt or "",
            echoed=_echoed(body, messages),
            speech=Speech(dialect, body.parallel_tool_calls is False, body.include_reasoning is not False),
            predicted_ids=self._predicted_ids(body.predicted_text),
        )

    def _predicted_ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a predicted text, as far as an answer could contain it."""
        if not text or self.tokenizer is None:
            return ()
        most = self._max_model_len
        return tuple(self.tokenizer.encode(text[: _MOST_PREDICTED_CHARACTERS * most], False)[:most])

    def tokenize(self, raw: bytes) -> ReadAnswer:
        body, _ = self._parse(TokenizeBody, raw)
        if (given := 3 - [body.prompt, body.content, body.messages].count(None)) != 1:
            raise FieldError("prompt", f"must be given, or messages, or llama.cpp's content: one of them, got {given}")
        if body.messages is not None:
            messages = checked_messages(body.messages, self._limits)
            tools = checked_tools(body.tools, None, self._limits)
            self._dialects.calls_for(tools)
            chat = self._dialects.chat(messages, tools)
            token_ids = list(self._prompts.render(body, chat, body.chat_template_kwargs or {})[0].token_ids)
        elif body.content is not None:
            token_ids = self._prompts.tokenize(body.content, bool(body.add_special))
        else:
            token_ids = self._prompts.tokenize(body.prompt or "", body.add_special_tokens is not False)
        to_token = self._prompts.tokenizer.id_to_token
        answer = {
            "count": len(token_ids),
            "max_model_len": self._max_model_len,
            "tokens": [self._piece(token_id) for token_id in token_ids] if body.with_pieces else token_ids,
            "token_strs": [to_token(i) or "" for i in token_ids] if body.return_token_strs else None,
        }
        return ReadAnswer(body.without_bulk(), json_bytes(answer))

    def detokenize(self, raw: bytes) -> ReadAnswer:
        body, _ = self._parse(DetokenizeBody, raw)
        check_token_ids(body.tokens, self._vocab_size, "tokens")
        # Special tokens are kept, so that /detokenize returns what was given to /tokenize.
        text = self._prompts.tokenizer.decode(body.tokens, False)
        # vLLM's name and llama.cpp's.
        return ReadAnswer(body.without_bulk(), json_bytes({"prompt": text, "content": text}))

    def _piece(self, token_id: int) -> dict[str, Any]:
        """Return a token in llama.cpp's form: its text, or its bytes where they are not text by themselves."""
        raw = self._prompts.tokenizer.token_bytes(token_id)
        try:
            return {"id": token_id, "piece": raw.decode()}
        except UnicodeDecodeError:
            return {"id": token_id, "piece": list(raw)}

    def _constrained(self, params: SamplingParams, constraint: StructuredOutputsParams) -> SamplingParams:
        if params.structured_outputs is not None:
            problem = "requires a call, so the answer cannot have another form too: leave out {}"
            raise FieldError("tool_choice", problem, "response_format")
        try:
            self._limits.check_structured_outputs(constraint)
            return replace(params, structured_outputs=constraint)
        except RequestError as error:
            raise FieldError("tool_choice", f"needs a grammar of these tools: {error}") from None

    def _parse(self, body_type: type[Body], raw: bytes) -> tuple[Body, str]:
        given = json_object(raw)
        if not self._strict:
            translate(given, fields_of(body_type))
        # Before the values are checked: there may be a million unknown fields.
        unknown = drop_unknown(body_type, given, strict=self._strict)
        body = filled(body_type, given, self._limits)
        body.ignored = unknown
        return body, self.served_name(body.model)


@contextmanager
def about(param: str) -> Iterator[None]:
    """Make errors about a prompt name the field that it came from."""
    try:
        yield
    except RequestError as error:
        error.rename({"prompt": param})
        raise


def _echoed(body: ChatBody, messages: list[dict[str, Any]]) -> str:
    """Return what `echo` puts before the answer: the last message, if the answer continues it (as in vLLM)."""
    continues = (
        messages[-1]["role"] == "assistant" or body.add_generation_prompt is False or body.continue_final_message
    )
    return str(messages[-1]["content"]) if body.echo and continues else ""


def _items(joined: bytes) -> list[Any]:
    items: list[Any] = from_json(b"[" + joined + b"]")
    return items


def frame(*parts: bytes) -> tuple[bytes, ...]:
    """Return the pieces which, joined, `unframed` splits into the parts again. No part is copied."""
    return tuple(piece for part in parts for piece in (len(part).to_bytes(8, "little"), part))


def unframed(framed: bytes) -> list[bytes]:
    parts, place = [], 0
    while place < len(framed):
        begin = place + 8
        place = begin + int.from_bytes(framed[place:begin], "little")
        parts.append(framed[begin:place])
    return parts
