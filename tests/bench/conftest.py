import pytest

from tests.bench.fake_server import FakeServer
from tests.commands.conftest import fake_llm, octavo_command

__all__ = ["fake_llm", "octavo_command"]


@pytest.fixture
def server():
    with FakeServer() as running:
        yield running
