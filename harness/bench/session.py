"""A run of a benchmark: rehearsal, plan or resumption, measurement."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from harness.bench.analysis import Finding
from harness.bench.block_runner import SIDE_BY_SIDE, BlockRunner, Measure
from harness.bench.console import ConsoleView
from harness.bench.jsonl import PACKED, append, mend, read
from harness.bench.measure import TrialSlot
from harness.bench.plan import Levels, Setup, check_resumed, sessions
from harness.bench.server_pool import stopped_together
from harness.bench.session_records import Line, Session
from harness.core.argument_types import check_writable
from harness.core.record import Environment
from harness.errors import ContractError, UsageError, rejected


@dataclass(frozen=True, kw_only=True)
class BenchRun:
    """A setup with its files and its console.

    Args:
        setup: the options.
        out: file of the records; logs of servers go to a folder beside it.
        measure: makes a trial.
        environment: facts of the machine.
        console: that shows the progress.
        resume: go on with the plan that ``out`` holds.
        seconds, side_by_side: see ``BlockRunner``.
    """

    setup: Setup
    out: Path
    measure: Measure
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
        logs = self._folder_of_logs()
        with self._locked(logs):
            lines = self._begin(logs)
            plans = [line for line in lines if isinstance(line, Session)]
            with ConsoleView(plans, self.console) as view:
                return BlockRunner(
                    sessions=plans,
                    arms={role: self.setup.arms(role) for role in self.setup.roles},
                    out=self.out,
                    logs=logs,
                    measure=self.measure,
                    observer=view,
                    lines=lines,
                    seconds=self.seconds,
                    side_by_side=self.side_by_side,
                ).run()

    @contextmanager
    def _locked(self, logs: Path) -> Iterator[None]:
        """Lock the folder of logs, which exists before the records do.

        Raises:
            UsageError: another run holds it.
        """
        folder = os.open(logs, os.O_RDONLY)
        try:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                accepted = "a file that no other run writes to"
                raise UsageError(rejected("out", str(self.out), accepted)) from error
            yield
        finally:
            os.close(folder)

    def _folder_of_logs(self) -> Path:
        """The folder of the servers' logs, made; checked before a server starts.

        Raises:
            UsageError: ``out`` cannot be written, or holds records that are not resumed.
        """
        if self.out.suffix == PACKED:
            raise UsageError(rejected("out", str(self.out), "a file that is not packed"))
        if self.out.is_file() and not self.resume:
            raise UsageError(rejected("out", str(self.out), "a new file, or --resume"))
        logs = self.out.parent / f"{self.out.stem}-logs"
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            accepted = f"a file in a folder that can be made ({error.strerror})"
            raise UsageError(rejected("out", str(self.out), accepted)) from error
        check_writable(self.out, "out")
        logs.mkdir(exist_ok=True)
        return logs

    def _begin(self, logs: Path) -> list[Line]:
        if self.out.exists():
            mend(self.out)
            lines = list(read(self.out))
            if plans := [line for line in lines if isinstance(line, Session)]:
                check_resumed(plans, self.setup)
                return lines
        self.console.print("rehearsal of both arms: caches are filled, levels are measured")
        planned = sessions(self.setup, self._rehearse(logs), self.environment())
        for session in planned:
            append(self.out, session)
        return list(planned)

    def _rehearse(self, logs: Path) -> Levels:
        """Levels of arm A, of the metrics that both arms have; caches on disk are warm afterwards.

        Raises:
            ContractError: a trial of it was invalid.
        """
        levels: dict[str, dict[tuple[str, str], float]] = {"A": {}, "B": {}}
        arms = self.setup.arms(self.setup.roles[0])
        with stopped_together() as started:
            ready = []
            for letter, arm in arms.items():
                server = arm.start(logs / f"rehearsal-{letter}.log")
                started[arm.spec].append(server)
                ready.append((letter, arm, server))
            for letter, arm, server in ready:
                slot = TrialSlot(session="rehearsal", block=0, place=0, arm=letter)
                for workload in self.setup.workloads:
                    trial = self.measure(slot, arm, server, workload)
                    if trial.invalid:
                        why = "; ".join(trial.invalid)
                        raise ContractError(f"rehearsal of arm {letter}, {workload.id}: {why}")
                    levels[letter] |= {(workload.id, m): x for m, x in trial.metrics.items()}
        return {key: x for key, x in levels["A"].items() if key in levels["B"]}
