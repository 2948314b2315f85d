"""Turns prompts into requests: tokenised, checked, hashed, and with their grammar compiled."""

from __future__ import annotations

import hashlib
import itertools
import random
import re
import time
from array import array
from collections.abc import Sequence as Seq
from dataclasses import replace

from octavo.config import EngineConfig
from octavo.engine.inspection import EngineInfo
from octavo.errors import ContextLengthError, FieldError, RequestError
from octavo.grammar.compiler import GrammarCompiler
from octavo.kv_budget import KVBudget, choose_budget
from octavo.pooling import PooledStates
from octavo.request import DEFAULT_CONTEXT, GAP, Request, RequestContext, RequestId
from octavo.sampling_params import SamplingParams, check_limits
from octavo.scheduler.scheduler import Scheduler
from octavo.structured_outputs import json_outline
from octavo.text.bad_words import bad_word_token_ids
from octavo.text.prompt_checks import check_text_length, check_token_ids, packed_token_ids
from octavo.text.tokenizer import Tokenizer

Prompt = str | Seq[int]

# A word that begins with a digit or a capital letter, and some of what follows it in its line.
_NAME = re.compile(r'(?<![^\s("])(?=([^\W_a-z].{0,47}))')
_MOST_SEARCHED, _MOST_QUOTED, _QUOTED_TOKENS = 4096, 128, 12  # tokens of a prompt; words in it; tokens from each

# The scheduler computes a prompt only to sample after it; the sampled token is not used.
_EMBEDDING = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)


class InputProcessor:
    """Makes the requests of one engine, on any thread: it changes no state except that of its seeds.

    Args:
        eos_token_ids: ids that end every request that does not ignore them.
        grammars: compiles structured outputs; if None, they are not supported.
    """

    def __init__(
        self,
        config: EngineConfig,
        info: EngineInfo,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        grammars: GrammarCompiler | None,
    ) -> None:
        self.config = config
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.info = info
        self.vocab_size = info.vocab_size
        self.max_model_len = scheduler.config.max_model_len
        self.eos_token_ids = eos_token_ids
        self.grammars = grammars
        self._ids = itertools.count()
        self._seeds = random.SystemRandom() if config.seed is None else random.Random(config.seed)

    def make(
        self,
        prompt: Prompt,
        params: SamplingParams,
        context: RequestContext = DEFAULT_CONTEXT,
        *,
        add_special_tokens: bool = True,
    ) -> Request:
        """Tokenise and validate a request, and compile its grammar.

        If `context` asks for an embedding, `params` is ignored.

        Raises:
            RequestError: the prompt is empty, has ids outside the vocabulary, or is text for a model without a
                tokenizer; or a parameter is out of range.
            ContextLengthError, CapacityError: the request could never be served; the message has the numbers.
        """
        request = self.make_without_grammar(prompt, params, context, add_special_tokens=add_special_tokens)
        if (wanted := request.params.structured_outputs) is not None:
            assert self.grammars is not None  # or it would have been refused
            request.grammar = self.grammars.compile(wanted)
        return request

    def make_without_grammar(
        self, prompt: Prompt, params: SamplingParams, context: RequestContext, *, add_special_tokens: bool = True
    ) -> Request:
        """Do all that `make` does, except compiling the grammar, which is left to the caller."""
        if context.pooling is not None:
            params = _EMBEDDING
        self.config.limits.check_context(context.priority, context.cache_salt)
        bad_word_ids = self._check_params(params)
        budget = choose_budget(
            params.kv_budget,
            self.config.budget,
            block_size=self.scheduler.kv.spec.block_size,
            longest=self.info.context_length or self.max_model_len,
            refusal=self.info.budget_refusal,
            measures_refusal=self.info.measures_refusal,
        )
        params = params if budget == params.kv_budget else replace(params, kv_budget=budget)
        token_ids = self._tokenize(prompt, add_special_tokens)
        if params.max_tokens is None:
            params = params.with_max_tokens(self._longest_output(len(token_ids), context.tenant, budget))
        pooled = None if context.pooling is None else PooledStates(context.pooling, len(token_ids))
        salt = context.cache_salt.encode(errors="surrogatepass")
        request = Request(
            request_id=RequestId(context.request_id or f"req-{next(self._ids)}"),
            prompt_token_ids=token_ids,
            params=params,
            eos_token_ids=self.eos_token_ids,
            arrival_time=time.monotonic(),
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            bad_word_ids=bad_word_ids,
            pooled=pooled,
            priority=context.priority,
            # Of a fixed length, because every cached block of its requests refers to it.
            cache_salt=hashlib.blake2b(salt, digest_size=16).hexdigest() if salt else "",
            tenant=context.tenant,
            cache_group=context.cache_group,
            weight=context.weight,
            traceparent=context.traceparent,
            pins=tuple(sorted(context.pins, key=lambda pin: pin.num_tokens)),
            predicted_ids=context.predicted_ids or self._outline(params),
            quoted_ids=self._quoted(params, token_ids),
            kv_hint=context.kv_hint,
        )
        self.scheduler.tenants.check(request)
        # Done here to keep it out of the engine's thread.
        self.scheduler.kv.holdings.hash_prompt(request)
        return request

    def _outline(self, params: SamplingParams) -> tuple[int, ...]:
        """Return the tokens of the output that a JSON Schema determines, if drafts may be made from it.

        Drafts begin with what is on one line, and go on with what is indented where the output is.
        """
        wanted = params.structured_outputs
        if self.scheduler.speculator is None or self.tokenizer is None or wanted is None:
            return ()
        if not isinstance(schema := wanted.json, str) or wanted.reasoning is not None:
            return ()
        outline: list[int] = []
        compact = wanted.disable_any_whitespace
        for indent in (None,) if compact else (None, 2, 4):
            for piece in json_outline(schema, indent=indent, compact=compact):
                outline += self.tokenizer.encode(piece, add_special_tokens=False)
                outline.append(GAP)
        return tuple(outline[: self.max_model_len])

    def _quoted(self, params: SamplingParams, prompt_ids: Seq[int]) -> tuple[int, ...]:
        """Return the first tokens of a prompt's names and numbers as JSON strings, if drafts may be made from them.

        A tokenizer may split a word differently after a quotation mark than after a space.
        """
        wanted = params.structured_outputs
        if self.scheduler.speculator is None or self.tokenizer is None or wanted is None or wanted.json is None:
            return ()
        quoted: list[int] = []
        text = self.tokenizer.decode(prompt_ids[-_MOST_SEARCHED:])
        for word in itertools.islice(_NAME.finditer(text), _MOST_QUOTED):
            piece = (':"' if wanted.disable_any_whitespace else ' "') + word[1]
            quoted += [*self.tokenizer.encode(piece, add_special_tokens=False)[:_QUOTED_TOKENS], GAP]
        return tuple(quoted)

    def _check_params(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Refuse parameters that are out of range or contradict each other; returns the token ids of the bad words."""
        check_limits(params, self.config.limits)
        self.config.limits.check_structured_outputs(params.structured_outputs)
        if params.structured_outputs is not None and self.grammars is None:
            raise FieldError("structured_outputs", "are not served by this engine")
        check_token_ids(params.stop_token_ids, self.vocab_size, "stop_token_ids")
        check_token_ids(params.logit_bias or (), self.vocab_size, "logit_bias")
        check_token_ids(params.allowed_token_ids or (), self.vocab_size, "allowed_token_ids")
        bad_word_ids = self._bad_word_ids(params.bad_words)
        self._check_choice(params, bad_word_ids)
        if params.use_beam_search and params.num_sequences > self.vocab_size:
            raise FieldError(
                params.width_param,
                f"must be at most {self.vocab_size}, the vocabulary's tokens, with use_beam_search, "
                f"got {params.num_sequences}",
            )
        return bad_word_ids

    def _check_choice(self, params: SamplingParams, bad_word_ids: Seq[Seq[int]]) -> None:
        """Refuse parameters that leave no token to draw."""
        ends = self.eos_token_ids.union(params.stop_token_ids) if params.min_tokens else frozenset()
        never = ends.union(ids[0] for ids in bad_word_ids if len(ids) == 1)
        if (allowed := params.allowed_token_ids) is not None:
            if never.issuperset(allowed):
                raise RequestError(
                    f"none of the {len(allowed)} allowed_token_ids could be drawn: bad_words, or min_tokens where they "
                    "end the output, rule them all out",
                    param="allowed_token_ids",
                )
        elif len(never) >= self.vocab_size and never.issuperset(range(self.vocab_size)):
            raise RequestError(
                f"none of the {self.vocab_size} tokens of the vocabulary could be drawn: bad_words of one token, or "
                f"stop_token_ids and the model's end-of-sequence before min_tokens ({params.min_tokens}), rule them "
                "all out",
                param="stop_token_ids" if ends else "bad_words",
            )

    def _bad_word_ids(self, words: Seq[str]) -> tuple[tuple[int, ...], ...]:
        if not words:
            return ()
        if self.tokenizer is None:
            raise RequestError("bad_words need a tokenizer, but this model has none", param="bad_words")
        found = bad_word_token_ids(self.tokenizer, words)
        self.config.limits.check_bad_word_tokens(max(map(len, found), default=0))
        return found

    def _longest_output(self, num_prompt_tokens: int, tenant: str, budget: KVBudget | None) -> int:
        """Return the most output tokens that the model's length, the cache and the tenant's cap allow."""
        if num_prompt_tokens >= self.max_model_len:
            raise ContextLengthError(
                f"this model's maximum context length is {self.max_model_len} tokens, "
                f"but the prompt alone has {num_prompt_tokens}",
                param="prompt",
            )
        # If the prompt fills the cache, one token makes `TenantLimits.check` refuse it, with the numbers.
        longest = self.scheduler.tenants.max_sequence_tokens(tenant, budget, num_prompt_tokens)
        return max(1, longest - num_prompt_tokens)

    def _tokenize(self, prompt: Prompt, add_special_tokens: bool) -> array[int]:
        if isinstance(prompt, str):
            tokenizer = self.require_tokenizer()
            check_text_length(prompt, self.max_model_len, tokenizer.max_token_bytes)
            prompt = tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        token_ids = packed_token_ids(prompt, self.vocab_size, "prompt")
        if not token_ids:
            raise FieldError("prompt", "must not be empty")
        return token_ids

    def require_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer; raises `RequestError` if there is none."""
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer: pass token ids as the prompt", param="prompt")
        return self.tokenizer
