"""Blocks of a case, from the lines of a benchmark."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from harness.bench.session_records import CasePlan, Line, Session, Trial
from harness.bench.stats.design import Block
from harness.bench.stats.validity import reasons
from harness.errors import UsageError, rejected

TIME_UNITS = ("us", "ms")
"""Units whose values scale with the clock."""
TrialsByArm = dict[tuple[str, str], list[Trial]]
"""By (session, workload)."""


def split(lines: Iterable[Line]) -> tuple[list[Session], TrialsByArm]:
    """Plans in order, and the trials of each (session, workload); a missing pair is empty.

    Raises:
        UsageError: a trial of a session that has no plan, or two plans of one id.
    """
    sessions: dict[str, Session] = {}
    trials: TrialsByArm = defaultdict(list)
    for line in lines:
        if isinstance(line, Trial):
            if line.session not in sessions:
                raise UsageError(rejected("trial of session", line.session, list(sessions)))
            trials[line.session, line.workload].append(line)
        elif line.id in sessions:
            raise UsageError(rejected("session", line.id, "one plan per id"))
        else:
            sessions[line.id] = line
    return list(sessions.values()), trials


def complete(session: Session, trials: Sequence[Trial]) -> dict[int, list[Trial]]:
    """The trials of each complete block in run order; a block cut off in the middle is left out."""
    by_block: dict[int, dict[int, Trial]] = defaultdict(dict)
    for trial in trials:
        by_block[trial.block][trial.place] = trial
    rows = {index: [places[p] for p in sorted(places)] for index, places in by_block.items()}
    full = len(session.design.orders[0])
    return {index: rows[index] for index in sorted(rows) if len(rows[index]) == full}


def blocks_of(session: Session, trials: Sequence[Trial], case: CasePlan) -> tuple[Block, ...]:
    """The complete blocks of one case, in order.

    A block is invalid where a condition does not hold or a trial has no number.
    """
    clocked = case.unit in TIME_UNITS and any(t.conditions.mhz is not None for t in trials)
    rows = complete(session, trials).items()
    return tuple(_block(index, row, case.metric, clocked=clocked) for index, row in rows)


def _block(index: int, row: Sequence[Trial], metric: str, *, clocked: bool) -> Block:
    why = [reason for trial in row for reason in trial.invalid]
    why += reasons([trial.conditions for trial in row])
    if not why and any(metric not in trial.metrics for trial in row):
        why.append(f"{metric}: not measured in every trial")
    clocks = [trial.conditions.mhz for trial in row]
    if clocked and None in clocks:
        why.append("mhz: sampled in some trials only")
    comparable = clocked and not any(trial.conditions.under_cap for trial in row)
    return Block(
        index=index,
        order="".join(trial.arm for trial in row),
        values=tuple(trial.metrics[metric] for trial in row if metric in trial.metrics),
        mhz=tuple(mhz for mhz in clocks if mhz is not None) if comparable else (),
        invalid=tuple(dict.fromkeys(why)),
    )
