"""Free ports for servers that are about to start."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

FIRST = 10_000
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Ports that Linux gives to sockets without one, such as those of outgoing connections."""
_TAKEN: set[int] = set()


def free_port() -> int:
    """A port without a listener that this process was not given before.

    It lies below those of outgoing connections, where the kernel says which those are: one of them
    could be taken before the server listens.
    """
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", _draw()))
            port = int(probe.getsockname()[1])
            if port not in _TAKEN:
                _TAKEN.add(port)
                return port


def _draw() -> int:
    """A random port below the ephemeral ones; 0, the kernel's choice, where there are none."""
    try:
        end = int(EPHEMERAL.read_text(encoding="ascii").split()[0])
    except OSError:
        return 0
    return random.SystemRandom().randrange(FIRST, end) if end > 2 * FIRST else 0
