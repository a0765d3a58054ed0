"""Entry point of the engine process, the only one of the two that imports torch."""

from __future__ import annotations

import signal
import sys
from multiprocessing.connection import Connection

from harness.core.collector import importing
from harness.errors import SpecgateError
from harness.server.engine_process.messages import EngineOptions


def run(pipe: Connection, options: EngineOptions) -> None:
    """Serve commands until the pipe closes; end with 2 where the options make no engine."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The HTTP process decides when to end.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with importing():
        from harness.server.engine_process.loop import EngineLoop
    try:
        loop = EngineLoop(pipe, options)
    except SpecgateError as error:
        print(f"specgate serve: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    loop.serve()
