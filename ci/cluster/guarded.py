"""``python -m ci.cluster.guarded ARGS...``: run ``python ARGS`` while standard input stays open.

Whoever holds the other end may be killed at any moment: its end of the pipe closes then, and the
command ends with everything that it started in its group. A worker of Ray that ends kills its own
children first, so a child of this process keeps watch, in a session of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress


def main(argv: Sequence[str]) -> int:
    """Exit code of the command; of one that a signal ended 128 and its number."""
    pid = os.fork()
    if pid:
        return _code(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os.setsid()
    # A thread reads standard input still: the interpreter must not wait for it.
    os._exit(_watch(argv))


def _watch(argv: Sequence[str]) -> int:
    process = subprocess.Popen(
        [sys.executable, *argv], stdin=subprocess.DEVNULL, start_new_session=True
    )

    def end() -> None:
        sys.stdin.read()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    threading.Thread(target=end, daemon=True).start()
    return _code(process.wait())


def _code(ended: int) -> int:
    return ended if ended >= 0 else 128 - ended


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
