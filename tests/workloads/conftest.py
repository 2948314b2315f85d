from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.commands.conftest import fake_llm, octavo_command
from tests.workloads.fake_server import FakeServer

__all__ = ["fake_llm", "octavo_command"]


@pytest.fixture
def server() -> Iterator[Any]:
    with FakeServer() as running:
        yield running
