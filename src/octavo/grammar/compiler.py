"""Compiles grammars for one tokenizer with llguidance, each once.

    begin ──> [cache: tenant, description -> future] ──> CompiledGrammar ──> GrammarState, one per sequence
                          └─ worker thread: on trial in another process, then here

A tenant's grammars are not found by other tenants, which could infer from the time whether another uses the same.

llguidance is imported with the first grammar.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import cached_property
from typing import Any

from octavo.errors import OverloadedError, RequestError
from octavo.grammar.bounded_matcher import compile_grammar, first_error
from octavo.grammar.source import may_force_long_runs, to_lark, without_forcing
from octavo.grammar.trial import MEMORY, NICENESS, TrialFailedError, start_one, try_compiling
from octavo.structured_outputs import StructuredOutputsParams
from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Limits of the cache, in compiled grammars and in bytes of their descriptions.
_KEPT, _KEPT_BYTES = 256, 1 << 20
_SHOWN_REASON = 300
PATIENCE = 30.0
"""Seconds that a grammar waits for others to be compiled, and for the first process to start."""

NUM_SHARED_THREADS = 2
"""Number of grammars compiled at a time; one more thread is reserved for tenants without any (`GrammarQueue`)."""

# How long others have the interpreter's lock while a vocabulary is read: long enough to answer a request.
_TURN_SECONDS = 0.02

# Letters that are rare in names and keywords: a grammar that allows all of them is taken to allow free text.
_PROBES = ("z", "q")


class Vocabulary:
    """The vocabulary that grammars are compiled for.

    Attributes:
        tokenizer: llguidance's tokenizer.
        eos_token_id: the token that ends an output that cannot continue.
        eos_token_ids: all tokens that may end an output.
        probes: tokens that are all allowed in free text, as lists of one token; empty if a letter has no token.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.eos_token_id: int = tokenizer.eos_token
        self.eos_token_ids: frozenset[int] = frozenset(tokenizer.eos_tokens)
        probes = [tokenizer.greedy_tokenize(letter) for letter in _PROBES]
        are_tokens = [tokenizer.decode_bytes(probe[:1]) for probe in probes] == [letter.encode() for letter in _PROBES]
        self.probes: tuple[list[int], ...] = tuple(probes) if are_tokens else ()
        self._spellings: dict[int, bytes] = {}

    def spelling(self, token_id: int) -> bytes:
        """Return a token's bytes; padding beyond the vocabulary has none."""
        known = self._spellings.get(token_id)
        if known is None:
            known = self._spellings[token_id] = bytes(self.tokenizer.decode_bytes([token_id]))
        return known


class CompiledGrammar:
    """A grammar in its initial state.

    Attributes:
        matcher: llguidance's matcher, which is never advanced: every sequence begins with a copy.
        vocabulary: the model's vocabulary.
        has_json: whether parts of it are JSON, whose numbers are kept short (`sampling/masks.py`).
    """

    def __init__(self, lark: str, vocabulary: Vocabulary) -> None:
        self._lark = lark
        self.vocabulary = vocabulary
        self.has_json = "%json" in lark
        self.matcher = compile_grammar(lark, vocabulary.tokenizer)

    @cached_property
    def without_forcing(self) -> Any:
        """The matcher of the grammar without forcing, for outputs whose forced tokens have no end."""
        return compile_grammar(without_forcing(self._lark), self.vocabulary.tokenizer)


class GrammarCompiler:
    """Compiles grammars for one model. Thread-safe.

    Args:
        load_tokenizer: called with the first grammar; returns None if the model has no tokenizer.
        vocab_size: number of the model's logits.
        eos_token_ids: tokens that end an output, in addition to the tokenizer's own.
        max_ms: processor time that compiling one grammar may take, in milliseconds; another process tries it first.
    """

    def __init__(
        self,
        load_tokenizer: Callable[[], Tokenizer | None],
        vocab_size: int,
        eos_token_ids: frozenset[int],
        max_ms: int,
    ) -> None:
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._max_ms = max_ms
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._read: Vocabulary | None = None
        self._compiled: OrderedDict[tuple[str, StructuredOutputsParams], Future[CompiledGrammar]] = OrderedDict()
        # All compiled grammars in use, including those that have been dropped from the cache.
        self._used: weakref.WeakValueDictionary[StructuredOutputsParams, CompiledGrammar] = (
            weakref.WeakValueDictionary()
        )
        self._threads = ThreadPoolExecutor(NUM_SHARED_THREADS + 1, "octavo-grammar", _give_way)

    def close(self) -> None:
        """Let each thread end once its grammar is compiled."""
        self._threads.shutdown(wait=False)

    def prepare(self) -> Future[None]:
        """Start the process that tries grammars, and let llguidance read the vocabulary in a thread of its own.

        Otherwise the first grammar would wait for both. llguidance holds the interpreter's lock twice, with 262,144
        tokens for about a second each, in which no request is computed, so a server does it when it is first idle.
        Compiling does not hold the lock.
        """
        start_one()
        # Not one of the threads that give way: on a busy machine it would hold the lock ten times as long.
        thread = ThreadPoolExecutor(1, "octavo-vocabulary")
        try:
            return thread.submit(self._prepare_vocabulary)
        finally:
            thread.shutdown(wait=False)

    def _prepare_vocabulary(self) -> None:
        try:
            self._vocabulary  # noqa: B018  read once
        except RequestError as error:
            logger.info("no structured outputs: %s", error)  # requests that need one are refused with this reason

    def compile(self, wanted: StructuredOutputsParams) -> CompiledGrammar:
        """Compile a grammar, and wait for it.

        Raises:
            RequestError: the grammar cannot be compiled, nothing satisfies it, compiling takes too long or too much
                memory, or the model has no tokenizer.
            OverloadedError: too many grammars before it take long.
        """
        patience = PATIENCE + self._max_ms / 1e3
        try:
            return self.begin(wanted).result(patience)
        except FutureTimeoutError:
            raise OverloadedError(
                f"structured_outputs.{wanted.kind} was not compiled within {patience:g} s: the machine is busy, "
                "or other grammars came first; try again later"
            ) from None

    def begin(self, wanted: StructuredOutputsParams, tenant: str = "") -> Future[CompiledGrammar]:
        """Start compiling a grammar, unless it is cached for this tenant, or is being compiled for it."""
        with self._lock:
            key = (tenant, wanted)
            future = self._compiled.pop(key, None)
            if future is None:
                future = self._threads.submit(self._compile, wanted, tenant)
            self._compiled[key] = future
            self._make_room()
            return future

    def known(self, wanted: StructuredOutputsParams, tenant: str) -> CompiledGrammar | None:
        """Return a grammar that is cached for this tenant; None if there is none, or it is not compiled yet.

        Raises:
            RequestError: it is known that the grammar cannot be compiled.
        """
        with self._lock:
            future = self._compiled.get((tenant, wanted))
        return self.begin(wanted, tenant).result() if future is not None and future.done() else None

    def in_use(self, wanted: StructuredOutputsParams) -> Future[CompiledGrammar]:
        """Return the grammar that a request holds, or start compiling it if none does."""
        with self._lock:
            used = self._used.get(wanted)
        if used is None:
            return self.begin(wanted)
        future: Future[CompiledGrammar] = Future()
        future.set_result(used)
        return future

    def _make_room(self) -> None:
        total = sum(wanted.num_bytes for _, wanted in self._compiled) if len(self._compiled) > 1 else 0
        while len(self._compiled) > 1 and (len(self._compiled) > _KEPT or total > _KEPT_BYTES):
            (_, oldest), _ = self._compiled.popitem(last=False)
            total -= oldest.num_bytes

    def _compile(self, wanted: StructuredOutputsParams, tenant: str) -> CompiledGrammar:
        lark = to_lark(wanted)
        if may_force_long_runs(wanted):
            lark = without_forcing(lark)
        self._try(wanted, lark, tenant)
        compiled = CompiledGrammar(lark, self._vocabulary)
        error = first_error(compiled.matcher, self._vocabulary.eos_token_ids)
        if error and not compiled.matcher.is_error():
            error = first_error(compiled.without_forcing, self._vocabulary.eos_token_ids)
        if error:
            raise RequestError(_reason(wanted, error), param="structured_outputs")
        with self._lock:
            # One for all requests that use it, so that it is found for as long as any of them does.
            return self._used.setdefault(wanted, compiled)

    def _try(self, wanted: StructuredOutputsParams, lark: str, tenant: str) -> None:
        try:
            try_compiling(lark, self._max_ms / 1e3)
        except (TrialFailedError, OSError) as failed:
            # Not remembered: it may succeed when the machine is less busy, or has more memory.
            with self._lock:
                self._compiled.pop((tenant, wanted), None)
            if not isinstance(failed, TrialFailedError):
                raise
            most = f"{self._max_ms} ms, the most allowed (--limits max_grammar_ms)"
            if not failed.too_slow:
                most = f"{MEMORY >> 20} MiB of memory"
            raise RequestError(
                f"compiling structured_outputs.{wanted.kind} takes more than {most}", param="structured_outputs"
            ) from None

    @property
    def _vocabulary(self) -> Vocabulary:
        # Not a `cached_property`, which has no lock from Python 3.12 on: each thread would read it for seconds.
        with self._reading:
            if self._read is None:
                self._read = self._read_vocabulary()
            return self._read

    def _read_vocabulary(self) -> Vocabulary:
        from llguidance import LLTokenizer, TokenizerWrapper

        tokenizer = self._load_tokenizer()
        if tokenizer is None:
            raise RequestError("structured output needs a tokenizer: this model has none", param="structured_outputs")
        eos_token_ids = sorted(
            (self._eos_token_ids | tokenizer.eos_token_ids) & frozenset(range(self._vocab_size)),
            key=lambda token_id: (token_id not in tokenizer.eos_token_ids, token_id),
        )
        if not eos_token_ids:
            raise RequestError(
                "this model has no end-of-sequence token: its output cannot be structured", param="structured_outputs"
            )
        spellings = _Spellings(tokenizer, self._vocab_size, eos_token_ids[0])
        try:
            source = TokenizerWrapper(spellings) if spellings.are_faithful else tokenizer.to_json()
            # In two calls, because each holds the interpreter's lock: other threads have it for a moment between them.
            plain = LLTokenizer(source, n_vocab=self._vocab_size, eos_token=eos_token_ids, slices=[])
            time.sleep(_TURN_SECONDS)
            return Vocabulary(plain.with_slices(LLTokenizer.general_slices()))
        except Exception as error:  # llguidance raises ValueError, and any exception of its parsers
            raise RequestError(
                f"structured output is not available with this model's tokenizer: {error}", param="structured_outputs"
            ) from error
        finally:
            spellings.tokens.clear()  # llguidance has copied them


class _Spellings:
    """The tokens' bytes and the tokenizer's `encode`, under the names that llguidance expects.

    From tokenizer.json, llguidance would build a second tokenizer: with 262,144 tokens in twice the time, and 270 MB
    larger.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self.eos_token_id, self.bos_token_id = eos_token_id, tokenizer.bos_token_id
        self.special_token_ids = sorted(token_id for token_id in tokenizer.special_ids if token_id < vocab_size)
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self._encode = tokenizer.encode

    @property
    def are_faithful(self) -> bool:
        """Whether tokens spell exactly the text that they encode; some tokenizers put a space before it."""
        return b"".join(self.tokens[token_id] for token_id in self("a")) == b"a"

    def __call__(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False)


def _give_way() -> None:
    """Lower the priority of this thread below that of the engine's (Linux only)."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _reason(wanted: StructuredOutputsParams, error: str) -> str:
    """Return the part of llguidance's message that is useful to the author of the grammar."""
    if error.startswith("NoExtension"):
        return f"nothing satisfies structured_outputs.{wanted.kind}"
    said = error.split("\n<state>")[0].strip()
    if wanted.kind == "json":
        # Drop the position, which refers to llguidance's own text and not to the schema.
        said = said.split("\n")[0].split("failed to compile JSON schema: ")[-1]
    said = said if len(said) <= _SHOWN_REASON else said[: _SHOWN_REASON - 1] + "…"
    hint = ""
    if wanted.kind == "json" and wanted.strict and ("Unimplemented" in said or "oneOf" in said):
        hint = " (send strict: false to ignore keywords that cannot be enforced)"
    return f"structured_outputs.{wanted.kind} cannot be compiled: {said}{hint}"
