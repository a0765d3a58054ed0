"""``python -m ci.cluster.guarded ARGS...``: run ``python ARGS`` while standard input stays open.

Whoever holds the other end may be killed at any moment: its end of the pipe closes then, and this
process ends the command and everything that the command started in its group.
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
    process = subprocess.Popen(
        [sys.executable, *argv], stdin=subprocess.DEVNULL, start_new_session=True
    )

    def end() -> None:
        sys.stdin.read()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    threading.Thread(target=end, daemon=True).start()
    code = process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    # A thread reads standard input still: the interpreter must not wait for it.
    os._exit(main(sys.argv[1:]))
