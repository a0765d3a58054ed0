"""``python -m harness.serving.guard FD ARGV…``: run a command until the pipe on FD closes.

The launching process holds the pipe's other end. However it ends, kill -9 included, the kernel
closes that end, and the guard stops everything that the command has started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

import psutil

GRACE_S = 5.0
"""What a process that was asked to end may take before it is killed."""


def family(leader: int) -> list[psutil.Process]:
    """The members of the leader's process group and all descendants of the leader."""
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        found = {child.pid: child for child in psutil.Process(leader).children(recursive=True)}
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == leader:
                found[process.pid] = process
    return list(found.values())


def stop(leader: int, grace_s: float = GRACE_S) -> None:
    """End a process group and the leader's descendants: first asked, then killed."""
    alive = family(leader)
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, GRACE_S)):
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        _, alive = psutil.wait_procs(alive, timeout=patience_s)


def main(argv: Sequence[str]) -> int:
    """Exit code of the command; nothing it started outlives it or the pipe."""
    pipe, *command = argv
    process = subprocess.Popen(command, start_new_session=True)

    def watch() -> None:
        os.read(int(pipe), 1)
        stop(process.pid)

    threading.Thread(target=watch, daemon=True).start()
    code = process.wait()
    stop(process.pid, grace_s=0.5)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
