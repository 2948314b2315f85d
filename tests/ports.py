"""Ports for programs that cannot be asked to take any free one."""

from __future__ import annotations

import random
import socket

# Below those that Linux gives to outgoing connections and to whoever asks for any: nobody gets it in the meantime.
_FIRST, _LAST = 10_000, 32_000


def free_port() -> int:
    """Return a port of the loopback interface on which nobody listens."""
    while True:
        port = random.SystemRandom().randrange(_FIRST, _LAST)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
