"""The engine interface that the server uses; implemented by `engine.async_engine.AsyncEngine`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from octavo.engine.outputs import OutputKind, RequestOutput
from octavo.request import DEFAULT_CONTEXT, RequestContext
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:  # the processes that read bodies import this module, and neither the engine nor the scheduler
    from octavo.engine.core import EngineCore
    from octavo.engine.inspection import EngineInfo
    from octavo.observe.stats import EngineStats
    from octavo.scheduler.kv_limits import KVAmounts, KVLimits

T = TypeVar("T")


class TokenizerLike(Protocol):
    """Converts text to token ids and back."""

    @property
    def max_kept_token_bytes(self) -> int | None:
        """Largest number of bytes of a text that one token can cover, without `dropped_bytes`; None if unknown."""
        ...

    @property
    def dropped_bytes(self) -> bytes:
        """The byte values that may leave no trace in the tokens."""
        ...

    @property
    def chat_template_text(self) -> str:
        """All chat templates of the model, concatenated."""
        ...

    @property
    def special_ids(self) -> Collection[int]: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...

    def to_json(self) -> str:
        """Return all that tokens depend on, as the library `tokenizers` writes it."""
        ...

    def id_to_token(self, token_id: int, /) -> str | None: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Render the prompt of a chat; raises `RequestError` if the template refuses it or there is no template."""
        ...


class EngineClient(Protocol):
    """The interface of an engine, for use from the event loop."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> TokenizerLike: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def is_planning(self) -> bool:
        """Whether a running step needs the interpreter now, so that work that can wait a millisecond should wait."""
        ...

    @property
    def is_stepping(self) -> bool:
        """Whether a step is running."""
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
        """Iterate over the outputs of one request; closing the iterator aborts the request.

        The first `__anext__` raises `RequestError` if the request is invalid, before anything is queued; every
        `__anext__` raises `EngineDeadError` once the step loop has died.
        """
        ...

    async def ask(self, question: Callable[[EngineCore], T]) -> T:
        """Call a function with the core in the engine's thread between two steps, and return its result.

        Before `start`, it is called at once.
        """
        ...

    def resolve_kv_limits(self, amounts: KVAmounts) -> Mapping[str, KVLimits]:
        """Convert tenants' floors and caps to blocks of this cache; raises `ConfigError` if they do not fit."""
        ...

    async def shutdown(self, drain_seconds: float) -> None: ...
