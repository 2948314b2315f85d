"""From the bytes of a body to what is asked of the engine: checked, rendered and tokenised. Pure, so it runs anywhere.

Where it runs, `body_reading` decides.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from pydantic_core import from_json

from octavo.errors import ContextLengthError, RequestError, shown
from octavo.limits import RequestLimits
from octavo.request import PinRequest
from octavo.sampling_params import SamplingParams
from octavo.server.choices import Speech
from octavo.server.dialects import Dialects, RenderedChat
from octavo.server.engine_client import TokenizerLike
from octavo.server.errors import ModelMissingError
from octavo.server.generation import json_bytes
from octavo.server.messages_body import CountTokensBody, MessagesBody
from octavo.server.parsing import parse_body
from octavo.server.pinning import CacheMark, cache_marks
from octavo.server.prompts import (
    EncodedPrompt,
    check_template_variables,
    checked_messages,
    common_length,
    end_in_message,
    split_prompts,
)
from octavo.server.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    RequestBody,
    TokenizeBody,
)
from octavo.server.responses_body import ResponsesBody
from octavo.server.tool_use import checked_tools
from octavo.structured_outputs import StructuredOutputsParams
from octavo.text.prompt_checks import check_text_length, check_token_ids

Body = TypeVar("Body", bound=RequestBody)
AnyGeneration = TypeVar("AnyGeneration", CompletionBody, ChatBody)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A completion body that was read; its bulky fields are empty now."""

    body: CompletionBody
    model: str
    params: SamplingParams
    prompts: list[EncodedPrompt]
    cache_salt: str


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat body that was read; its bulky fields are empty now.

    Attributes:
        echoed: what `echo` puts before the answer.
        speech: how the answer is to be read.
        origin: the body of another API that stands for this chat.
        items: of a response, all its input, as the inside of a JSON list; empty where it is not to be stored.
        instructions: of a response.
    """

    body: ChatBody
    model: str
    params: SamplingParams
    prompt: EncodedPrompt
    echoed: str
    cache_salt: str
    speech: Speech = field(default_factory=Speech)
    origin: RequestBody | None = None
    items: bytes = b""
    instructions: str | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """An embedding body that was read; its bulky fields are empty now."""

    body: EmbeddingBody
    model: str
    prompts: list[EncodedPrompt]
    cache_salt: str


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """A body that could be answered while it was read: the answer's JSON."""

    body: RequestBody
    content: bytes


@dataclass(frozen=True, slots=True)
class FollowUp:
    """A response's body that cannot be read without the response that it goes on from."""

    previous_response_id: str


class BodyReader:
    """Reads bodies for one model; holds nothing that changes, and survives pickling.

    Every method takes a body's bytes. It raises `ApiError` or `RequestError` for what cannot be served, naming the
    field, whatever else the body holds.

    Args:
        tokenizer: None where the model has none: prompts must be token ids then.
        hidden_size: numbers of an embedding.
        names: what the model is called here; the first is used where a body names none.
        strict: refuse fields that nobody here knows, instead of ignoring them.
        default_sampling: what the sampling fields mean that a body does not give.
        tool_call_parser, reasoning_parser: names of formats; "auto": by the chat template.
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
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._hidden_size = hidden_size
        self._max_model_len = max_model_len
        self._limits = limits
        self._names = tuple(names)
        self._strict = strict
        self._default_sampling = dict(default_sampling or {})
        template = "" if tokenizer is None else tokenizer.chat_template_text
        self._dialects = Dialects(template, tool_call_parser, reasoning_parser)

    def served_name(self, model: str | None) -> str:
        """The name to answer under; a client that names none means the one model there is."""
        if model is None:
            return self._names[0]
        if model not in self._names:
            raise ModelMissingError(model)
        return model

    def completion(self, raw: bytes) -> CompletionRequest:
        body, model = self._parse(CompletionBody, raw)
        params = self._with_defaults(body).sampling_params(self._vocab_size, self._limits)
        kept = self._kept_tokens(body.truncate_prompt_tokens, params.max_tokens or 1)
        given = split_prompts(body.prompt)
        self._limits.check_prompts(len(given), params.num_sequences, params.width_param)
        prompts = [
            self._encode(prompt, body.add_special_tokens is not False, keeps_text=bool(body.echo), kept=kept)
            for prompt in given
        ]
        return CompletionRequest(_without_bulk(body), model, params, prompts, body.cache_salt or "")

    def embedding(self, raw: bytes) -> EmbeddingRequest:
        body, model = self._parse(EmbeddingBody, raw)
        body.check(self._hidden_size, self._limits)
        kept = self._kept_tokens(body.truncate_prompt_tokens, 0)
        given = split_prompts(body.input, "input")
        with _about("input"):
            self._limits.check_prompts(len(given), 1, "n")
            prompts = [self._encode(prompt, body.add_special_tokens is not False, kept=kept) for prompt in given]
        return EmbeddingRequest(_without_bulk(body), model, prompts, body.cache_salt or "")

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
        return ReadAnswer(_without_bulk(body), json_bytes({"input_tokens": len(chat.prompt.token_ids)}))

    def response(self, raw: bytes) -> ChatRequest | FollowUp:
        body, model = self._parse(ResponsesBody, raw)
        if body.previous_response_id:
            return FollowUp(body.previous_response_id)
        return self._read_response(body, model, b"")

    def next_response(self, framed: bytes) -> ChatRequest:
        """A response that goes on from another: `framed` is `after(items, raw)`."""
        size = int.from_bytes(framed[:8], "little")
        body, model = self._parse(ResponsesBody, framed[8 + size :])
        return self._read_response(body, model, framed[8 : 8 + size])

    def _read_response(self, body: ResponsesBody, model: str, before: bytes) -> ChatRequest:
        given = body.items()
        earlier = from_json(b"[" + before + b"]")
        self._limits.check_messages(len(earlier) + len(given), "items")
        read = self._translated(body, model, body.chat(earlier + given))
        items = b",".join(part for part in (before, json_bytes(given)[1:-1]) if part) if body.is_stored else b""
        return replace(read, items=items, instructions=body.instructions)

    def _translated(self, body: RequestBody, model: str, chat: dict[str, Any]) -> ChatRequest:
        """A chat that another API's body stands for; its `origin` is that body."""
        read = self._read_chat(ChatBody.model_validate({**chat, "model": model}), model)
        return replace(read, origin=_without_bulk(body))

    def _read_chat(self, body: ChatBody, model: str) -> ChatRequest:
        params = self._with_defaults(body).sampling_params(self._vocab_size, self._limits)
        messages = checked_messages(body.messages, self._limits)
        tools = checked_tools(body.tools, body.tool_choice, self._limits)
        calls = self._dialects.calls_for(tools)
        variables = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", body.reasoning_effort)
        kept = self._kept_tokens(body.truncate_prompt_tokens, params.max_tokens or 1)
        chat = self._dialects.chat(messages, tools)
        prompt, text = self._render(body, chat, variables, cache_marks(body.messages), kept)
        dialect = self._dialects.of_answer(calls, tools, text)
        if constraint := self._dialects.constraint(dialect, tools, parallel=body.parallel_tool_calls is not False):
            params = self._constrained(params, constraint)
        elif params.structured_outputs is not None and (part := dialect.reasoning_part) is not None:
            params = replace(params, structured_outputs=replace(params.structured_outputs, reasoning=part))
        if dialect.keeps_special_tokens and body.skip_special_tokens is None:
            params = replace(params, skip_special_tokens=False)
        speech = Speech(dialect, body.parallel_tool_calls is False, body.include_reasoning is not False)
        echoed = _echoed(body, messages)
        return ChatRequest(_without_bulk(body), model, params, prompt, echoed, body.cache_salt or "", speech)

    def tokenize(self, raw: bytes) -> ReadAnswer:
        body, _ = self._parse(TokenizeBody, raw)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")
        if body.messages is not None:
            messages = checked_messages(body.messages, self._limits)
            tools = checked_tools(body.tools, None, self._limits)
            self._dialects.calls_for(tools)
            chat = self._dialects.chat(messages, tools)
            token_ids = list(self._render(body, chat, body.chat_template_kwargs or {})[0].token_ids)
        else:
            token_ids = self._tokenize(body.prompt or "", body.add_special_tokens is not False)
        to_token = self.tokenizer.id_to_token
        answer = {
            "count": len(token_ids),
            "max_model_len": self._max_model_len,
            "tokens": token_ids,
            "token_strs": [to_token(i) or "" for i in token_ids] if body.return_token_strs else None,
        }
        return ReadAnswer(_without_bulk(body), json_bytes(answer))

    def detokenize(self, raw: bytes) -> ReadAnswer:
        body, _ = self._parse(DetokenizeBody, raw)
        check_token_ids(body.tokens, self._vocab_size, "tokens")
        # Special tokens stay: what /tokenize gave must come back as it was.
        return ReadAnswer(_without_bulk(body), json_bytes({"prompt": self.tokenizer.decode(body.tokens, False)}))

    @property
    def tokenizer(self) -> TokenizerLike:
        """Raises RequestError where the model came without one."""
        if self._tokenizer is None:
            raise RequestError("this model has no tokenizer: pass token ids as the prompt", param="prompt")
        return self._tokenizer

    def _constrained(self, params: SamplingParams, constraint: StructuredOutputsParams) -> SamplingParams:
        if params.structured_outputs is not None:
            raise RequestError(
                "an answer that must call a tool cannot have another form too: leave out response_format",
                param="tool_choice",
            )
        try:
            self._limits.check_structured_outputs(constraint)
            return replace(params, structured_outputs=constraint)
        except RequestError as error:
            raise RequestError(f"the grammar of these tools: {error}", param="tool_choice") from None

    def _with_defaults(self, body: AnyGeneration) -> AnyGeneration:
        # Beams are not drawn: what shapes a draw would be refused.
        if not self._default_sampling or body.use_beam_search:
            return body
        missing = {name: value for name, value in self._default_sampling.items() if getattr(body, name) is None}
        return body.model_copy(update=missing)

    def _parse(self, body_type: type[Body], raw: bytes) -> tuple[Body, str]:
        body = parse_body(body_type, raw, strict=self._strict)
        body.check_names(self._limits)
        return body, self.served_name(body.model)

    def _kept_tokens(self, kept: int | None, max_tokens: int) -> int | None:
        """How many tokens at a prompt's end are kept, by `truncate_prompt_tokens`; None: all of them."""
        longest = self._max_model_len
        if kept is None:
            return None
        if kept != -1 and not 1 <= kept <= longest:
            raise RequestError(
                f"truncate_prompt_tokens must be -1, or between 1 and {longest}, this model's maximum context length, "
                f"got {shown(kept)}",
                param="truncate_prompt_tokens",
            )
        return max(1, longest - max_tokens) if kept == -1 else kept

    def _encode(
        self,
        prompt: str | list[int],
        add_special_tokens: bool,
        *,
        keeps_text: bool = False,
        kept: int | None = None,
    ) -> EncodedPrompt:
        if isinstance(prompt, list):
            check_token_ids(prompt, self._vocab_size, "prompt")
            token_ids, text = prompt, None
        else:
            # All of a text that is cut down is tokenised first: where its tokens begin depends on what precedes them.
            token_ids = self._tokenize(prompt, add_special_tokens, is_cut=kept is not None)
            if not token_ids:
                raise RequestError("prompt must not be empty", param="prompt")
            text = prompt if keeps_text else None
        if kept is not None and len(token_ids) > kept:
            token_ids, text = token_ids[-kept:], None
        self._check_length(token_ids)
        return EncodedPrompt(array("i", token_ids), text)

    def _tokenize(self, text: str, add_special_tokens: bool, *, is_cut: bool = False) -> list[int]:
        tokenizer = self.tokenizer
        longest = tokenizer.max_kept_token_bytes
        check_text_length(text, self._max_model_len, longest, tokenizer.dropped_bytes, is_cut=is_cut)
        return tokenizer.encode(text, add_special_tokens)

    def _check_length(self, token_ids: list[int]) -> None:
        if len(token_ids) > self._max_model_len:
            raise ContextLengthError(
                f"this model's maximum context length is {self._max_model_len} tokens, "
                f"but the prompt alone has {len(token_ids)}",
                param="prompt",
            )

    def _render(
        self,
        body: ChatBody | TokenizeBody,
        chat: RenderedChat,
        variables: dict[str, Any],
        marks: Sequence[CacheMark] = (),
        kept: int | None = None,
    ) -> tuple[EncodedPrompt, str]:
        """The chat as the model's template renders it, in tokens and as text; raises `RequestError`, also for what the
        template refuses.

        Special tokens are normally in the template already. The prefixes that `marks` end are measured in tokens.
        """
        check_template_variables(variables)
        add_special_tokens = bool(body.add_special_tokens)
        messages = chat.messages
        marks = [replace(mark, index=mark.index + chat.num_added) for mark in marks]
        render = partial(self.tokenizer.apply_chat_template, tools=chat.tools)
        if body.continue_final_message:
            if body.add_generation_prompt:
                raise RequestError(
                    "continue_final_message and add_generation_prompt cannot both be true",
                    param="continue_final_message",
                )
            text = end_in_message(render(messages, False, **variables), messages[-1])
        else:
            text = render(messages, body.add_generation_prompt is not False, **variables)
        prompt = self._encode(text, add_special_tokens, kept=kept)
        if kept == len(prompt.token_ids):
            # What was marked to be cached is no beginning of the prompt any more.
            marks = []

        def measure(index: int) -> int:
            """How many of the prompt's tokens belong to messages up to `index`: they do not depend on what follows."""
            try:
                beginning = render(messages[: index + 1], False, **variables)
            except RequestError:
                # Some templates refuse a chat that ends here. Then what precedes any other text of the rest belongs
                # to it.
                rest = [{**message, "content": "~" + message["content"]} for message in messages[index + 1 :]]
                beginning = render(messages[: index + 1] + rest, False, **variables)
            return common_length(prompt.token_ids, self.tokenizer.encode(beginning, add_special_tokens))

        pins = [PinRequest(measure(mark.index), mark.ttl_seconds) for mark in marks]
        return EncodedPrompt(prompt.token_ids, None, tuple(pin for pin in pins if pin.num_tokens)), text


@contextmanager
def _about(param: str) -> Iterator[None]:
    """Let errors about a prompt name the field that it came in."""
    try:
        yield
    except RequestError as error:
        error.param = param
        raise


def _without_bulk(body: Body) -> Body:
    return body.model_copy(update=dict.fromkeys(body.bulky))


def _echoed(body: ChatBody, messages: list[dict[str, Any]]) -> str:
    """What `echo` puts before the answer: the last message, where the answer continues it (as in vLLM)."""
    continues = (
        messages[-1]["role"] == "assistant" or body.add_generation_prompt is False or body.continue_final_message
    )
    return str(messages[-1]["content"]) if body.echo and continues else ""


def after(items: bytes, raw: bytes) -> bytes:
    """A body behind the items that precede its own."""
    return len(items).to_bytes(8, "little") + items + raw
