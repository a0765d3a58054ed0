"""A command that is given the time to put things in order where it is ended. Needs Python alone."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
TOLD_S = 30.0
"""More than tox gives its command to end (tox.ini)."""


def carried_out(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Exit code of a command, begun in the checkout.

    Raises:
        KeyboardInterrupt: this process was interrupted, or told to end; the command has ended.
    """
    with subprocess.Popen(command, cwd=CHECKOUT, env=environment) as process:
        try:
            with _told_to_end(process):
                return process.wait()
        except KeyboardInterrupt:
            # A terminal has told all of them. Who told this process alone is answered as well.
            with suppress(subprocess.TimeoutExpired):
                process.wait(TOLD_S)
            process.send_signal(signal.SIGINT)
            process.wait()
            raise


@contextmanager
def _told_to_end(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Inside, SIGTERM is an interrupt, and the process, which nobody else tells, has one at once.

    Schedulers and ``timeout`` end a job so. The tool that runs a lane would end and leave the lane.
    """

    def interrupt(*_: object) -> None:
        process.send_signal(signal.SIGINT)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
