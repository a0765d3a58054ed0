"""Everything specgate raises on purpose.

SpecgateError
├── UsageError              a caller asked for something impossible
│   ├── CheckpointError     a model folder is missing, truncated or of another shape
│   └── GoldenError         a golden is missing, stale, corrupt or orphaned
└── ContractError           a backend, kernel, graph or pool broke its contract
    ├── KernelRefusal       a kernel was handed what it does not accept
    ├── CaptureViolation    something that cannot be recorded happened while recording
    └── CapacityError       a length, batch or page does not fit where it must go
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


def rejected(field: str, value: object, accepted: object) -> str:
    """The one wording of bad input: which field, which value, what would have been accepted."""
    return f"{field} = {value!r} is not accepted; accepted: {accepted}"
