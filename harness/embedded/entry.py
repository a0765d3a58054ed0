"""Where the engine's process begins; torch is imported there and nowhere else."""

from __future__ import annotations

import signal
from multiprocessing.connection import Connection

from harness.embedded.messages import Options


def run(pipe: Connection, options: Options) -> None:
    """Serve commands until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The HTTP process decides when to end.
    from harness.embedded.worker import Worker

    Worker(pipe, options).serve()
