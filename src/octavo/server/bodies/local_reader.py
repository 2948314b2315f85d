"""Reads the bodies of Ollama's and llama.cpp's own APIs, which become chats, completions and embeddings."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from octavo.errors import ContextLengthError, shortened
from octavo.sampling_params import SamplingParams
from octavo.server.answer_json import json_bytes
from octavo.server.apis import LLAMACPP_DEFAULTS, OLLAMA_DEFAULTS
from octavo.server.bodies.body_reader import BodyReader, about
from octavo.server.bodies.fields import MOST_NOTED, drop_unknown, fields_of, filled
from octavo.server.bodies.foreign_fields import translate
from octavo.server.bodies.local_bodies import (
    InfillBody,
    InfillTokens,
    LlamaCppBody,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaGenerationBody,
    OllamaModelBody,
    OllamaPullBody,
)
from octavo.server.bodies.openai_bodies import OLDEST_MESSAGES, ChatBody, CompletionBody, EmbeddingBody
from octavo.server.bodies.prompts import EncodedPrompt, split_prompts
from octavo.server.bodies.read_bodies import ChatRequest, CompletionRequest, EmbeddingRequest, ReadAnswer
from octavo.text.prompt_checks import check_token_ids

ModelBody = TypeVar("ModelBody", bound=OllamaModelBody)


class LocalApisReader(BodyReader):
    """A `BodyReader` for these APIs too."""

    def ollama_chat(self, raw: bytes) -> ChatRequest | ReadAnswer:
        body, model = self._parse(OllamaChatBody, raw)
        self._limits.check_messages(len(body.messages or ()))
        fields = self._ollama_fields(body, body.chat())
        if not body.messages:
            return self._loaded(body, model, fields)
        read = self._with_latest_messages(body, model, fields)
        return replace(read, params=self._as_there(read.params, read.prompts))

    def _with_latest_messages(self, body: OllamaChatBody, model: str, fields: dict[str, Any]) -> ChatRequest:
        """Read a chat; if it exceeds the context, without its oldest messages, as Ollama does.

        System messages stay. What is left begins with a question of the user, because many templates refuse another
        beginning, and leaves a quarter of the context to the answer, or less if that is to be shorter.
        """
        try:
            return self._translated(body, model, fields)
        except ContextLengthError:
            questions = [i for i, message in enumerate(fields["messages"]) if message["role"] == "user"]
            if body.truncate is False or len(questions) < 2:
                raise
        answer = self._max_model_len // 4
        if isinstance(limit := fields.get("max_tokens"), int) and limit >= 0:
            answer = min(answer, limit)

        def read_from(first: int) -> ChatRequest:
            messages = [m for i, m in enumerate(fields["messages"]) if i >= first or m["role"] == "system"]
            return self._translated(body, model, {**fields, "messages": messages})

        def fits(first: int) -> bool:
            try:
                return len(read_from(first).prompt.token_ids) + answer <= self._max_model_len
            except ContextLengthError:
                return False

        place = bisect_left(questions, True, lo=1, hi=len(questions) - 1, key=fits)
        body.ignored = (*body.ignored, OLDEST_MESSAGES)
        return read_from(questions[place])

    def ollama_generate(self, raw: bytes) -> ChatRequest | ReadAnswer:
        body, model = self._parse(OllamaGenerateBody, raw)
        fields = self._ollama_fields(body, body.chat())
        if not body.prompt:
            return self._loaded(body, model, {**fields, "messages": []})
        if not body.raw and self._dialects.has_template:
            read = self._translated(body, model, fields)
        else:
            read = self._plain(body, model, fields)
        if body.context:
            # The tokens of an earlier answer and its prompt.
            check_token_ids(body.context, self._vocab_size, "context")
            prompt = self._prompts.encode([*body.context, *read.prompt.token_ids], add_special_tokens=False)
            read = replace(read, prompts=[prompt])
        return replace(read, params=self._as_there(read.params, read.prompts))

    def _ollama_fields(self, body: OllamaGenerationBody, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the chat's fields with Ollama's names translated."""
        with body.names_errors():
            translate(fields, fields_of(ChatBody))
        body.ignored += drop_unknown(ChatBody, fields, strict=self._strict)
        self._default(fields, OLLAMA_DEFAULTS)
        return fields

    def _default(self, fields: dict[str, Any], defaults: Mapping[str, float]) -> None:
        """Set sampling fields that neither the body nor the model states."""
        for name, value in defaults.items():
            if fields.get(name) is None and name not in self._default_sampling:
                fields[name] = value

    def _loaded(self, body: OllamaGenerationBody, model: str, fields: dict[str, Any]) -> ReadAnswer:
        """Answer a body without a prompt, after checking its other fields."""
        with body.names_errors():
            filled(ChatBody, fields, self._limits).sampling_params(self._vocab_size, self._limits, {})
        return ReadAnswer(body.without_bulk(), json_bytes(body.loaded(model)))

    def _plain(self, body: OllamaGenerateBody, model: str, fields: dict[str, Any]) -> ChatRequest:
        """Read a prompt that no template is applied to."""
        with body.names_errors():
            chat = filled(ChatBody, fields, self._limits)
            params = chat.sampling_params(self._vocab_size, self._limits, self._default_sampling)
            prompt = self._prompts.encode(f"{body.system or ''}{body.prompt or ''}", not body.context)
        light = chat.without_bulk()
        return ChatRequest(
            body=light, model=model, params=params, prompts=[prompt], cache_salt="", origin=body.without_bulk()
        )

    def ollama_embed(self, raw: bytes) -> EmbeddingRequest:
        body, model = self._parse(OllamaEmbedBody, raw)
        return self._ollama_embedding(body, model, body.input, cuts=body.truncate is not False)

    def ollama_embeddings(self, raw: bytes) -> EmbeddingRequest:
        body, model = self._parse(OllamaEmbeddingsBody, raw)
        return self._ollama_embedding(body, model, body.prompt, cuts=True)

    def _ollama_embedding(
        self, body: OllamaEmbedBody | OllamaEmbeddingsBody, model: str, given: str | list[str] | None, *, cuts: bool
    ) -> EmbeddingRequest:
        body.ignored += _noted(body.options or {})
        dimensions = body.dimensions if isinstance(body, OllamaEmbedBody) else None
        fields = EmbeddingBody(input=None, dimensions=dimensions)
        fields.check_for(self._hidden_size, self._limits)
        prompts = split_prompts(given, "input") if given else []
        kept = self._prompts.kept_tokens(-1, 0) if cuts else None
        with about("input"):
            self._limits.check_prompts(len(prompts), 1, "n")
            encoded = [self._prompts.encode(prompt, True, kept=kept, keeps_end=False) for prompt in prompts]
        return EmbeddingRequest(
            body=fields.without_bulk(), model=model, prompts=encoded, cache_salt="", origin=body.without_bulk()
        )

    def model(self, raw: bytes) -> OllamaModelBody:
        """Read a body that only names a model, which must be served."""
        return self._named(OllamaModelBody, raw)

    def pulled_model(self, raw: bytes) -> OllamaPullBody:
        return self._named(OllamaPullBody, raw)

    def _named(self, body_type: type[ModelBody], raw: bytes) -> ModelBody:
        body, _ = self._parse(body_type, raw)
        self.served_name(body.model or body.name)
        return body

    def llamacpp_completion(self, raw: bytes) -> CompletionRequest:
        body, model = self._parse(LlamaCppBody, raw)
        with body.names_errors():
            fields = body.completion()
            self._default(fields, LLAMACPP_DEFAULTS)
            read = self._read_completion(filled(CompletionBody, fields, self._limits), model, keeps_text=True)
        return replace(read, origin=body.without_bulk(), params=self._as_there(read.params, read.prompts))

    def llamacpp_infill(self, raw: bytes) -> CompletionRequest:
        body, model = self._parse(InfillBody, raw)
        self._limits.check_messages(len(body.input_extra or ()), "input_extra")
        tokenizer = self._prompts.tokenizer
        tokens = InfillTokens.of(tokenizer)
        with body.names_errors():
            fields = body.completion()
            # Half of the context for an answer without a limit is more than an editor shows.
            answer = min(fields["max_tokens"] or self._max_model_len, self._max_model_len // 2)
            fields["prompt"] = tokens.prompt(body, tokenizer, self._max_model_len - answer)
            fields["stop_token_ids"] = list(tokens.ends)
            self._default(fields, LLAMACPP_DEFAULTS)
            read = self._read_completion(filled(CompletionBody, fields, self._limits), model, keeps_text=False)
        return replace(read, origin=body.without_bulk(), params=self._as_there(read.params, read.prompts))

    def _as_there(self, params: SamplingParams, prompts: Sequence[EncodedPrompt]) -> SamplingParams:
        """Change what these servers do otherwise than OpenAI's and vLLM's.

        The length of an answer is cut to what the context has room for, instead of refused. The objects of a JSON
        Schema have the listed properties only, unless `additionalProperties` says otherwise.
        """
        wanted = params.structured_outputs
        if wanted is not None and wanted.json is not None:
            params = replace(params, structured_outputs=replace(wanted, disable_additional_properties=True))
        room = max(1, self._max_model_len - max(len(prompt.token_ids) for prompt in prompts))
        if params.max_tokens is None or params.max_tokens <= room:
            return params
        return replace(params, max_tokens=room)


def _noted(options: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of options as ignored fields."""
    return tuple(shortened(f"options.{name}") for name in list(options)[:MOST_NOTED])
