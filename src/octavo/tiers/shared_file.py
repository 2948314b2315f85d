"""Host memory that the engine's process shares with the runner's."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

from octavo.errors import ConfigError


class SharedFile:
    """A file in memory alone, without a name: a process that is spawned with it among its arguments has it too.

    It is gone when no process has it open or mapped, however they end.
    """

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError(
                "kv_disk and kv_remote with executor 'process' need memory that two processes share, which Linux has "
                "(memfd_create): use executor 'in_process'"
            )
        self.fd = os.memfd_create("octavo-host-memory")

    def close(self) -> None:
        """Close it here; what is mapped stays. May be called again."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __reduce__(self) -> tuple[Callable[[Any], SharedFile], tuple[Any]]:
        # Only while a process is spawned can a descriptor be handed to it.
        return _received, (reduction.DupFd(self.fd),)


def _received(descriptor: Any) -> SharedFile:
    file = SharedFile.__new__(SharedFile)
    file.fd = descriptor.detach()
    return file
