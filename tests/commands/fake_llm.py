"""A stand-in for `octavo.LLM`: it answers every prompt with the words of a script, one token a word."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from octavo.config import EngineConfig
from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.errors import RequestError
from octavo.request import FinishReason, RequestId
from octavo.sampling_params import SamplingParams

MAX_MODEL_LEN = 2048
WORDS = [f" word{i}" for i in range(4096)]


class FakeLLM:
    """Remembers what it was asked; `on_token(index)` is called before each streamed token."""

    last: Any = None
    on_token: Any = staticmethod(lambda index: None)

    default_sampling: Any = {}  # noqa: RUF012
    summary = "fake: 2,048 tokens of context"

    def __init__(self, **options: Any) -> None:
        self.config = EngineConfig(**options)
        self.num_cache_resets = 0
        self.info = SimpleNamespace(
            max_model_len=MAX_MODEL_LEN, vocab_size=49152, default_sampling=self.default_sampling
        )
        self.prompts: list[Any] = []
        self.params: list[SamplingParams] = []
        self.conversations: list[Any] = []
        self.use_tqdm: bool | None = None
        self.closed = self.stream_closed = False
        type(self).last = self

    def reset_prefix_cache(self) -> None:
        self.num_cache_resets += 1

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: Any) -> None:
        self.closed = True

    def generate(
        self, prompts: list[Any], sampling_params: list[SamplingParams], *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        self.use_tqdm = use_tqdm
        self.prompts += prompts
        self.params += sampling_params
        for index, prompt in enumerate(prompts):
            if prompt.get("prompt") == "refuse me":
                raise RequestError(f"prompt {index}: too long" if len(prompts) > 1 else "too long")
        pairs = zip(prompts, sampling_params, strict=True)
        return [_answer(prompt.get("prompt"), prompt.get("prompt_token_ids"), params) for prompt, params in pairs]

    def chat(
        self, conversations: list[list[dict[str, str]]], sampling_params: list[SamplingParams], *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        self.conversations += conversations
        pairs = zip(conversations, sampling_params, strict=True)
        return [_answer(messages[-1]["content"], None, params) for messages, params in pairs]

    def stream_chat(self, messages: list[dict[str, str]], params: SamplingParams) -> Iterator[Any]:
        self.conversations.append([dict(m) for m in messages])
        self.params.append(params)
        if messages[-1]["content"] == "refuse me":
            raise RequestError("too long")
        try:
            for index, word in enumerate(["Hello", " there", "!"]):
                self.on_token(index)
                one = CompletionOutput(0, word, [index], finish_reason=FinishReason.STOP if index == 2 else None)
                yield RequestOutput(RequestId("r"), None, [1, 2, 3, 4], [one], index == 2, num_cached_tokens=1)
        finally:
            self.stream_closed = True


def _answer(text: str | None, token_ids: list[int] | None, params: SamplingParams) -> RequestOutput:
    token_ids = token_ids or list(range(len(text.split())))
    ids = list(range(params.max_tokens))  # type: ignore[arg-type]
    words = "".join(WORDS[: params.max_tokens])
    outputs = [CompletionOutput(i, words, ids, finish_reason=FinishReason.LENGTH) for i in range(params.n)]
    return RequestOutput(RequestId("r"), text, token_ids, outputs, True, num_cached_tokens=2)
