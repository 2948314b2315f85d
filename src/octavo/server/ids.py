"""Ids of requests and responses."""

from __future__ import annotations

import uuid


def new_id(prefix: str) -> str:
    """Return a unique id: 'cmpl' -> 'cmpl-4f1c…'."""
    return f"{prefix}-{uuid.uuid4().hex}"
