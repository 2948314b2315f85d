"""The options of an engine that are tables of options themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.errors import ConfigError, shown
from octavo.option import Options, option


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig(Options):
    """Options for drafting tokens, with vLLM's names."""

    method: Literal["ngram", "suffix", "draft_model"] = option(
        "ngram",
        "ngram: from the request's own text; suffix: also from what followed the same text in the prefix cache; "
        "draft_model: as suffix, and from a smaller model where that is more likely to be right",
    )
    model: str | None = option(None, "the smaller model, a name as for --model; it must have the same tokenizer")
    num_speculative_tokens: int = option(8, "maximum number of tokens in a draft", least=1, most=64)
    prompt_lookup_min: int = option(2, "fewest tokens of text that must have occurred before", least=2, most=16)
    prompt_lookup_max: int = option(8, "most tokens of that text, and of a draft after it", least=2, most=64)

    def _check_together(self) -> None:
        if (self.method == "draft_model") != (self.model is not None) or self.model == "":
            raise ConfigError(
                f"model names the model of method draft_model, and of no other: got method {self.method} with model "
                f"{shown(self.model)}"
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min is {self.prompt_lookup_min}, but prompt_lookup_max is {self.prompt_lookup_max}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig(Options):
    """The entries of `kv_events_config`, with vLLM's names; unlike vLLM's, the default endpoint is closed to others."""

    enable_kv_cache_events: bool = option(False, "whether to publish at all", packages=("events", "zmq", "msgspec"))
    publisher: Literal["zmq", "null"] = option("zmq", "zmq: over ZeroMQ; null: not at all")
    endpoint: str = option("tcp://127.0.0.1:5557", "address of the PUB socket")
    replay_endpoint: str | None = option(None, "address of the ROUTER socket that sends batches again")
    buffer_steps: int = option(10_000, "batches kept to be sent again", least=1)
    hwm: int = option(100_000, "messages that may wait for one reader before it misses some", least=1)
    max_queue_size: int = option(100_000, "steps that may wait to be sent", least=1)
    topic: str = option("", "first frame of every message")
    format: Literal["array", "map"] = option("array", "how events are encoded: as vLLM's releases do, or by name")
