"""Attention over block tables: the contract, and the backends that fulfil it."""

from __future__ import annotations

import torch

from octavo.attention.base import AttentionBackend
from octavo.errors import ConfigError

BACKENDS = ("auto", "reference")


def make_backend(name: str, device: torch.device | str) -> AttentionBackend:
    """The backend called `name`; "auto" is the fastest that runs on `device`.

    Raises:
        ConfigError: no such backend.
    """
    from octavo.attention.reference import ReferenceAttention

    if name in ("auto", "reference"):
        return ReferenceAttention()
    raise ConfigError(f"attention_backend must be one of {', '.join(map(repr, BACKENDS))}, got {name!r}")
