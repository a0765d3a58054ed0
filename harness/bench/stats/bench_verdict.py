"""The verdicts of a benchmark on one metric of one workload."""

from __future__ import annotations

from enum import StrEnum


class BenchVerdict(StrEnum):
    """The six verdicts; none of them is "passed because a retry passed"."""

    REGRESSED = "regressed"
    """The evidence against "at most delta0 slower" reached its threshold."""
    OK = "ok"
    """The evidence against "at least delta1 slower" reached its threshold."""
    IMPROVED = "improved"
    """The evidence against "at most delta0 faster" reached its threshold."""
    INCONCLUSIVE = "inconclusive"
    """The blocks ran out, or are still running, and nothing was shown."""
    BLIND = "blind"
    """Nothing was shown to be worse, but what must be found would not have been seen either."""
    INVALID = "invalid"
    """The measurement cannot be believed, whatever it says."""

    @property
    def is_red(self) -> bool:
        """Whether a gate must fail on it: shown worse, or not measured."""
        return self in (BenchVerdict.REGRESSED, BenchVerdict.BLIND, BenchVerdict.INVALID)
