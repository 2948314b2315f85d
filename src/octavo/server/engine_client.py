"""The engine interface that the server uses; implemented by `engine.async_engine.AsyncEngine`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from octavo.engine.inspection import PinInfo
from octavo.engine.outputs import OutputKind, RequestOutput
from octavo.limits import RequestLimits
from octavo.observe.stats import EngineStats
from octavo.pooling import Pooling
from octavo.request import DEFAULT_CONTEXT, RequestContext
from octavo.sampling_params import SamplingParams
from octavo.scheduler.kv_limits import KVAmounts, KVLimits
from octavo.scheduler.scheduler import Scheduler

T = TypeVar("T")


class TokenizerLike(Protocol):
    """Text to token ids and back."""

    @property
    def max_kept_token_bytes(self) -> int | None:
        """Most bytes of a text that one token can stand for, `dropped_bytes` aside; None where that is not certain."""
        ...

    @property
    def dropped_bytes(self) -> bytes:
        """Bytes that leave no trace in the tokens."""
        ...

    @property
    def chat_template_text(self) -> str:
        """All chat templates that there are, one after the other."""
        ...

    @property
    def special_ids(self) -> Collection[int]: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...

    def id_to_token(self, token_id: int, /) -> str | None: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt of a chat; raises `RequestError` where the template refuses it, or there is none."""
        ...


class EngineClient(Protocol):
    """An engine as used from the event loop."""

    @property
    def model_name(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int:
        """Numbers of an embedding."""
        ...

    @property
    def pooling(self) -> Pooling:
        """What makes an embedding of a prompt's hidden states."""
        ...

    @property
    def tokenizer(self) -> TokenizerLike: ...

    @property
    def default_sampling(self) -> dict[str, Any]:
        """Keywords of `SamplingParams` for requests that do not give them."""
        ...

    @property
    def limits(self) -> RequestLimits: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def is_planning(self) -> bool:
        """Whether a step is under way that needs the interpreter now; what can wait for a millisecond should."""
        ...

    @property
    def is_stepping(self) -> bool:
        """Whether a step is under way."""
        ...

    async def start(self) -> None: ...

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        context: RequestContext = DEFAULT_CONTEXT,
        *,
        output_kind: OutputKind = OutputKind.DELTA,
    ) -> AsyncIterator[RequestOutput]:
        """The outputs of one request; closing the iterator aborts it.

        The first `__anext__` raises `RequestError` where the request is invalid, before anything is queued;
        any raises `EngineDeadError` once the step loop died.
        """
        ...

    async def kv_report(self) -> dict[str, Any]:
        """The ledger, ready for JSON."""
        ...

    async def inspect(self, look: Callable[[Scheduler], T]) -> T:
        """What a function finds that looks at the scheduler, and changes nothing, between two steps."""
        ...

    async def pins(self) -> Sequence[PinInfo]:
        """Every pin, the soonest to expire first."""
        ...

    async def unpin(self, pin_id: str) -> bool:
        """Remove a pin; False if there is none with that id."""
        ...

    def resolve_kv_limits(self, amounts: KVAmounts) -> Mapping[str, KVLimits]:
        """Tenants' floors and caps in blocks of this engine's cache; raises `ConfigError` where they do not fit."""
        ...

    async def set_kv_limits(self, limits: Mapping[str, KVLimits]) -> None:
        """Tenants' floors and caps from now on; may be called before `start`."""
        ...

    async def reset_prefix_cache(self) -> int:
        """Evict every cached block that is neither in use nor pinned; returns how many."""
        ...

    async def shutdown(self, drain_seconds: float) -> None: ...
