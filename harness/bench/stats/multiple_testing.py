"""Multiple testing: e-BH over the cases of a run, and its positive and negative controls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum

from harness.bench.stats.bench_verdict import BenchVerdict
from harness.bench.stats.margin import checked
from harness.bench.stats.sequential_test import Evidence
from harness.bench.stats.stopping import Thresholds
from harness.errors import UsageError, rejected

ALPHA, CONTROL_ALPHA = 0.05, 0.01


def family_thresholds(cases: int) -> Thresholds:
    """Thresholds of a session of so many cases: those at which e-BH rejects a single one."""
    return Thresholds(reject_null=max(checked("cases", cases) / ALPHA, Thresholds().reject_null))


def control_thresholds(cases: int) -> Thresholds:
    """Thresholds of an A/A session of so many cases: one false alarm invalidates the whole run.

    The probability that any case is REGRESSED or IMPROVED by chance is at most ``CONTROL_ALPHA``.
    """
    directions = 2
    return Thresholds(reject_null=directions * checked("cases", cases) / CONTROL_ALPHA)


def e_bh(e_values: Mapping[str, float], q: float = ALPHA) -> frozenset[str]:
    """The cases rejected by e-BH: false ones at most a part ``q``, under any dependence.

    The k largest are rejected, for the largest k at which the k-th is at least K / (q k).

    Raises:
        UsageError: an e-value that is NaN or negative.
    """
    for name, e in e_values.items():
        if not e >= 0.0:
            raise UsageError(rejected(f"e-value of {name}", e, "a number of at least 0"))
    ranked = sorted(e_values, key=lambda name: -e_values[name])
    needed = len(ranked) / q
    passing = [k for k, name in enumerate(ranked, 1) if k * e_values[name] >= needed]
    return frozenset(ranked[: max(passing, default=0)])


def apply_e_bh(table: Mapping[str, Evidence]) -> dict[str, Evidence]:
    """REGRESSED and IMPROVED decided by e-BH; an INVALID case counts in K, with an e-value of 0."""
    valid = {name for name, found in table.items() if found.verdict is not BenchVerdict.INVALID}
    worse = e_bh({n: found.e_regressed if n in valid else 0.0 for n, found in table.items()})
    better = e_bh({n: found.e_improved if n in valid else 0.0 for n, found in table.items()})

    def judged(name: str, found: Evidence) -> Evidence:
        if name in worse:
            return replace(found, verdict=BenchVerdict.REGRESSED)
        if name in better:
            return replace(found, verdict=BenchVerdict.IMPROVED)
        alone = found.verdict in (BenchVerdict.REGRESSED, BenchVerdict.IMPROVED)
        return replace(found, verdict=BenchVerdict.INCONCLUSIVE) if alone else found

    return {name: judged(name, found) if name in valid else found for name, found in table.items()}


class Control(StrEnum):
    """A session whose verdict is known."""

    AA = "A/A"
    INJECTED = "injected slowdown"

    @property
    def accepted(self) -> tuple[BenchVerdict, ...]:
        """Verdicts under which the run is valid."""
        unchanged = (BenchVerdict.OK, BenchVerdict.INCONCLUSIVE)
        return unchanged if self is Control.AA else (BenchVerdict.REGRESSED,)


def apply_controls(
    table: Mapping[str, Evidence], controls: Mapping[Control, Evidence]
) -> dict[str, Evidence]:
    """The table as it is, or all of it INVALID where a control is missing or failed.

    A reason that a row has already, from the controls of another workload, is not told again.
    """
    reasons = [why for control in Control if (why := _failed(control, controls.get(control)))]
    if not reasons:
        return dict(table)
    return {
        name: replace(
            found,
            verdict=BenchVerdict.INVALID,
            reasons=tuple(dict.fromkeys((*reasons, *found.reasons))),
        )
        for name, found in table.items()
    }


def _failed(control: Control, found: Evidence | None) -> str | None:
    """Why the run is invalid; None where this control has an accepted verdict."""
    if found and found.verdict in control.accepted:
        return None
    expected = " or ".join(control.accepted)
    said = f"control {control}: {found.verdict if found else 'missing'} instead of {expected}"
    if found and found.verdict is BenchVerdict.INVALID and found.reasons:
        said += f" ({found.reasons[0].splitlines()[0]})"
    return said
