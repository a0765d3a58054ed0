"""Servers of a benchmark: waited for and stopped side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from itertools import chain
from typing import Protocol

STRAGGLER, GRACE_S = 2.5, 5.0
"""How much longer than the first server of an arm the others may take to be ready."""


class Server(Protocol):
    """A server that is measured: started, ready, stopped."""

    patience_s: float
    """From its start until it must be ready."""

    @property
    def url(self) -> str:
        """Where it answers."""

    @property
    def pid(self) -> int | None:
        """Of its first process, None of one that was not started here."""

    @property
    def alive(self) -> bool:
        """Whether that runs."""

    def wait_ready(self) -> float:
        """Seconds until it was ready."""

    def stop(self) -> None:
        """End it."""


Started = defaultdict[str, list[Server]]
"""Servers by the arm that started them."""


def wait_together(started: Started) -> None:
    """Wait until every server is ready or given up: one that hangs must not cost its long deadline.

    A server that is given up raises again in ``wait_ready``, so that its trials are invalid.
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
    """A collection whose servers are stopped side by side in the end."""
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
