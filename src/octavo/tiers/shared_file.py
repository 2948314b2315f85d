"""Host memory that the processes of the engine and the runner share."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

from octavo.errors import ConfigError


class SharedFile:
    """An anonymous file in memory, shared with processes that are spawned with it as an argument.

    It is freed when no process has it open or mapped any more, however the processes end.
    """

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError(
                "kv_disk and kv_remote with executor 'process' need memory that two processes share, which Linux has "
                "(memfd_create): use executor 'in_process'"
            )
        self.fd = os.memfd_create("octavo-host-memory")

    def close(self) -> None:
        """Close the file in this process; its mappings stay valid. May be called again."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __reduce__(self) -> tuple[Callable[[Any], SharedFile], tuple[Any]]:
        # A descriptor can only be passed to a process while it is being spawned.
        return _received, (reduction.DupFd(self.fd),)


def _received(descriptor: Any) -> SharedFile:
    file = SharedFile.__new__(SharedFile)
    file.fd = descriptor.detach()
    return file
