"""Turn tokens into outputs: detokenised text, stop strings, deltas or whole completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from octavo.engine.outputs import CompletionOutput, OutputKind, RequestOutput
from octavo.request import FinishReason, Request, RequestId, Sequence, TokenLogprobs
from octavo.scheduler.plan import SequenceUpdate
from octavo.text.detokenizer import IncrementalDetokenizer
from octavo.text.tokenizer import Tokenizer

FinishSequence = Callable[[Sequence, FinishReason, int | str | None], None]


@dataclass(slots=True)
class _Completion:
    """The pending output of one sequence since the last delta (for FINAL, since the start)."""

    seq: Sequence
    detokenizer: IncrementalDetokenizer | None
    wants_logprobs: bool
    wants_sum: bool
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    delivered_end: bool = False

    def take(self, index: int) -> CompletionOutput:
        """Return the pending output and reset it."""
        seq = self.seq
        # By position: this is done for each token of each stream.
        output = CompletionOutput(
            index,
            "".join(self.text),
            self.token_ids,
            seq.cumulative_logprob if self.wants_sum else None,
            self.logprobs if self.wants_logprobs else None,
            seq.finish_reason,
            seq.stop_reason,
        )
        self.text, self.token_ids = [], []
        if self.wants_logprobs:
            self.logprobs = []
        self.delivered_end = seq.finished
        return output


@dataclass(slots=True)
class _Tracked:
    """The output state of one request."""

    request: Request
    prompt: str | None
    kind: OutputKind
    chooses: bool
    completions: list[_Completion]
    sent_first: bool = False


class OutputProcessor:
    """Turns each step's tokens into `RequestOutput`s; finds stop strings and ends their sequences."""

    def __init__(self, tokenizer: Tokenizer | None, finish: FinishSequence) -> None:
        self._tokenizer = tokenizer
        self._finish = finish
        self._tracked: dict[RequestId, _Tracked] = {}
        self._failed: dict[RequestId, tuple[Request, Exception]] = {}

    def add(self, request: Request, prompt: str | None, kind: OutputKind) -> None:
        """Track a request; one whose completions are chosen at its end has no deltas."""
        chooses, wants_logprobs = request.params.chooses, request.params.logprobs is not None
        kind = OutputKind.FINAL if chooses else kind
        # What a prompt ends in is looked up once for all its sequences.
        detokenizer = self._make_detokenizer(request)
        completions = [
            _Completion(seq, detokenizer and detokenizer.copy(), wants_logprobs, wants_logprobs or chooses)
            for seq in request.sequences
        ]
        self._tracked[request.request_id] = _Tracked(request, prompt, kind, chooses, completions)

    def process(self, updates: Iterable[SequenceUpdate]) -> list[RequestOutput]:
        """Process one step's tokens; returns one output per request with news."""
        touched: dict[RequestId, _Tracked] = {}
        failed = self._failed
        for update in updates:
            request_id = update.seq.request.request_id
            tracked = touched.get(request_id)
            if tracked is None:
                tracked = touched[request_id] = self._tracked[request_id]
            try:
                self._take_in(tracked.completions[update.seq.index], update)
            except Exception as error:
                failed.setdefault(request_id, (tracked.request, error))
        outputs = []
        for request_id, tracked in touched.items():
            if request_id in failed:
                continue
            try:
                output = self._output(tracked)
            except Exception as error:
                failed[request_id] = (tracked.request, error)
                continue
            if output is not None:
                outputs.append(output)
        return outputs

    def take_failures(self) -> list[tuple[Request, Exception]]:
        """Requests whose output could not be made; they are ended by then."""
        failures = list(self._failed.values())
        self._failed.clear()
        for request, _ in failures:
            for seq in request.sequences:
                self._finish(seq, FinishReason.ERROR, None)
        return failures

    def fail(self, request: Request, error: str) -> RequestOutput:
        """The last output of a request that has ended with an error: without text, whose making may have failed."""
        tracked = self._tracked.pop(request.request_id, None)
        ended = [CompletionOutput(i, finish_reason=FinishReason.ERROR) for i in range(request.params.n)]
        prompt = None if tracked is None else tracked.prompt
        return RequestOutput(request.request_id, prompt, request.prompt_token_ids, ended, finished=True, error=error)

    def end(self, request: Request) -> RequestOutput | None:
        """The last output of an aborted request, or None if it has already ended."""
        tracked = self._tracked.get(request.request_id)
        return self._output(tracked) if tracked is not None else None

    def forget(self, request_id: RequestId) -> None:
        """Stop tracking a request; does nothing if it has already ended."""
        self._tracked.pop(request_id, None)

    def _make_detokenizer(self, request: Request) -> IncrementalDetokenizer | None:
        if self._tokenizer is None or not request.params.detokenize:
            return None
        return IncrementalDetokenizer(self._tokenizer, request.prompt_token_ids, request.params)

    def _take_in(self, completion: _Completion, update: SequenceUpdate) -> None:
        seq = completion.seq
        completion.token_ids.extend(update.token_ids)
        if completion.wants_logprobs:
            completion.logprobs.extend(update.logprobs)
        detokenizer = completion.detokenizer
        if detokenizer is None:
            return
        # The token that ended the sequence is not part of its text.
        if token_ids := update.token_ids[:-1] if seq.finish_reason is FinishReason.STOP else update.token_ids:
            completion.text.append(detokenizer.append(token_ids))
            if detokenizer.stop_string is not None:
                if seq.finished:
                    # It ran into its length limit with the very token that completed the stop string.
                    seq.finish_reason, seq.stop_reason = FinishReason.STOP, detokenizer.stop_string
                else:
                    self._finish(seq, FinishReason.STOP, detokenizer.stop_string)
                return
        if seq.finished:
            completion.text.append(detokenizer.flush())

    def _output(self, tracked: _Tracked) -> RequestOutput | None:
        request = tracked.request
        finished = request.finished
        if finished:
            self._tracked.pop(request.request_id, None)
        elif tracked.kind is OutputKind.FINAL:
            return None
        news = []
        for index, completion in enumerate(_best(tracked) if tracked.chooses else tracked.completions):
            if finished or completion.token_ids or (completion.seq.finished and not completion.delivered_end):
                news.append(completion.take(index))
        # By position, as in `take`.
        output = RequestOutput(
            request.request_id,
            tracked.prompt,
            request.prompt_token_ids,
            news,
            finished,
            request.num_cached_tokens or 0,
        )
        if not tracked.sent_first:
            tracked.sent_first = True
            if request.params.prompt_logprobs is not None:
                output.prompt_logprobs = [None, *request.prompt_logprobs]
        if finished:
            output.pins = request.pin_receipts
            if request.cache_report is not None:
                output.cache_report = request.cache_report.as_told_to(request.tenant)
        return output


def _best(tracked: _Tracked) -> list[_Completion]:
    """The `n` to return of a request that has ended: as a beam search left them, else by logprob per token."""
    params = tracked.request.params
    if params.use_beam_search:
        return tracked.completions[: params.n]

    def score(completion: _Completion) -> float:
        return completion.seq.cumulative_logprob / max(1, completion.seq.num_output_tokens)

    return sorted(tracked.completions, key=score, reverse=True)[: params.n]
