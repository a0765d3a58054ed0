"""Errors that specgate raises on purpose, and those of a subject under test.

SpecgateError
├── UsageError              a caller asked for something impossible
│   ├── CheckpointError     a model folder is missing, truncated or of another shape
│   └── GoldenError         a golden is missing, stale, corrupt or orphaned
└── ContractError           a backend, kernel, graph or pool broke its contract
    ├── KernelRefusal       a kernel was handed what it does not accept
    ├── CaptureViolation    something that cannot be recorded happened while recording
    ├── CapacityError       a length, batch or page does not fit where it must go
    └── ServerError         a server answered a valid request with an error, or not at all
        ├── Busy            it would not flush until the deadline
        ├── NotFlushed      it said that it flushed, and its cache was warm
        └── NotReady        it ended, or was not healthy by its deadline
"""

from __future__ import annotations


class SpecgateError(Exception):
    """Base of every error raised on purpose."""


class UsageError(SpecgateError):
    """A caller asked for something impossible."""


class CheckpointError(UsageError):
    """A model folder is missing, truncated or of another shape than its configuration says."""


class GoldenError(UsageError):
    """A golden is missing, stale, corrupt or orphaned."""


class ContractError(SpecgateError):
    """A backend, kernel, graph or pool broke its contract."""


class KernelRefusal(ContractError):
    """A kernel was handed what it does not accept."""


class CaptureViolation(ContractError):
    """Something that cannot be recorded happened while recording."""


class CapacityError(ContractError):
    """A length, batch or page does not fit where it must go."""


class ServerError(ContractError):
    """A server answered a valid request with an error, or not at all.

    Args:
        message: with the address and the answer.
        status: of its answer, None without one.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Busy(ServerError):
    """A server refused to flush, or could not be reached, until the deadline."""


class NotFlushed(ServerError):
    """A server said that it flushed, and its next request found cached tokens."""


class NotReady(ServerError):
    """A server ended, or was not healthy by its deadline; the message shows the end of its log."""


FAILURES = (
    SpecgateError,
    RuntimeError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
)
"""Errors of a broken backend, kernel, graph or engine under test, which its record keeps."""


def rejected(field: str, value: object, accepted: object) -> str:
    """The message on bad input: the field, its value, and what is accepted."""
    return f"{field} = {value!r} is not accepted; accepted: {accepted}"


def missing(error: ModuleNotFoundError, extra: str) -> UsageError:
    """What to raise where a package of an extra is not there."""
    return UsageError(f"{error.name} is not installed; install with: pip install '.[{extra}]'")


def first_line(error: BaseException) -> str:
    """Type and first line of an error, as a record's message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def brief(error: Exception, head: int = 150, tail: int = 350) -> str:
    """Type and message of an error; of a long one the beginning, and the end with the cause."""
    said = f"{type(error).__name__}: {error}"
    return said if len(said) <= head + tail else f"{said[:head]} … {said[-tail:]}"
