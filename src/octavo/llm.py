"""Offline inference with vLLM's names: `LLM(...).generate(prompts, sampling_params)`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from octavo.config import DEFAULT_MODEL, EngineConfig
from octavo.engine.builder import build_engine
from octavo.engine.input_processor import Prompt
from octavo.engine.inspection import EngineInfo, PinInfo, list_pins
from octavo.engine.outputs import EmbeddingOutput, EmbeddingRequestOutput, OutputKind, RequestOutput
from octavo.errors import FieldError, RequestError, RequestFailedError, shown
from octavo.pooling import Pooling
from octavo.request import PinReceipt, PinRequest, Request, RequestContext, RequestId
from octavo.sampling_params import SamplingParams
from octavo.text.tokenizer import Tokenizer

PromptLike = str | Mapping[str, Any]
Message = Mapping[str, Any]


class LLM:
    """A model with its engine, in this process.

    Every option of `EngineConfig` is a keyword:

        llm = LLM("smollm2", max_num_seqs=64, kv_cache_memory="2GiB")
        outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=64))
        outputs[0].outputs[0].text

    Raises:
        ConfigError: an option is unknown or invalid.
        ModelError: the model cannot be loaded.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        self.core = build_engine(EngineConfig.from_options({"model": model, **options}))
        # A step computes all open calls, including streams; each output is delivered to the call it belongs to.
        self._receivers: dict[RequestId, Callable[[RequestOutput], None]] = {}
        self._is_closed = False

    @property
    def config(self) -> EngineConfig:
        return self.core.config

    @property
    def info(self) -> EngineInfo:
        """The model and its limits."""
        return self.core.info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises `RequestError` if there is none."""
        return self.core.inputs.require_tokenizer()

    @property
    def summary(self) -> str:
        """A one-line summary: the model, its context length, and the memory of weights and cache."""
        return self.core.summary

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters used if no `sampling_params` are given: the model's recommendation, if it has one."""
        return SamplingParams(**self.info.default_sampling)

    def generate(
        self,
        prompts: PromptLike | Seq[PromptLike],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete each prompt, and return the outputs in the prompts' order.

        Args:
            prompts: text, `{"prompt": text}` or `{"prompt_token_ids": [...]}`, one or a list; a dictionary may also
                have `priority` and `cache_salt`.
            sampling_params: one for all prompts, or a list with one for each.
            use_tqdm: show a progress bar on standard error.

        A request that fails is returned with `error` set and the finish reason "error"; the others are complete.

        Raises:
            RequestError: a prompt or its parameters are invalid; raised before anything is computed. With several
                prompts, the message begins with the index of the invalid one.
            EngineDeadError: the engine has died and cannot compute any more.
        """
        prompts = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        return self._run(self._make_requests(prompts, sampling_params), use_tqdm)

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of conversations, with the model's chat template."""
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else list(messages)
        prompts = []
        for index, conversation in enumerate(conversations):
            with _naming(index, len(conversations)):
                prompts.append(self._render(conversation, template_variables))
        return self._run(self._make_requests(prompts, sampling_params, add_special_tokens=False), use_tqdm)

    def stream_chat(
        self, messages: Seq[Message], sampling_params: SamplingParams | None = None, **template_variables: Any
    ) -> Generator[RequestOutput]:
        """Answer one conversation as a stream of deltas; closing the iterator aborts the request.

        Several streams may be open at once, and other calls may be made meanwhile: each step computes all of them.
        """
        prompts = [self._render(messages, template_variables)]
        (entry,) = self._make_requests(prompts, sampling_params, add_special_tokens=False)
        return self._stream(*entry)

    def embed(
        self, prompts: PromptLike | Seq[PromptLike], *, pooling: str | None = None, use_tqdm: bool = True
    ) -> list[EmbeddingRequestOutput]:
        """Return a normalised embedding of each prompt, in the prompts' order.

        Args:
            prompts: prompts as for `generate`.
            pooling: "last" for the last token's hidden state, or "mean" for the mean over all tokens, which must all be
                computed because the prefix cache only keeps keys and values; None for the engine's `pooling` option.

        Raises:
            RequestError: a prompt or `pooling` is invalid; raised before anything is computed.
            RequestFailedError: computing one of the embeddings failed.
        """
        try:
            how = self.info.pooling if pooling is None else Pooling(pooling)
        except ValueError:
            raise FieldError("pooling", f"must be one of last, mean, got {shown(pooling)}") from None
        prompts = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        requests = self._make_requests(prompts, SamplingParams(), pooling=how)
        found = []
        for output in self._run(requests, use_tqdm):
            if output.embedding is None:
                raise RequestFailedError(output.request_id)
            vector = EmbeddingOutput(output.embedding)
            found.append(
                EmbeddingRequestOutput(output.request_id, output.prompt_token_ids, vector, output.num_cached_tokens)
            )
        return found

    def reset_prefix_cache(self) -> int:
        """Evict every cached block that is not pinned, and return their number."""
        return self.core.reset_prefix_cache()

    def pin_prefix(self, prompt: PromptLike, ttl_seconds: float) -> PinReceipt:
        """Compute a prefix, and keep it cached for `ttl_seconds`, regardless of other requests.

        Only full blocks can be pinned, and `pin_budget` limits all pins together; the receipt has the number of tokens
        that were pinned. Pinning a prefix again renews the pin. Pins yield to a request that could not run otherwise.

        Raises:
            RequestError: the prefix is invalid, leaves no room for a token after it, or the time is not positive.
            RequestFailedError: computing the prefix failed.
        """
        if isinstance(ttl_seconds, bool) or not ttl_seconds > 0:
            raise FieldError("ttl_seconds", f"must be above 0, got {shown(ttl_seconds)}")
        # The engine always samples after a prompt; the sampled token is ignored.
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        ((request, text),) = self._make_requests([prompt], params)
        request.pins = (PinRequest(len(request.prompt_token_ids), float(ttl_seconds)),)
        (output,) = self._run([(request, text)], use_tqdm=False)
        if output.error is not None:
            raise RequestFailedError(output.request_id)
        return output.pins[0]

    def pins(self) -> list[PinInfo]:
        """Return all pins, the soonest to expire first."""
        return list_pins(self.core.scheduler.kv)

    def unpin(self, pin_id: str) -> bool:
        """Remove a pin before it expires; returns False if there is none with that id."""
        return self.core.scheduler.kv.pins.unpin(pin_id)

    def kv_report(self) -> dict[str, Any]:
        """Report who holds which bytes of the cache, and how much it helped, as `/debug/kv` does."""
        return self.core.kv_report()

    def close(self) -> None:
        """Abort unfinished requests. Later calls that compute raise `RuntimeError`; closing again does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self.core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _render(self, messages: Any, variables: Mapping[str, Any]) -> dict[str, Any]:
        return {"prompt": self.tokenizer.apply_chat_template([dict(m) for m in messages], **variables)}

    def _make_requests(
        self,
        prompts: Seq[PromptLike],
        params: SamplingParams | Seq[SamplingParams] | None,
        *,
        add_special_tokens: bool = True,
        pooling: Pooling | None = None,
    ) -> list[tuple[Request, str | None]]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams(**self.info.default_sampling)] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts, but {len(params)} sampling_params", param="sampling_params")
        if self._is_closed:
            raise RuntimeError("this LLM is closed")
        requests = []
        for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            with _naming(index, len(prompts)):
                content, options = _read_prompt(prompt)
                context = RequestContext(**options, pooling=pooling)
                request = self.core.inputs.make(content, each, context, add_special_tokens=add_special_tokens)
            requests.append((request, content if isinstance(content, str) else None))
        return requests

    def _run(self, requests: list[tuple[Request, str | None]], use_tqdm: bool) -> list[RequestOutput]:
        outputs: dict[RequestId, RequestOutput] = {}
        generated, started = self.core.stats.generation_tokens, time.perf_counter()
        with tqdm(total=len(requests), desc="Completions", disable=not use_tqdm, dynamic_ncols=True) as bar:

            def receive(output: RequestOutput) -> None:
                outputs[output.request_id] = output
                bar.update()
                rate = (self.core.stats.generation_tokens - generated) / (time.perf_counter() - started)
                bar.set_postfix_str(f"{rate:.0f} tok/s", refresh=False)

            with self._queued(requests, OutputKind.FINAL, receive):
                while len(outputs) < len(requests):
                    self._step()
        return [outputs[request.request_id] for request, _ in requests]

    def _stream(self, request: Request, prompt: str | None) -> Generator[RequestOutput]:
        outputs: deque[RequestOutput] = deque()
        with self._queued([(request, prompt)], OutputKind.DELTA, outputs.append):
            while outputs or not request.finished:
                while outputs:
                    yield outputs.popleft()
                if not request.finished:
                    self._step()

    @contextmanager
    def _queued(
        self, requests: list[tuple[Request, str | None]], kind: OutputKind, receive: Callable[[RequestOutput], None]
    ) -> Iterator[None]:
        """Queue requests, and abort the unfinished ones when the context is left."""
        try:
            for request, prompt in requests:
                self._receivers[request.request_id] = receive
                self.core.add(request, prompt=prompt, kind=kind)
            yield
        finally:
            for request, _ in requests:
                self.core.abort(request.request_id)
                self._receivers.pop(request.request_id, None)

    def _step(self) -> None:
        try:
            for output in self.core.step():
                self._deliver(output)
        except BaseException:
            # After Ctrl-C or a failure, what the step has computed is unknown, so abort the requests of all open calls.
            for request_id in list(self.core.scheduler.live):
                if (output_so_far := self.core.abort(request_id)) is not None:
                    self._deliver(output_so_far)
            raise

    def _deliver(self, output: RequestOutput) -> None:
        if (receive := self._receivers.get(output.request_id)) is not None:
            receive(output)


@contextmanager
def _naming(index: int, count: int) -> Iterator[None]:
    """Prefix a `RequestError` with the index of the prompt, if there are several."""
    try:
        yield
    except RequestError as error:
        if count > 1:
            error.args = (f"prompt {index}: {error}",)
        raise


def _read_prompt(prompt: PromptLike) -> tuple[Prompt, dict[str, Any]]:
    """Split a prompt into its text or token ids, and its options."""
    if isinstance(prompt, str):
        return prompt, {}
    if not isinstance(prompt, Mapping):
        raise FieldError("prompt", f"must be a string or a dictionary, got {shown(prompt)}")
    options = dict(prompt)
    text, token_ids = options.pop("prompt", None), options.pop("prompt_token_ids", None)
    if (text is None) == (token_ids is None):
        raise RequestError("a prompt dictionary needs either 'prompt' or 'prompt_token_ids'", param="prompt")
    if unknown := sorted(set(options) - {"priority", "cache_salt"}):
        raise RequestError(f"unknown key {unknown[0]!r} in a prompt dictionary", param="prompt")
    if token_ids is None:
        if not isinstance(text, str):
            raise FieldError("prompt", f"must be a string, got {shown(text)}")
        return text, options
    if isinstance(token_ids, str) or not isinstance(token_ids, Seq):
        raise FieldError("prompt_token_ids", f"must be a list of integers, got {shown(token_ids)}")
    return token_ids, options
