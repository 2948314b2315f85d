"""The `octavo` object of a response, which holds fields beyond OpenAI's that the request asked for."""

from __future__ import annotations

from typing import Any

from octavo.engine.inspection import report_fields
from octavo.engine.outputs import RequestOutput


class ResponseExtension:
    """Collects the `octavo` object over all prompts of one response.

    Args:
        tells_ledger: whether to report how the cache was used; the body asked for it.
        tells_pins: whether to report pins; the body asked for prefixes to be pinned.
    """

    def __init__(self, num_prompts: int, *, tells_ledger: bool, tells_pins: bool) -> None:
        self._tells_ledger = tells_ledger
        self._tells_pins = tells_pins
        self._outputs: list[RequestOutput | None] = [None] * num_prompts

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Record an output; only the last one of each prompt is kept."""
        if output.finished:
            self._outputs[prompt_index] = output

    def report(self) -> dict[str, Any]:
        """Return `{"octavo": {…}}`, to be merged into the response; empty if nothing was asked for."""
        told: dict[str, Any] = {}
        if self._tells_ledger:
            told["ledger"] = [
                None
                if output is None or output.cache_report is None
                else {**report_fields(output.cache_report), **_by_tier(output)}
                for output in self._outputs
            ]
        if self._tells_pins:
            told["pins"] = [
                {
                    "id": receipt.pin_id,
                    "requested_tokens": receipt.num_requested_tokens,
                    "pinned_tokens": receipt.num_pinned_tokens,
                    "ttl_seconds": receipt.ttl_seconds,
                }
                for output in self._outputs
                if output is not None
                for receipt in output.pins
            ]
        return {"octavo": told} if told else {}


def _by_tier(output: RequestOutput) -> dict[str, Any]:
    """Return the numbers of cached tokens by tier; empty if all were on the device."""
    return {"cached_by_tier": output.cached_by_tier} if len(output.cached_by_tier) > 1 else {}
