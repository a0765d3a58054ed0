"""Trials in processes of their own, for subjects whose code may overrun memory or never return.

A child of this process runs one trial after another: a fork, or where CUDA is used, which no fork
can, a process of its own. A trial that kills it costs that trial alone, and its record names the
signal; a red one that nobody expects is run again in a new child, so that nothing an earlier trial
left behind decides a verdict.
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from harness.core.case import Case, Execution
from harness.core.record import Record, Verdict
from harness.core.signals import ending
from harness.differential.trial import run_trial, untried
from harness.subjects import Subject

PATIENCE_S = 300.0
Trial = tuple[Case, Subject, Execution]


class TrialProcess:
    """Runs trials in children of this process.

    Args:
        run: what a child does with a trial.
        is_known: whether a red record is expected, and not worth a second run.
        patience_s: seconds after which a trial is given up.
        start: "fork" of this process, which has imported what trials need, or "spawn".
        device: of the trials, which the record of one that ended its process names, too.
    """

    def __init__(
        self,
        run: Callable[[Case, Subject, Execution], Record] = run_trial,
        is_known: Callable[[Record], bool] = lambda record: False,
        patience_s: float = PATIENCE_S,
        start: str = "fork",
        device: torch.device | str = "cpu",
    ) -> None:
        self._run = run
        self._is_known = is_known
        self._patience_s = patience_s
        self._device = device
        self._context: Any = multiprocessing.get_context(start)
        self._child: Any = None
        self._pipe: Connection | None = None
        self._ran = 0

    def run(self, case: Case, subject: Subject, execution: Execution) -> Record:
        """The record of one trial."""
        record = self._ask((case, subject, execution))
        if record.verdict.is_red and self._ran > 1 and not self._is_known(record):
            self.close()
            record = self._ask((case, subject, execution))
        return record

    def close(self) -> None:
        """End the child, if there is one."""
        if self._child is not None:
            self._child.kill()
            self._child.join()
            self._child = None

    def _ask(self, trial: Trial) -> Record:
        if self._child is None:
            self._start()
        assert self._pipe is not None
        self._ran += 1
        try:
            self._pipe.send(trial)
            if not self._pipe.poll(self._patience_s):
                self.close()
                return self._failed(trial, f"no answer within {self._patience_s:g} s")
            record: Record = self._pipe.recv()
        except (EOFError, OSError):  # it ended in the trial, or before it read it
            self._child.join()
            code, self._child = self._child.exitcode, None
            return self._failed(trial, f"the process ended by {ending(code)}")
        return record

    def _failed(self, trial: Trial, message: str) -> Record:
        lost = untried(*trial, self._device)
        return replace(lost, verdict=Verdict.ERROR, message=message)

    def _start(self) -> None:
        self._pipe, theirs = self._context.Pipe()
        gc.freeze()
        given = (self._pipe, theirs, self._run)
        self._child = self._context.Process(target=_serve, args=given, daemon=True)
        self._child.start()
        theirs.close()
        self._ran = 0


def _serve(
    parents: Connection, pipe: Connection, run: Callable[[Case, Subject, Execution], Record]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started us ends us
    parents.close()  # else it would wait for a killed parent forever
    while True:
        try:
            trial = pipe.recv()
        except EOFError:
            return
        pipe.send(run(*trial))
