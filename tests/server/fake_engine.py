"""An engine without a model: bytes for tokens, a poem for an answer, and every promise of `EngineClient` kept."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, ClassVar

from octavo.engine.inspection import EngineInfo, limits_in_bytes
from octavo.engine.outputs import CompletionOutput, OutputKind, RequestOutput
from octavo.errors import CapacityError, ContextLengthError, EngineDeadError, RequestError
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from octavo.logprobs import TokenLogprobs
from octavo.observe.stats import EngineStats
from octavo.pooling import Pooling
from octavo.request import DEFAULT_CONTEXT, FinishReason, RequestContext, RequestId
from octavo.request_limits import DEFAULT_LIMITS, RequestLimits
from octavo.sampling_params import SamplingParams
from octavo.scheduler.kv_limits import KVAmounts, KVLimits, resolve_limits

EOS = 256
BOS = 257
VOCAB_SIZE = 258
POEM = "the owl and the pussycat went to sea in a beautiful pea green boat. they took some honey and plenty of money. "


class ByteTokenizer:
    """Token i is byte i; two special tokens follow."""

    max_kept_token_bytes = None
    dropped_bytes = b""
    chat_template_text = ""
    special_ids = frozenset({EOS, BOS})
    eos_token_ids = frozenset({EOS})

    def to_json(self) -> str:
        return "{}"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        raw = b"".join(b"" if i in self.special_ids and skip_special_tokens else self.token_bytes(i) for i in ids)
        return raw.decode("utf-8", "replace")

    def id_to_token(self, token_id: int) -> str:
        return {EOS: "<eos>", BOS: "<bos>"}.get(token_id, f"<0x{token_id:02X}>")

    def token_bytes(self, token_id: int) -> bytes:
        return self.id_to_token(token_id).encode() if token_id in self.special_ids else bytes([token_id])

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        if variables.get("refuse"):
            raise RequestError("the model's chat template refused these messages", param="messages")
        lines = [f"{variables.get('marker', '#')}{m['role']}: {m['content']}\n" for m in messages]
        return "".join(lines) + ("#assistant: " if add_generation_prompt else "")


class InfillTokenizer(ByteTokenizer):
    """Has three tokens of their own for filling in, and one between files."""

    names: ClassVar = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")
    # Bytes that no UTF-8 text has.
    ids: ClassVar = dict(zip(names, range(0xF8, 0xFC), strict=True))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self.ids[text]] if text in self.ids else super().encode(text, add_special_tokens)

    def id_to_token(self, token_id: int) -> str:
        return next((name for name, i in self.ids.items() if i == token_id), super().id_to_token(token_id))


class FakeEngine:
    """Answers every prompt with `script`, from a place that depends on the prompt and the seed.

    Attributes:
        running: ids of requests that hold (imaginary) blocks; empty when nothing leaks.
        aborted: ids of requests whose iterator was closed before their end.
        received: the keywords of every `generate` call.
    """

    tokenizer = ByteTokenizer()

    def __init__(
        self,
        *,
        script: str = POEM,
        max_model_len: int = 4096,
        max_num_seqs: int = 64,
        step_seconds: float = 0.0,
        eos_after: int | None = None,
        dies_after: int | None = None,
        breaks_after: int | None = None,
        limits: RequestLimits = DEFAULT_LIMITS,
    ) -> None:
        self.info = EngineInfo(
            model_name="fake",
            architecture="poem",
            weight_bytes=1000,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            vocab_size=VOCAB_SIZE,
            hidden_size=4,
            pooling=Pooling.LAST,
            limits=limits,
            default_sampling={},
        )
        self.script = script.encode()
        self.step_seconds = step_seconds
        self.eos_after = eos_after
        self.dies_after = dies_after
        self.breaks_after = breaks_after
        self.stats = EngineStats(max_model_len=max_model_len)
        self.is_alive = False
        self.is_planning = self.is_stepping = False
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.received: list[dict[str, Any]] = []
        self.cached: set[tuple[int, ...]] = set()
        # Nothing runs in it, and nothing is pinned.
        kv = SimpleNamespace(pins=SimpleNamespace(unpin=lambda pin_id: False))
        self.scheduler = SimpleNamespace(running=[], live={}, kv=kv)
        self._ids = itertools.count()

    async def start(self) -> None:
        self.is_alive = True

    async def shutdown(self, drain_seconds: float) -> None:
        self.is_alive = False

    def resolve_kv_limits(self, amounts: KVAmounts) -> dict[str, KVLimits]:
        return resolve_limits(amounts, KVCacheSpec.build([LayerKVSpec(1, 8, 8)], 16, "float32"), 100, 512)

    def set_kv_limits(self, limits: Mapping[str, KVLimits]) -> None:
        self.kv_limits = dict(limits)
        self.stats.kv_limits = {tenant: limits_in_bytes(limit, 2) for tenant, limit in limits.items()}

    async def ask(self, question: Callable[[Any], Any]) -> Any:
        """Call a function with this engine, which stands for its core too."""
        return question(self)

    def reset_prefix_cache(self) -> int:
        self.cached.clear()
        return 0

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        context: RequestContext = DEFAULT_CONTEXT,
        *,
        output_kind: OutputKind = OutputKind.DELTA,
    ) -> AsyncIterator[RequestOutput]:
        request_id = context.request_id or f"fake-{next(self._ids)}"
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self.received.append({"prompt": token_ids, "params": params, "context": context})
        self._check(token_ids, params)
        self.running.add(request_id)
        finished = False
        try:
            embedding = None if context.pooling is None else [len(token_ids) / 8, 0.1, -0.5, 0.0]
            for output in self._outputs(RequestId(request_id), token_ids, params, output_kind, embedding):
                await asyncio.sleep(self.step_seconds)
                if output is not None:
                    finished = output.finished
                    yield output
        finally:
            if not finished:
                self.aborted.append(request_id)
            self.running.discard(request_id)

    def _check(self, token_ids: list[int], params: SamplingParams) -> None:
        if not self.is_alive:
            raise EngineDeadError("the step loop died")
        longest = len(token_ids) + (params.max_tokens or 1)
        if longest > self.info.max_model_len:
            raise ContextLengthError(
                f"{len(token_ids)} prompt tokens and {params.max_tokens or 1} output tokens are {longest}, over this "
                f"model's limit of {self.info.max_model_len}",
                param="prompt" if len(token_ids) >= self.info.max_model_len else "max_tokens",
            )
        if params.n > self.info.max_num_seqs:
            raise CapacityError(f"n={params.n} is over max_num_seqs={self.info.max_num_seqs}", param="n")

    def _outputs(
        self, request_id: RequestId, prompt: list[int], params: SamplingParams, kind: OutputKind, embedding: Any
    ) -> Iterator[RequestOutput | None]:
        """What each step gives: None where nothing is to be told yet."""
        lines = [self.answer(prompt, params, index) for index in range(params.n)]
        cached = len(prompt) - 1 if tuple(prompt) in self.cached else 0
        self.cached.add(tuple(prompt))
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None, *(logprobs_of(i, params.prompt_logprobs) for i in prompt[1:])]
        longest = max(len(line) for line in lines)
        whole: dict[int, CompletionOutput] = {}
        for step in range(longest):
            if step == self.dies_after:
                self.is_alive = False
                raise EngineDeadError("the step loop died")
            if step == self.breaks_after:
                raise RuntimeError("secret insides")
            news = [line[step] for line in lines if step < len(line)]
            for new in news:
                _append(whole.setdefault(new.index, CompletionOutput(new.index)), new)
            last = step == longest - 1
            if kind is OutputKind.DELTA:
                given = prompt_logprobs if step == 0 else None
                yield RequestOutput(request_id, None, prompt, news, last, cached, given)
            elif last:
                final = RequestOutput(request_id, None, prompt, list(whole.values()), True, cached, prompt_logprobs)
                final.embedding = embedding
                yield final
            else:
                yield None

    def answer(self, prompt: list[int], params: SamplingParams, index: int) -> list[CompletionOutput]:
        """One completion, a delta for each token."""
        seed = (params.seed or 0) + index if params.temperature > 0 else 0
        digest = hashlib.sha256(repr((prompt, seed)).encode()).digest()
        start = digest[0] % len(self.script)
        limit = params.max_tokens or self.info.max_model_len - len(prompt)
        deltas: list[CompletionOutput] = []
        text = ""
        pending = b""
        for position in range(limit):
            token_id = self.script[(start + position) % len(self.script)]
            if position == self.eos_after and not params.ignore_eos:
                token_id = EOS
            pending += b"" if token_id == EOS else bytes([token_id])
            delta = CompletionOutput(index, token_ids=[token_id])
            if params.logprobs is not None:
                delta.logprobs = [logprobs_of(token_id, params.logprobs)]
            with suppress(UnicodeDecodeError):  # half a character is not sent
                delta.text, pending = pending.decode(), b""
            deltas.append(delta)
            text += delta.text
            if token_id == EOS:
                delta.finish_reason = FinishReason.STOP
                return deltas
            if stop := next((stop for stop in params.stop if stop in text), None):
                return _cut(deltas, text.index(stop), stop)
            if token_id in params.stop_token_ids:
                delta.finish_reason, delta.stop_reason = FinishReason.STOP, token_id
                return deltas
        deltas[-1].finish_reason = FinishReason.LENGTH
        return deltas


def _cut(deltas: list[CompletionOutput], length: int, stop: str) -> list[CompletionOutput]:
    for delta in deltas:
        delta.text, length = delta.text[: max(0, length)], length - len(delta.text)
    deltas[-1].finish_reason, deltas[-1].stop_reason = FinishReason.STOP, stop
    return deltas


def _append(whole: CompletionOutput, new: CompletionOutput) -> None:
    whole.text += new.text
    whole.token_ids = whole.token_ids + new.token_ids
    if new.logprobs is not None:
        whole.logprobs = (whole.logprobs or []) + new.logprobs
    whole.finish_reason, whole.stop_reason = new.finish_reason, new.stop_reason


def logprobs_of(token_id: int, top: int) -> TokenLogprobs:
    """The chosen token is always the likeliest; its neighbours follow."""
    return TokenLogprobs(-0.25, 1, tuple(((token_id + k) % 128, -0.25 - k) for k in range(top)))
