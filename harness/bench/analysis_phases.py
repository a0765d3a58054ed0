"""The phase that moved a step: differences of the arms in microseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.bench.stats.design import Block
from harness.bench.stats.estimates import hodges_lehmann
from harness.bench.stats.margin import PART

MICROSECONDS = {"us": 1.0, "ms": 1e3}


def moved(blocks: Sequence[Block], unit: str) -> float:
    """B - A in microseconds, the Hodges–Lehmann estimate over the valid blocks; 0 without one.

    Args:
        blocks: of a time.
        unit: of their values, "us" or "ms".
    """
    differences = [block.arm("B") - block.arm("A") for block in blocks if not block.invalid]
    return MICROSECONDS[unit] * hodges_lehmann(differences) if differences else 0.0


def largest(step: float, phases: Mapping[str, float]) -> str:
    """The phase that moved furthest where the step did; empty where none moved that way.

    Args:
        step: microseconds by which a step moved.
        phases: the same by metric of a phase.

    Returns:
        Such as "draft extend +13.0 µs of +14.1 µs".
    """
    along = {metric: us for metric, us in phases.items() if us * step > 0.0}
    if not along:
        return ""
    metric = max(along, key=lambda name: abs(along[name]))
    name = metric.removeprefix(PART).replace("_", " ")
    return f"{name} {along[metric]:+.1f} µs of {step:+.1f} µs"
