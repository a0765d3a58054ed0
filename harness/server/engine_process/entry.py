"""Where the engine's process begins; torch is imported there and nowhere else."""

from __future__ import annotations

import signal
import sys
from multiprocessing.connection import Connection

from harness.errors import SpecgateError
from harness.server.engine_process.messages import Options


def run(pipe: Connection, options: Options) -> None:
    """Serve commands until the pipe closes; end with 2 where the options make no engine."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The HTTP process decides when to end.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    from harness.server.engine_process.loop import EngineLoop

    try:
        worker = EngineLoop(pipe, options)
    except SpecgateError as error:
        print(f"specgate serve: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    worker.serve()
