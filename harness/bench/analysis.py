"""Findings of a benchmark: one per metric, workload and session, and the verdict of the run."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from harness.bench.analysis_blocks import blocks_of, complete, split
from harness.bench.analysis_phases import largest, moved
from harness.bench.session_records import CasePlan, Line, Role, Session, Trial, Workload
from harness.bench.stats.bench_verdict import BenchVerdict
from harness.bench.stats.design import Block
from harness.bench.stats.estimates import STEP, detectable
from harness.bench.stats.multiple_testing import Control, apply_controls, apply_e_bh
from harness.bench.stats.sequential_test import Evidence, SequentialPlan, judge
from harness.bench.stats.validity import changed_counts
from harness.bench.wording import size

SLOWED = ("step_time", "tpot")
"""Metrics in which a slowdown of a server's steps shows; one of them suffices."""
WHOLE = "step_time"
"""The metric that phases are parts of."""
LEAST_AA_BLOCKS = 3
"""Fewest A/A blocks from which noise is estimated."""
NUMBER = re.compile(r"\d+(?:\.\d+)?")
WORST_FIRST = (
    BenchVerdict.INVALID,
    BenchVerdict.REGRESSED,
    BenchVerdict.BLIND,
    BenchVerdict.INCONCLUSIVE,
    BenchVerdict.IMPROVED,
    BenchVerdict.OK,
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The evidence on one metric of one workload in one session.

    Args:
        session, workload: the plan and its row.
        metric: name of the margin's row.
        case: its plan: bounds, unit, direction.
        evidence: the verdict and the numbers it rests on.
        blocks: the blocks it was judged from, invalid ones too.
        mde: least slowdown that the A/A noise of this run shows in 9 sessions of 10, log units;
            None without an A/A session of at least three valid blocks.
        role: the session's.
        reasons: why blocks were dropped, or why it is invalid.
    """

    session: Session
    workload: Workload
    metric: str
    case: CasePlan
    evidence: Evidence
    blocks: tuple[Block, ...]
    mde: float | None
    role: Role
    reasons: tuple[str, ...]

    @property
    def id(self) -> str:
        """Unique over the findings of a file."""
        return f"{self.session.id}/{self.workload.id}/{self.metric}"

    @property
    def verdict(self) -> BenchVerdict:
        """Of its evidence."""
        return self.evidence.verdict

    @property
    def is_part(self) -> bool:
        """See ``Margin.is_part``."""
        return self.case.margin.is_part

    @property
    def effects(self) -> list[float]:
        """Cost effects of its valid blocks, log units, positive is worse."""
        sign = -1.0 if self.case.higher_is_better else 1.0
        return [sign * block.effect for block in self.blocks if not block.invalid]

    @property
    def is_gated(self) -> bool:
        """Whether the verdict of the run rests on it."""
        return self.role is Role.CANDIDATE and not self.is_part

    @property
    def has_moved(self) -> bool:
        """Whether it was shown to be worse or better."""
        return self.verdict in (BenchVerdict.REGRESSED, BenchVerdict.IMPROVED)

    def with_evidence(self, evidence: Evidence) -> Finding:
        """The same with other evidence and its reasons."""
        return replace(self, evidence=evidence, reasons=evidence.reasons)


@dataclass(frozen=True, kw_only=True)
class RunVerdict:
    """Findings judged together.

    Args:
        findings: in the order they came; candidates after e-BH and the controls.
        reasons: why the run is invalid; empty where it is valid.
    """

    findings: tuple[Finding, ...]
    reasons: tuple[str, ...]

    @property
    def verdict(self) -> BenchVerdict:
        """The worst of the candidates', parts left out; INVALID where the run is invalid."""
        verdicts = {found.verdict for found in self.findings if found.is_gated}
        worst = next(
            (verdict for verdict in WORST_FIRST if verdict in verdicts), BenchVerdict.INVALID
        )
        return BenchVerdict.INVALID if self.reasons else worst


def findings(lines: Iterable[Line], *, detectable_too: bool = True) -> list[Finding]:
    """Judge every case of every session, in the order of the plans.

    Args:
        lines: of one file.
        detectable_too: whether ``mde`` is computed, which costs more than all the rest.

    Raises:
        UsageError: a trial of a session that has no plan, or two plans of one id.
        ContractError: blocks are missing or not in the drawn order.
    """
    sessions, trials = split(lines)
    found = [
        _judged(session, case, trials[session.id, case.workload])
        for session in sessions
        for case in session.cases
    ]
    if not detectable_too:
        return found
    noise = {(f.workload.id, f.metric): f for f in found if f.role is Role.SAME}
    return [_with_mde(f, noise.get((f.workload.id, f.metric))) for f in found]


def _judged(session: Session, case: CasePlan, trials: Sequence[Trial]) -> Finding:
    plan = SequentialPlan(
        margin=case.margin,
        bounds=case.bounds,
        seed=session.seed,
        design=session.design,
        thresholds=session.thresholds,
        calibrated=case.calibrated,
    )
    blocks = blocks_of(session, trials, case)
    evidence = _counted(session, trials, judge(blocks, plan))
    return Finding(
        session=session,
        workload=next(w for w in session.workloads if w.id == case.workload),
        metric=case.metric,
        case=case,
        evidence=evidence,
        blocks=blocks,
        mde=None,
        role=session.role,
        reasons=evidence.reasons,
    )


def _counted(session: Session, trials: Sequence[Trial], evidence: Evidence) -> Evidence:
    """INVALID where equal arms did unequal work: their times cannot be compared.

    The arms of a candidate session may differ in what they launch: that is a reason beside the
    verdict on its cost. A block with a failed trial is left out: it is dropped and replaced.
    """
    changed: dict[str, tuple[int | None, int | None]] = {}
    for row in complete(session, trials).values():
        if any(trial.invalid for trial in row):
            continue
        by_arm = {arm: [trial.counts for trial in row if trial.arm == arm] for arm in "AB"}
        for a, b in zip(by_arm["A"], by_arm["B"], strict=True):
            changed |= changed_counts(a, b)
    if not changed:
        return evidence
    why = tuple(f"count {name}: A {a}, B {b}" for name, (a, b) in changed.items())
    verdict = evidence.verdict if session.role is Role.CANDIDATE else BenchVerdict.INVALID
    return replace(evidence, verdict=verdict, reasons=(*why, *evidence.reasons))


def _with_mde(found: Finding, same: Finding | None) -> Finding:
    if same is None or len(same.effects) < LEAST_AA_BLOCKS:
        return found
    return replace(found, mde=detectable(same.effects, found.case.bounds, found.session.thresholds))


def dropped(found: Iterable[Finding]) -> list[str]:
    """One line for each workload of a session with dropped blocks: how many, and why.

    Of reasons that differ in their numbers alone one is shown, with the largest numbers.
    """
    worst: dict[tuple[str, str], Finding] = {}
    for f in found:
        place = f.session.id, f.workload.id
        if not f.is_part and f.evidence.dropped > (
            worst[place].evidence.dropped if place in worst else 0
        ):
            worst[place] = f
    return [
        f"{session} {workload}: {f.evidence.dropped} of {len(f.blocks)} blocks dropped: "
        + "; ".join(f"{count} × {reason}" for reason, count in _alike(f.blocks))
        for (session, workload), f in worst.items()
    ]


def visible(found: Iterable[Finding]) -> str:
    """The effects that this run could have seen, in the noise of its A/A session.

    Each is found in 9 sessions of 10; of a metric the workload is told that sees it worst. Empty
    without an A/A session.
    """
    worst: dict[str, tuple[float, float, str]] = {}
    for f in found:
        if f.is_gated and f.mde is not None:
            told = f.mde, f.case.bounds.delta1, f.workload.id
            worst[f.metric] = max(told, worst.get(f.metric, told))
    said = (
        f"{metric} {size(seen)} of {size(needed)} ({workload})"
        for metric, (seen, needed, workload) in worst.items()
    )
    return f"seen of what must be: {', '.join(said)}" if worst else ""


def _alike(blocks: Sequence[Block]) -> list[tuple[str, int]]:
    """First lines of the blocks' reasons, and of how many blocks, the most frequent first."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for block in blocks:
        for reason in block.invalid:
            line = reason.partition("\n")[0]
            groups[NUMBER.sub("#", line)].append(line)
    ranked = sorted(groups.values(), key=len, reverse=True)
    return [(max(lines, key=_numbers), len(lines)) for lines in ranked]


def _numbers(line: str) -> list[float]:
    """The largest first: of "0.02 to 0.79" it is the end that says how bad it was."""
    return sorted(map(float, NUMBER.findall(line)), reverse=True)


def verdict(found: Sequence[Finding], *, controlled: bool = True) -> RunVerdict:
    """The verdict of a run: multiple testing and the controls applied to its findings.

    REGRESSED and IMPROVED of candidates are decided by e-BH. An A/A case that is either of the two,
    or a workload on which the injected slowdown is not REGRESSED, makes every candidate INVALID.
    Of the others those are BLIND whose A/A case showed nothing, or whose noise hides delta1.
    Parts of a step keep the verdict of their own evidence, and one is named where the step moved.

    Args:
        found: of one file.
        controlled: whether the controls must be there and as they should.
    """
    candidates = {f.id: f for f in found if f.is_gated}
    whole = [f for f in found if not f.is_part]
    judged = apply_e_bh({name: f.evidence for name, f in candidates.items()})
    judged |= {f.id: f.evidence for f in found if f.role is Role.CANDIDATE and f.is_part}
    for controls in _controls(whole) if controlled else ():
        judged = apply_controls(judged, controls)
    same = {(f.workload.id, f.metric): f for f in whole if f.role is Role.SAME}
    all_judged = tuple(
        _unless_blind(f.with_evidence(judged[f.id]), same.get((f.workload.id, f.metric)))
        if f.id in judged
        else f
        for f in found
    )
    all_judged = tuple(_in_microseconds(f, all_judged) for f in all_judged)
    all_reasons = [why for evidence in judged.values() for why in evidence.reasons]
    reasons = [why for why in all_reasons if why.startswith("control ")]
    if not candidates:
        reasons = ["no candidate was measured"]
    return RunVerdict(findings=all_judged, reasons=tuple(dict.fromkeys(reasons)))


def _in_microseconds(found: Finding, every: Sequence[Finding]) -> Finding:
    """A candidate's finding whose reasons end with how far a phase moved.

    Of a phase that is itself, of a step time that moved the phase that moved furthest with it.
    """
    if found.role is not Role.CANDIDATE or not (found.is_part or found.metric == WHOLE):
        return found
    why, us = "", moved(found.blocks, found.case.unit)
    if found.is_part:
        why = f"{us:+.1f} µs"
    elif found.has_moved:
        here = found.session.id, found.workload.id
        parts = [f for f in every if f.is_part and (f.session.id, f.workload.id) == here]
        why = largest(us, {f.metric: moved(f.blocks, f.case.unit) for f in parts})
    reasons = (*found.reasons, why) if why else found.reasons
    return found.with_evidence(replace(found.evidence, reasons=reasons))


def _unless_blind(found: Finding, same: Finding | None) -> Finding:
    if found.verdict not in (BenchVerdict.OK, BenchVerdict.INCONCLUSIVE) or same is None:
        return found
    delta1 = found.case.bounds.delta1
    if found.mde is not None and found.mde > delta1 + STEP:  # as fine as it is known
        why = f"this noise hides less than {size(found.mde)}, and {size(delta1)} must be found"
    elif same.verdict is BenchVerdict.INCONCLUSIVE:
        why = "its A/A case is inconclusive"
    else:
        return found
    reasons = (why, *found.evidence.reasons)
    return found.with_evidence(replace(found.evidence, verdict=BenchVerdict.BLIND, reasons=reasons))


def _controls(found: Sequence[Finding]) -> list[dict[Control, Evidence]]:
    """The controls of every workload: the worst A/A case, the best case of the slowed metrics."""
    made: list[dict[Control, Evidence]] = []
    for workload in dict.fromkeys(f.workload.id for f in found if f.role is Role.CANDIDATE):
        here = [f for f in found if f.workload.id == workload]
        same = [f.evidence for f in here if f.role is Role.SAME]
        injected = [f.evidence for f in here if f.role is Role.INJECTED and f.metric in SLOWED]
        controls: dict[Control, Evidence] = {}
        if same:
            failed = [e for e in same if e.verdict not in Control.AA.accepted]
            controls[Control.AA] = (failed or same)[0]
        if injected:
            shown = [e for e in injected if e.verdict in Control.INJECTED.accepted]
            controls[Control.INJECTED] = (shown or injected)[0]
        made.append(controls)
    return made
