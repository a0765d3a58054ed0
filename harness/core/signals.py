"""Signals that are heard, and wait until nothing can lose them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a command that Ctrl-C ended, as shells tell it."""


def ending(code: int) -> str:
    """How a process with an exit code of ``subprocess`` ended: "SIGKILL", "exit code 3"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal
        return f"signal {-code}"


@contextmanager
def held(number: signal.Signals) -> Iterator[None]:
    """Deliver a signal after the ``with`` that comes inside it.

    Compiled code that calls back into Python, as pydantic's does and as imports of others do, drops
    the exception of a handler, so that a Ctrl-C would be lost there.
    """
    came: list[int] = []
    before = signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(number, before)
    if came:
        signal.raise_signal(number)


@contextmanager
def heard_as_interrupt(
    number: signal.Signals, first: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Inside, a signal does what Ctrl-C does. Schedulers end a job by SIGTERM at its time limit.

    Args:
        number: of the signal.
        first: done before that, for what Ctrl-C of a terminal would tell others.
    """

    def interrupt(*_: object) -> None:
        first()
        raise KeyboardInterrupt

    before = signal.signal(number, interrupt)
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_DFL if before is None else before)


def hear_sigint() -> None:
    """For ``preexec_fn``: in a shell's background Ctrl-C is ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
