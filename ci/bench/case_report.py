"""Report of one case: a finding with the names and numbers that the outputs show."""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.bench.analysis import Finding
from harness.bench.console import change, e_value, interval
from harness.bench.session_records import Role, Session, Workload
from harness.bench.stats.bench_verdict import BenchVerdict
from harness.bench.stats.design import Block
from harness.bench.stats.margin import Bounds
from harness.bench.stats.multiple_testing import Control
from harness.bench.stats.sequential_test import Evidence
from harness.bench.wording import percent

CONTROLS = {Role.SAME: Control.AA, Role.INJECTED: Control.INJECTED}


def relative(cost: float, higher_is_better: bool) -> float:
    """A cost in log units as the relative change of its metric, in the metric's own direction."""
    return math.expm1(-cost if higher_is_better else cost)


def number(value: float) -> str:
    """Six digits; infinities as XML Schema and OpenMetrics write them."""
    return f"{value:.6g}" if math.isfinite(value) else "-Inf" if value < 0 else "+Inf"


@dataclass(frozen=True)
class CaseReport:
    """One finding with its names and its numbers."""

    finding: Finding
    seconds: float

    @property
    def session(self) -> Session:
        """Its plan."""
        return self.finding.session

    @property
    def workload(self) -> Workload:
        """The requests of a pass."""
        return self.finding.workload

    @property
    def metric(self) -> str:
        """Name of its margin."""
        return self.finding.metric

    @property
    def evidence(self) -> Evidence:
        """Of its blocks."""
        return self.finding.evidence

    @property
    def verdict(self) -> BenchVerdict:
        """Of its evidence."""
        return self.evidence.verdict

    @property
    def bounds(self) -> Bounds:
        """Its margins."""
        return self.finding.case.bounds

    @property
    def blocks(self) -> tuple[Block, ...]:
        """In the order they ran."""
        return self.finding.blocks

    @property
    def higher_is_better(self) -> bool:
        """Whether more of the metric is an improvement."""
        return self.finding.case.higher_is_better

    @property
    def unit(self) -> str:
        """Of the metric."""
        return self.finding.case.unit

    @property
    def metric_and_direction(self) -> str:
        """The metric, marked where more of it is better."""
        return f"{self.metric} ↑" if self.higher_is_better else self.metric

    @property
    def case(self) -> str:
        """Its name, the same in every run."""
        return f"{self.workload.id}/{self.metric}"

    @property
    def label(self) -> str:
        """Its name among several sessions."""
        usual = self.session.id == Role.CANDIDATE
        return self.case if usual else f"{self.session.id}: {self.case}"

    @property
    def sku(self) -> str:
        """Name of the device it ran on."""
        return self.session.environment.device

    @property
    def is_control(self) -> bool:
        """Whether its verdict was known."""
        return self.finding.role in CONTROLS

    @property
    def is_red(self) -> bool:
        """Whether a gate fails on it; also on an improved A/A case, never on an injected slowdown.

        An injected slowdown need not show in every metric; the verdict of the run asks for one.
        """
        if self.finding.role is Role.INJECTED:
            return self.verdict is BenchVerdict.INVALID
        if self.finding.role is Role.SAME:
            return self.verdict not in CONTROLS[Role.SAME].accepted
        return self.verdict.is_red

    @property
    def is_valid(self) -> bool:
        """Whether its measurement is valid."""
        return self.verdict is not BenchVerdict.INVALID

    @property
    def cost(self) -> float:
        """Ln of B / A, positive is worse."""
        return self.finding.case.margin.cost(self.evidence.ratio)

    @property
    def interval(self) -> tuple[float, float]:
        """Bounds of ``cost``, infinite where nothing was shown."""
        sign = -1.0 if self.finding.case.higher_is_better else 1.0
        ends = [sign * _log(bound) for bound in (self.evidence.low, self.evidence.high)]
        return min(ends), max(ends)

    @property
    def detectable(self) -> float | None:
        """Least detectable slowdown as a ratio of costs."""
        return None if self.finding.mde is None else math.exp(self.finding.mde)

    @property
    def numbers(self) -> dict[str, float]:
        """Measured and planned numbers, by name."""
        e = self.evidence
        known = {
            "e_regressed": e.e_regressed, "e_equivalence": e.e_equivalence,
            "e_improved": e.e_improved,
            "blocks": e.blocks, "dropped": e.dropped,
            "delta0": self.bounds.delta0, "delta1": self.bounds.delta1,
        }  # fmt: skip
        if e.blocks:
            known |= {"ratio": e.ratio, "low": e.low, "high": e.high, "cost": self.cost}
        return known if self.finding.mde is None else known | {"mde": self.finding.mde}

    @property
    def title(self) -> str:
        """A few words."""
        return f"{self.verdict} {self.case}"

    @property
    def sentence(self) -> str:
        """The finding in one line."""
        e = self.evidence
        found = f"{self.case}: {self.verdict}, B / A {change(e)}"
        found += f" ({interval(e)}), e = {e_value(e)}"
        found += f" after {e.blocks} blocks, MDE {percent(self.detectable)}"
        return "; ".join((found, *self.finding.reasons))


def _log(ratio: float) -> float:
    return math.log(ratio) if ratio > 0.0 else -math.inf
