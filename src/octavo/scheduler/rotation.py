"""Rotation among running streams, for steps with fewer tokens than streams."""

from __future__ import annotations

from octavo.request import Sequence


class StreamRotation:
    """Serves the least recently served streams first; all prompts together take turns like one stream.

    So with s streams and a limit of t tokens per step, each stream gets a token at least every ceil((s + 1) / t) steps.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._last_of_prompts = 0

    def choose(self, streams: list[Sequence], have_prompts: bool, num_tokens: int) -> tuple[list[Sequence], int]:
        """Choose the streams that get a token in a step of `num_tokens`, in their given order.

        Returns:
            The chosen streams, and the number of tokens left for prompts.
        """
        self._turn += 1
        by_turn = sorted(streams, key=lambda seq: seq.state.last_served)
        for_prompts = 0
        if have_prompts and (
            len(by_turn) < num_tokens or self._last_of_prompts <= by_turn[num_tokens - 1].state.last_served
        ):
            for_prompts = max(1, num_tokens // 8)
            self._last_of_prompts = self._turn
        chosen = set(by_turn[: num_tokens - for_prompts])
        for seq in chosen:
            seq.state.last_served = self._turn
        return [seq for seq in streams if seq in chosen], for_prompts
