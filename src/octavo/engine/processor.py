"""Turns tokens into text and outputs: deltas or whole completions.

Stop strings are found within the step that completes them (`find_stop_strings`), so that no token is computed after
one. All other requests are detokenised by `OutputProcessor`, which does not touch the scheduler or running sequences: a
server runs it on the event loop while the engine's thread is in the next step (`engine/async_engine.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from octavo.engine.outputs import (
    STEP_FAILED,
    CompletionOutput,
    Ended,
    OutputKind,
    RequestOutput,
    RequestTimes,
    StepNews,
)
from octavo.logprobs import TokenLogprobs
from octavo.request import FinishReason, Request, RequestId, Sequence
from octavo.scheduler.plan import SequenceUpdate
from octavo.text.detokenizer import IncrementalDetokenizer
from octavo.text.tokenizer import Tokenizer

FinishSequence = Callable[[Sequence, FinishReason, int | str | None], None]
FailRequest = Callable[[Request, Exception], None]


def read(detokenizer: IncrementalDetokenizer, update: SequenceUpdate, first: int = 0) -> str:
    """Return the text that an update adds, including all text held back if it ends its sequence.

    Args:
        first: number of its tokens that were read before.
    """
    # The token that ended the sequence is not part of its text, unless the request wants it.
    keeps_end = update.seq.request.params.include_stop_str_in_output
    ended_by_token = update.finish_reason is FinishReason.STOP and not keeps_end
    token_ids = update.token_ids[first:] if first else update.token_ids
    text = detokenizer.append(token_ids[:-1] if ended_by_token else token_ids)
    return text if update.finish_reason is None else text + detokenizer.flush()


def watch_stop_strings(request: Request, tokenizer: Tokenizer | None) -> None:
    """Have a request's sequences detokenised by `find_stop_strings`, if it has stop strings and is detokenised."""
    params = request.params
    if params.stop and params.detokenize and tokenizer is not None:
        detokenizer = IncrementalDetokenizer(tokenizer, request.prompt_token_ids, params)
        request.stop_readers = [detokenizer.copy() for _ in request.sequences]


def find_stop_strings(updates: Iterable[SequenceUpdate], finish: FinishSequence, fail: FailRequest) -> None:
    """Read a step's tokens of requests with stop strings, and end the sequences in which one is complete.

    Args:
        fail: called with each request for which this raised, and the exception.
    """
    for update in updates:
        request = update.seq.request
        if request.stop_readers is None or update.seq.finish_reason is FinishReason.ERROR:
            continue
        try:
            _find_stop_string(request.stop_readers[update.seq.index], update, finish)
        except Exception as error:
            fail(request, error)


def _find_stop_string(detokenizer: IncrementalDetokenizer, update: SequenceUpdate, finish: FinishSequence) -> None:
    seq, text = update.seq, ""
    first = len(update.token_ids) - 1 if seq.request.search is None else 0
    if first:
        # A step may give a sampled sequence several tokens, and none must follow a stop string.
        before = detokenizer.num_tokens
        text = detokenizer.append(update.token_ids[:first])
        if detokenizer.stop_string is not None:
            update.cut(detokenizer.num_tokens - before)
    # Nearly all tokens end nothing, and this runs for each of them.
    if update.finish_reason is not None:
        text += read(detokenizer, update, first)
    elif detokenizer.stop_string is None:
        text += detokenizer.append(update.token_ids[first:] if first else update.token_ids)
    update.text = text
    if (found := detokenizer.stop_string) is not None:
        finish(seq, FinishReason.STOP, found)
        # The token that completed the stop string may also have reached the length limit.
        seq.finish_reason, seq.stop_reason = FinishReason.STOP, found
        update.note_end()


@dataclass(slots=True)
class _Completion:
    """One sequence, and its output since the last delta (for FINAL, since the start), whose text is still in pieces."""

    seq: Sequence
    detokenizer: IncrementalDetokenizer | None
    output: CompletionOutput
    text: list[str] = field(default_factory=list)
    delivered_end: bool = False

    def take_in(self, update: SequenceUpdate) -> None:
        output = self.output
        output.token_ids.extend(update.token_ids)
        if output.logprobs is not None:
            output.logprobs.extend(update.logprobs)
        if output.cumulative_logprob is not None:
            output.cumulative_logprob = update.cumulative_logprob
        output.finish_reason, output.stop_reason = update.finish_reason, update.stop_reason
        if update.text is not None:
            self.text.append(update.text)
        elif self.detokenizer is not None:
            self.text.append(read(self.detokenizer, update))

    def take(self, index: int) -> CompletionOutput:
        """Return the output, and begin the next one."""
        output = self.output
        output.index, output.text = index, "".join(self.text)
        self.delivered_end, self.text = output.finish_reason is not None, []
        # Positional arguments are faster, and this runs for each token of each stream.
        logprobs: list[TokenLogprobs] | None = None if output.logprobs is None else []
        self.output = CompletionOutput(index, "", [], output.cumulative_logprob, logprobs)
        return output


@dataclass(slots=True)
class _Tracked:
    """The output state of one request; `num_open` of its completions have not ended."""

    request: Request
    prompt: str | None
    kind: OutputKind
    chooses: bool
    completions: list[_Completion]
    num_open: int
    sent_first: bool = False


class OutputProcessor:
    """Turns each step's news into `RequestOutput`s. Not thread-safe: one thread adds and processes."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._tracked: dict[RequestId, _Tracked] = {}
        self._failed: list[tuple[Request, Exception]] = []

    def add(self, request: Request, prompt: str | None, kind: OutputKind) -> None:
        """Start tracking a request. If its completions are chosen at the end, it has no deltas."""
        params = request.params
        chooses, wants_logprobs = params.chooses, params.logprobs is not None
        kind = OutputKind.FINAL if chooses else kind
        # At its end, a beam search leaves only the `n` sequences to return.
        sequences = request.sequences[: params.n] if params.use_beam_search else request.sequences
        # The end of the prompt is processed once, then copied for all sequences. `find_stop_strings` reads those with
        # stop strings, whose updates have their text.
        detokenizer = None
        if self._tokenizer is not None and params.detokenize and not params.stop:
            detokenizer = IncrementalDetokenizer(self._tokenizer, request.prompt_token_ids, params)
        completions = [
            _Completion(
                seq,
                detokenizer and detokenizer.copy(),
                CompletionOutput(
                    seq.index,
                    cumulative_logprob=0.0 if wants_logprobs or chooses else None,
                    logprobs=[] if wants_logprobs else None,
                ),
            )
            for seq in sequences
        ]
        self._tracked[request.request_id] = _Tracked(request, prompt, kind, chooses, completions, len(completions))

    def process(self, news: StepNews) -> list[RequestOutput]:
        """Return one output per request with news; requests that are not tracked are ignored.

        If making an output raises, the output reports a failure, and `take_failures` returns the exception.
        """
        outputs: list[RequestOutput | None] = []
        touched: dict[RequestId, _Tracked] = {}
        for update in news.updates:
            tracked = self._tracked.get(update.seq.request.request_id)
            if tracked is None:
                continue
            try:
                self._take_in(tracked, update)
            except Exception as error:
                outputs.append(self._fail(tracked, error))
            else:
                touched[tracked.request.request_id] = tracked
        for request_id, tracked in touched.items():
            if request_id not in self._tracked:
                continue  # a later update of it failed
            try:
                outputs.append(self._output(tracked))
            except Exception as error:
                outputs.append(self._fail(tracked, error))
        outputs += [self._end(ended) for ended in news.ended]
        return [output for output in outputs if output is not None]

    def take_failures(self) -> list[tuple[Request, Exception]]:
        """Return the requests whose output could not be made, which the caller must end."""
        failures, self._failed = self._failed, []
        return failures

    def forget(self, request_id: RequestId) -> None:
        """Stop tracking a request; does nothing if it has already ended."""
        self._tracked.pop(request_id, None)

    def _take_in(self, tracked: _Tracked, update: SequenceUpdate) -> None:
        tracked.completions[update.seq.index].take_in(update)
        tracked.num_open -= update.finish_reason is not None

    def _output(self, tracked: _Tracked) -> RequestOutput | None:
        request, finished = tracked.request, not tracked.num_open
        if finished:
            self._tracked.pop(request.request_id, None)
        elif tracked.kind is OutputKind.FINAL:
            return None
        news = []
        for index, completion in enumerate(_best(tracked) if tracked.chooses else tracked.completions):
            pending = completion.output
            if pending.token_ids or (not completion.delivered_end and (finished or pending.finish_reason)):
                news.append(completion.take(index))
        # Positional arguments, as in `take`.
        cached = request.num_cached_tokens or 0
        output = RequestOutput(request.request_id, tracked.prompt, request.prompt_token_ids, news, finished, cached)
        output.cached_by_tier = request.cached_by_tier
        output.num_accepted_tokens = request.num_accepted_tokens
        if not tracked.sent_first:
            tracked.sent_first = True
            if request.params.prompt_logprobs is not None:
                output.prompt_logprobs = [None, *request.prompt_logprobs]
        if finished:
            output.pins = request.pin_receipts
            output.times = _times(request)
            if request.pooled is not None:
                output.embedding = request.pooled.embedding()
            if request.cache_report is not None:
                output.cache_report = request.cache_report.visible_to(request.tenant)
        return output

    def _end(self, ended: Ended) -> RequestOutput | None:
        """Return the last output of a request that ended between two steps; None if it had ended before."""
        tracked = self._tracked.get(ended.request.request_id)
        if tracked is None:
            return None
        if ended.error == STEP_FAILED:
            return self._failed_output(tracked)
        for completion in tracked.completions:
            completion.output.finish_reason = completion.output.finish_reason or completion.seq.finish_reason
        tracked.num_open = 0
        output = self._output(tracked)
        assert output is not None, "it is finished"
        output.error, output.error_reason = ended.error, ended.error_reason
        return output

    def _fail(self, tracked: _Tracked, error: Exception) -> RequestOutput:
        self._failed.append((tracked.request, error))
        return self._failed_output(tracked)

    def _failed_output(self, tracked: _Tracked) -> RequestOutput:
        """Return the output of a failed request, without text, because making it may be what failed."""
        request = tracked.request
        self.forget(request.request_id)
        ended = [CompletionOutput(i, finish_reason=FinishReason.ERROR) for i in range(request.params.n)]
        return RequestOutput(
            request.request_id, tracked.prompt, request.prompt_token_ids, ended, finished=True, error=STEP_FAILED
        )


def _times(request: Request) -> RequestTimes | None:
    admitted, first_token = request.admitted_time, request.first_token_time
    return None if admitted is None or first_token is None else RequestTimes(admitted, first_token)


def _best(tracked: _Tracked) -> list[_Completion]:
    """Return the `n` completions of an ended request, in the order of beam search or by logprob per token."""
    params = tracked.request.params
    if params.use_beam_search:
        return tracked.completions

    def score(completion: _Completion) -> float:
        return (completion.output.cumulative_logprob or 0.0) / max(1, len(completion.output.token_ids))

    return sorted(tracked.completions, key=score, reverse=True)[: params.n]
