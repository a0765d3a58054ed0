"""A command that is given the time to put things in order where it is ended. Needs Python alone."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from harness.core.signals import hear_sigint, heard_as_interrupt

CHECKOUT = Path(__file__).resolve().parents[1]
TOLD_S = 30.0
"""More than tox gives its command to end (tox.ini)."""


def carried_out(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Exit code of a command, begun in the checkout.

    Raises:
        KeyboardInterrupt: this process was interrupted, or told to end; the command has ended.
    """
    lane = subprocess.Popen(command, cwd=CHECKOUT, env=environment, preexec_fn=hear_sigint)
    with lane as process:

        def tell() -> None:
            process.send_signal(signal.SIGINT)

        try:
            # By SIGTERM this process is told alone; tox, told so, would end and leave its lane.
            with heard_as_interrupt(signal.SIGTERM, tell):
                return process.wait()
        except KeyboardInterrupt:
            # A terminal has told all of them. Who told this process alone is answered as well.
            with suppress(subprocess.TimeoutExpired):
                process.wait(TOLD_S)
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
