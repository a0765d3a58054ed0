"""A run of a benchmark: rehearsal, plan or resumption, measurement."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from harness.bench.analysis import Finding
from harness.bench.arms import Arm
from harness.bench.block_runner import SIDE_BY_SIDE, BlockRunner, Measure
from harness.bench.console import ConsoleView
from harness.bench.jsonl import PACKED, append, mend, read
from harness.bench.measure import TrialSlot
from harness.bench.plan import Setup, check_resumed, sessions
from harness.bench.server_pool import stopped_together, wait_together
from harness.bench.session_records import Line, Session, Trial
from harness.bench.sizing import PASSES, Rehearsal, RehearsedLaunch, run_size
from harness.core.argument_types import check_writable
from harness.core.exclusive import alone_in
from harness.core.record import Environment
from harness.errors import ContractError, UsageError, rejected

ARMS = "AB"


def check_out(out: Path, resume: bool) -> None:
    """Check that a run can write its records, before a server starts.

    Raises:
        UsageError: ``out`` cannot be written, or holds records that are not resumed.
    """
    if out.suffix == PACKED:
        raise UsageError(rejected("out", str(out), "a file that is not packed"))
    if out.is_file() and not resume:
        raise UsageError(rejected("out", str(out), "a new file, or --resume"))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        accepted = f"a file in a folder that can be made ({error.strerror})"
        raise UsageError(rejected("out", str(out), accepted)) from error
    check_writable(out, "out")


@dataclass(frozen=True, kw_only=True)
class BenchRun:
    """A setup with its files and its console.

    Args:
        setup: the options.
        out: file of the records; logs of servers go to a folder beside it.
        measure: makes trials of so many passes.
        environment: facts of the machine.
        console: that shows the progress.
        resume: go on with the plan that ``out`` holds.
        seconds: that the rehearsal and all blocks may take; see ``BlockRunner``.
        side_by_side: see ``BlockRunner``.
    """

    setup: Setup
    out: Path
    measure: Callable[[int], Measure]
    environment: Callable[[], Environment]
    console: Console
    resume: bool = False
    seconds: float = float("inf")
    side_by_side: int = SIDE_BY_SIDE

    def run(self) -> list[Finding]:
        """Measure until every case is decided or the time is up.

        Raises:
            UsageError: ``out`` holds records that are not resumed, or another plan, or another run
                writes to it.
            ContractError: an arm did not even pass its rehearsal.
        """
        ends = time.monotonic() + self.seconds
        check_out(self.out, self.resume)
        logs = self.out.parent / f"{self.out.stem}-logs"
        logs.mkdir(exist_ok=True)
        refused = rejected("out", str(self.out), "a file that no other run writes to")
        with alone_in(logs, refused):
            lines = self._begin(logs, ends)
            plans = [line for line in lines if isinstance(line, Session)]
            with ConsoleView(plans, self.console) as view:
                for begun in lines:
                    if isinstance(begun, Trial):
                        view.trial_done(begun)
                return BlockRunner(
                    sessions=plans,
                    arms={role: self.setup.arms(role) for role in self.setup.roles},
                    out=self.out,
                    logs=logs,
                    measure=self.measure(plans[0].passes),
                    observer=view,
                    lines=lines,
                    seconds=ends - time.monotonic(),
                    side_by_side=self.side_by_side,
                ).run()

    def _begin(self, logs: Path, ends: float) -> list[Line]:
        if self.out.exists():
            mend(self.out)
            lines = list(read(self.out))
            if plans := [line for line in lines if isinstance(line, Session)]:
                check_resumed(plans, self.setup)
                return lines
        self.console.print("rehearsal of both arms: caches are filled, levels are measured")
        rehearsal = self._rehearse(logs)
        planned = sessions(self.setup, rehearsal.levels, self.environment())
        if self.setup.sized:
            choices = (self.setup.passes,) if self.setup.passes else PASSES
            sized = run_size(planned, rehearsal, choices, ends - time.monotonic())
            for line in sized.told:
                self.console.print(line, markup=False, highlight=False)
            planned = [replace(session, passes=sized.passes) for session in planned]
        append(self.out, *planned)  # a part of a plan could not be resumed
        return list(planned)

    def _rehearse(self, logs: Path) -> Rehearsal:
        """Trials of every arm; where noise is measured, in two waves, since the first fills caches.

        Raises:
            ContractError: a trial of it was invalid.
        """
        numbered = list(enumerate(self.setup.rehearsed))
        at_once = max(len(ARMS), self.side_by_side)
        if self.setup.sized:
            at_once = min(at_once, len(numbered) // 2)
        waves = [numbered[n : n + at_once] for n in range(0, len(numbered), at_once)]
        measured = [self._rehearse_together(wave, logs) for wave in waves]
        return Rehearsal(
            launches=[launch for launches, _ in measured for launch in launches],
            launch_s=min(seconds for _, seconds in measured),
        )

    def _rehearse_together(
        self, numbered: Sequence[tuple[int, Arm]], logs: Path
    ) -> tuple[list[RehearsedLaunch], float]:
        """Launches side by side, measured in turns; and the seconds of a start."""
        measure, began = self.measure(self.setup.rehearsed_passes), time.monotonic()
        with stopped_together() as started:
            servers = []
            for number, arm in numbered:
                letter = ARMS[number % len(ARMS)]
                server = arm.start(logs / f"rehearsal-{number}{letter}.log")
                started[arm.spec].append(server)
                slot = TrialSlot(session="rehearsal", block=number, place=0, arm=letter)
                servers.append((slot, arm, server))
            wait_together(started)
            start_s = (time.monotonic() - began) / len(numbered)
            trials: list[dict[str, list[Trial]]] = [defaultdict(list) for _ in servers]
            for workload in self.setup.workloads:
                for place in range(self.setup.rehearsed_trials):
                    for (slot, arm, server), mine in zip(servers, trials, strict=True):
                        trial = measure(replace(slot, place=place), arm, server, workload)
                        mine[workload.id].append(_valid(trial))
        specs = [arm.spec for _, arm in numbered]
        launches = [RehearsedLaunch(spec=s, trials=t) for s, t in zip(specs, trials, strict=True)]
        return launches, start_s


def _valid(trial: Trial) -> Trial:
    if trial.invalid:
        why = "; ".join(trial.invalid)
        raise ContractError(f"rehearsal of arm {trial.arm}, {trial.workload}: {why}")
    return trial
