"""``python -m harness.server.launch.guard GRACE ARGV…``: run a command until standard input closes.

The launching process holds the other end of that pipe. However it ends, kill -9 included, the
kernel closes it, and the guard ends everything that the command has started: by SIGTERM, and by
SIGKILL what is left GRACE seconds later.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

import psutil

NOT_STARTED = 127
PR_SET_CHILD_SUBREAPER = 36


def command(grace_s: float, argv: Sequence[str]) -> list[str]:
    """The words that run a command under a guard, from any folder."""
    return [sys.executable, "-P", __file__, str(grace_s), *argv]


def main(argv: Sequence[str]) -> int:
    """Exit code of the command, as in a shell; no process that it started outlives this one."""
    grace_s, *words = argv
    # Orphans become children of the guard instead of init, so that they are found.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        running = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(f"cannot start {words[0]}: {error}", file=sys.stderr)
        return NOT_STARTED
    try:
        ended = os.pidfd_open(running.pid)
        select.select([sys.stdin, ended], [], [])
        code = running.poll() or 0
    finally:
        stop(float(grace_s))
    return code if code >= 0 else 128 - code


def stop(grace_s: float) -> None:
    """End all descendants of this process: by SIGTERM, then by SIGKILL until none is left."""
    guard = psutil.Process()
    number, patience_s = signal.SIGTERM, grace_s
    while alive := guard.children(recursive=True):
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        psutil.wait_procs(alive, timeout=patience_s)
        number, patience_s = signal.SIGKILL, 1.0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
