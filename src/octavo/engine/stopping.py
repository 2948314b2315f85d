"""Finds stop strings in the step that completes them, so that no token is computed after one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from octavo.request import FinishReason, Request, RequestId, Sequence
from octavo.scheduler.plan import SequenceUpdate
from octavo.text.detokenizer import IncrementalDetokenizer
from octavo.text.tokenizer import Tokenizer

FinishSequence = Callable[[Sequence, FinishReason, int | str | None], None]


def read(detokenizer: IncrementalDetokenizer, update: SequenceUpdate) -> str:
    """Return the text that an update adds, including all text held back if it ends its sequence."""
    # The token that ended the sequence is not part of its text, unless the request wants it.
    keeps_end = update.seq.request.params.include_stop_str_in_output
    ended_by_token = update.finish_reason is FinishReason.STOP and not keeps_end
    text = detokenizer.append(update.token_ids[:-1] if ended_by_token else update.token_ids)
    return text if update.finish_reason is None else text + detokenizer.flush()


class StopStrings:
    """Detokenises the sequences of requests with stop strings, and ends them.

    All other requests are detokenised while the next step is already being computed (`engine/processor.py`).
    """

    def __init__(self, tokenizer: Tokenizer | None, finish: FinishSequence) -> None:
        self._tokenizer = tokenizer
        self._finish = finish
        self._detokenizers: dict[RequestId, list[IncrementalDetokenizer]] = {}

    def add(self, request: Request) -> None:
        """Watch a request, if it has stop strings and is detokenised."""
        params = request.params
        if params.stop and params.detokenize and (tokenizer := self._tokenizer) is not None:
            detokenizer = IncrementalDetokenizer(tokenizer, request.prompt_token_ids, params)
            self._detokenizers[request.request_id] = [detokenizer.copy() for _ in request.sequences]

    def forget(self, request_id: RequestId) -> None:
        """Stop watching a request that has ended."""
        self._detokenizers.pop(request_id, None)

    def find(self, updates: Iterable[SequenceUpdate]) -> list[tuple[Request, Exception]]:
        """Read a step's tokens and end the sequences in which a stop string is complete.

        Returns:
            The requests for which this raised, with the exceptions; all their sequences have been ended.
        """
        failed: dict[RequestId, tuple[Request, Exception]] = {}
        if not self._detokenizers:
            return []
        for update in updates:
            request = update.seq.request
            detokenizers = self._detokenizers.get(request.request_id)
            if detokenizers is not None and request.request_id not in failed:
                try:
                    self._take_in(detokenizers[update.seq.index], update)
                except Exception as error:
                    failed[request.request_id] = (request, error)
        for request, _ in failed.values():
            for seq in request.sequences:
                self._finish(seq, FinishReason.ERROR, None)
        return list(failed.values())

    def _take_in(self, detokenizer: IncrementalDetokenizer, update: SequenceUpdate) -> None:
        seq = update.seq
        # Nearly all tokens end nothing, and this runs for each of them.
        ends = update.finish_reason is not None
        update.text = read(detokenizer, update) if ends else detokenizer.append(update.token_ids)
        if (found := detokenizer.stop_string) is not None:
            self._finish(seq, FinishReason.STOP, found)
            # The token that completed the stop string may also have reached the length limit.
            seq.finish_reason, seq.stop_reason = FinishReason.STOP, found
            update.note_end()
        if update.finish_reason is not None and seq.request.finished:
            self.forget(seq.request.request_id)
