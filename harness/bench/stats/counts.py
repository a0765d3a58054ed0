"""Counts have no noise: kernels, graph nodes, host syncs; any change is red, either way."""

from __future__ import annotations

from collections.abc import Mapping

from harness.errors import UsageError, rejected


def changes(
    expected: Mapping[str, int], obtained: Mapping[str, int]
) -> dict[str, tuple[int | None, int | None]]:
    """(expected, obtained) by name wherever they differ; None where a side has no such count.

    Raises:
        UsageError: a count that is not a whole number of at least 0.
    """
    for side, counts in (("expected", expected), ("obtained", obtained)):
        for name, count in counts.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                accepted = "a whole number of at least 0"
                raise UsageError(rejected(f"{side} {name}", count, accepted))
    names = sorted({*expected, *obtained})
    pairs = {name: (expected.get(name), obtained.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
