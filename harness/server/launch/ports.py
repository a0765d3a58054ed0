"""Ports for servers that listen some seconds later."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

FIRST = 10_000
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""What Linux gives to whoever names no port, every outgoing connection among them."""
_GIVEN: set[int] = set()


def free_port() -> int:
    """A port that nobody listens on at the moment, and that this process was not given before.

    It lies below those that outgoing connections take, where the kernel says which those are: one
    of them would be gone by the time that one server of many listens.
    """
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", _drawn()))
            port = int(probe.getsockname()[1])
            if port not in _GIVEN:
                _GIVEN.add(port)
                return port


def _drawn() -> int:
    """One of ours; 0, the kernel's choice, where there are none."""
    try:
        end = int(EPHEMERAL.read_text(encoding="ascii").split()[0])
    except OSError:
        return 0
    return random.SystemRandom().randrange(FIRST, end) if end > 2 * FIRST else 0
