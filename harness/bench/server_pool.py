"""Servers as a benchmark sees them, waited for and stopped side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from itertools import chain
from typing import Protocol

STRAGGLER, GRACE_S = 2.5, 5.0
"""How much longer than the first of an arm's servers the others may take to be well."""


class Server(Protocol):
    """What is measured: started, ready, stopped."""

    patience_s: float
    """From its start until it must be well."""

    @property
    def url(self) -> str:
        """Where it answers."""

    @property
    def pid(self) -> int | None:
        """Of its first process, None of one that was not started here."""

    def wait_ready(self) -> float:
        """Seconds until it was well."""

    def stop(self) -> None:
        """End it."""


Started = defaultdict[str, list[Server]]
"""Servers by what they were started by."""


def wait_together(started: Started) -> None:
    """Wait until all are well or given up: a hung one must not cost a wave its own long deadline.

    Who is given up says so in its trials, and to whoever waits for it again.
    """
    with _side_by_side(started) as threads:
        try:
            waiting = {
                threads.submit(server.wait_ready): alike
                for alike in started.values()
                for server in alike
            }
            for done in as_completed(waiting):
                if not done.exception():
                    _lower_patience(waiting[done], STRAGGLER * done.result() + GRACE_S)
        except BaseException:
            for alike in started.values():
                _lower_patience(alike, 0.0)
            raise


def _lower_patience(servers: Sequence[Server], patience_s: float) -> None:
    for server in servers:
        server.patience_s = min(server.patience_s, patience_s)


@contextmanager
def stopped_together() -> Iterator[Started]:
    """Servers that are put into it are stopped in the end, side by side."""
    started: Started = defaultdict(list)
    try:
        yield started
    finally:
        with _side_by_side(started) as threads:
            servers = chain.from_iterable(started.values())
            for stopping in [threads.submit(server.stop) for server in servers]:
                stopping.result()


def _side_by_side(started: Started) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, sum(map(len, started.values()))))
