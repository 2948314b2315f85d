from __future__ import annotations

from collections.abc import Iterator

import pytest

from octavo import kernels
from tests.levels import LEVELS


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction-set level in turn, forced."""
    before = kernels.isa()
    kernels.force_isa(request.param)
    yield request.param
    kernels.force_isa(before)
