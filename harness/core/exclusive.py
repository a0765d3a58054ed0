"""A folder that one run at a time writes to."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.errors import UsageError


@contextmanager
def alone_in(folder: Path, refused: str) -> Iterator[None]:
    """Hold a folder, in which nothing is left; a process that dies holds it no longer.

    Args:
        folder: that exists.
        refused: what to say where another run holds it.

    Raises:
        UsageError: another run does.
    """
    opened = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(refused) from error
        yield
    finally:
        os.close(opened)
