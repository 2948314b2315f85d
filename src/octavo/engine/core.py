"""The engine: requests in, one step at a time, outputs out. Single-threaded; who drives it owns it."""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Sequence as Seq
from typing import Any

from octavo.config import EngineConfig
from octavo.engine.inspection import PinInfo, kv_report, list_pins
from octavo.engine.outputs import OutputKind, RequestOutput
from octavo.engine.processor import OutputProcessor
from octavo.engine.recorder import StatsRecorder
from octavo.errors import ContextLengthError, LogitsError, RequestError
from octavo.observe.stats import EngineStats
from octavo.request import DEFAULT_CONTEXT, FinishReason, Request, RequestContext, RequestId, Sequence
from octavo.runner.runner import ModelRunner
from octavo.sampling_params import SamplingParams
from octavo.scheduler.scheduler import Scheduler
from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Prompt = str | Seq[int]


class EngineCore:
    """One model, its cache, its scheduler.

    Args:
        eos_token_ids: ids that end every request which does not ignore them.
        max_model_len: longest prompt + output, in tokens.
    """

    def __init__(
        self,
        *,
        config: EngineConfig,
        scheduler: Scheduler,
        runner: ModelRunner,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.config = config
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = scheduler.config.max_model_len
        self.stats = EngineStats(max_model_len=self.max_model_len)
        self._recorder = StatsRecorder(self.stats, scheduler)
        self._eos_token_ids = eos_token_ids
        self._processor = OutputProcessor(tokenizer, self._finish_sequence)
        self._ids = itertools.count()
        self._seeds = random.Random(config.seed)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def make_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        context: RequestContext = DEFAULT_CONTEXT,
        *,
        add_special_tokens: bool = True,
    ) -> Request:
        """Tokenise and validate; touches no engine state but the seed, so any thread may call it.

        Raises:
            RequestError: empty prompt, ids outside the vocabulary, text without a tokenizer.
            ContextLengthError, CapacityError: it could never be served; the message has the numbers.
        """
        if isinstance(context.priority, bool) or not isinstance(context.priority, int):
            raise RequestError(f"priority must be an integer, got {context.priority!r}", param="priority")
        if not isinstance(context.cache_salt, str):
            raise RequestError(f"cache_salt must be a string, got {context.cache_salt!r}", param="cache_salt")
        token_ids = self._tokenize(prompt, add_special_tokens)
        self._check_vocabulary(token_ids, params)
        if params.use_beam_search and params.num_sequences > self.vocab_size:
            raise RequestError(
                f"{params.num_sequences} beams cannot differ in a vocabulary of {self.vocab_size} tokens",
                param=params.width_param,
            )
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = self._longest_output(len(token_ids))
            params = params.with_max_tokens(max_tokens)
        self.scheduler.check(len(token_ids), max_tokens, params.num_sequences, params.width_param)
        return Request(
            request_id=RequestId(context.request_id or f"req-{next(self._ids)}"),
            prompt_token_ids=token_ids,
            params=params,
            eos_token_ids=self._eos_token_ids,
            arrival_time=time.monotonic(),
            priority=context.priority,
            tenant=context.tenant,
            cache_salt=context.cache_salt,
            cache_group=context.cache_group,
            pins=tuple(sorted(context.pins, key=lambda pin: pin.num_tokens)),
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
        )

    def add(self, request: Request, *, prompt: str | None = None, kind: OutputKind = OutputKind.FINAL) -> None:
        """Queue a request that `make_request` made."""
        self.scheduler.add(request)
        self._processor.add(request, prompt, kind)

    def abort(self, request_id: RequestId) -> RequestOutput | None:
        """End a request and free its blocks at once; returns its last output, None where it is over already."""
        return self._end(request_id, FinishReason.ABORT)

    def step(self) -> list[RequestOutput]:
        """Compute one step; returns what is new, one output per request concerned."""
        plan = self.scheduler.schedule()
        if not plan:
            return []
        self._recorder.on_planned()
        try:
            result = self.runner.execute(plan)
        except LogitsError as error:
            return self._end_faulty(error)
        updates = self.scheduler.update(plan, result)
        outputs = self._processor.process(updates)
        self._recorder.on_step(updates)
        return outputs

    def kv_report(self) -> dict[str, Any]:
        """Who holds which bytes of the cache, and how much it helped, ready for JSON: see `engine.inspection`.

        The statistics say the same from then on: looking lets go of expired pins.
        """
        report = kv_report(self.scheduler)
        self._recorder.on_changed()
        return report

    def pins(self) -> list[PinInfo]:
        """Every pin, the soonest to expire first."""
        found = list_pins(self.scheduler.kv)
        self._recorder.on_changed()
        return found

    def unpin(self, pin_id: str) -> bool:
        """Remove a pin before it expires; False if there is none with that id."""
        found = self.scheduler.kv.pins.unpin(pin_id)
        self._recorder.on_changed()
        return found

    def reset_prefix_cache(self) -> int:
        """Evict every cached block that is not pinned; returns how many."""
        count = self.scheduler.kv.reset_prefix_cache()
        self._recorder.on_changed()
        return count

    def close(self) -> None:
        """Abort all that is queued or running."""
        for request_id in self.scheduler.request_ids:
            self.abort(request_id)

    def _end_faulty(self, error: LogitsError) -> list[RequestOutput]:
        """End the requests whose logits cannot be sampled; the step is computed anew for all others."""
        logger.error("%s", error)
        self.scheduler.abandon_step()
        outputs = (self._end(RequestId(name), FinishReason.ERROR) for name in error.request_ids)
        return [output for output in outputs if output is not None]

    def _finish_sequence(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None) -> None:
        self.scheduler.finish(seq, reason, stop_reason)

    def _end(self, request_id: RequestId, reason: FinishReason) -> RequestOutput | None:
        request = self.scheduler.end_request(request_id, reason)
        if request is None:
            # A step that was interrupted may have ended it without telling anyone.
            self._processor.forget(request_id)
            return None
        self._recorder.on_ended(request, reason)
        return self._processor.end(request)

    def _longest_output(self, num_prompt_tokens: int) -> int:
        """Output tokens that fit beside a prompt: as many as both the model's length and the KV cache allow."""
        if num_prompt_tokens >= self.max_model_len:
            raise ContextLengthError(
                f"this model's maximum context length is {self.max_model_len} tokens, "
                f"but the prompt alone has {num_prompt_tokens}",
                param="prompt",
            )
        # A prompt that fills the cache is refused by the scheduler's check for one output token, with its numbers.
        return max(1, self.scheduler.max_sequence_tokens - num_prompt_tokens)

    def _tokenize(self, prompt: Prompt, add_special_tokens: bool) -> list[int]:
        if not isinstance(prompt, str):
            token_ids = list(prompt)
        elif self.tokenizer is None:
            raise RequestError("this model has no tokenizer: pass token ids as the prompt", param="prompt")
        else:
            token_ids = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        if not token_ids:
            raise RequestError("the prompt is empty: it must hold at least one token", param="prompt")
        return token_ids

    def _check_vocabulary(self, token_ids: list[int], params: SamplingParams) -> None:
        named = {"prompt": token_ids, "stop_token_ids": params.stop_token_ids, "logit_bias": params.logit_bias or ()}
        for param, ids in named.items():
            for token_id in ids:
                if isinstance(token_id, bool) or not isinstance(token_id, int):
                    raise RequestError(f"{param} must hold token ids, got {token_id!r}", param=param)
                if not 0 <= token_id < self.vocab_size:
                    raise RequestError(
                        f"token id {token_id} in {param} is outside the vocabulary of {self.vocab_size} tokens",
                        param=param,
                    )
