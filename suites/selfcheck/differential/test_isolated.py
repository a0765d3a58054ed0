"""Trials in forks: what a crash, a hang or an earlier trial costs."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from fixtures.tables import CASES
from harness.core.case import Case, Execution
from harness.core.record import Record, Verdict
from harness.differential.isolated import TrialProcess
from harness.differential.trial import untried
from harness.subjects import SUBJECTS, Subject

CASE = CASES["mha-decode-bs1_short"]
SUBJECT = SUBJECTS["trtllm_mha/xqa"]
DIRTY: list[str] = []


def acted(case: Case, subject: Subject, execution: Execution) -> Record:
    """What the case's id says; red where an earlier trial of this process left something."""
    match case.id.split("-"):
        case ["kill", name]:
            faulthandler.disable()  # pytest's would write a traceback into the log
            signal.signal(signal.Signals[name], signal.SIG_DFL)  # nohup ignores SIGHUP
            os.kill(os.getpid(), signal.Signals[name])
        case ["interrupted"]:
            os.kill(os.getpid(), signal.SIGINT)
        case ["exit", code]:
            os._exit(int(code))
        case ["hang"]:
            time.sleep(60)
        case ["slow"]:
            time.sleep(2.5)
        case ["late"]:
            threading.Timer(0.2, os._exit, [3]).start()
    dirty = bool(DIRTY) or case.id == "red"
    DIRTY.append(case.id)
    verdict = Verdict.WRONG_NUMBERS if dirty else Verdict.PASSED
    return replace(untried(case, subject, execution), verdict=verdict, message=str(os.getpid()))


@pytest.fixture
def process() -> Iterator[TrialProcess]:
    with closing(TrialProcess(acted, patience_s=2)) as made:
        yield made


def run(process: TrialProcess, case: str) -> Record:
    return process.run(replace(CASE, id=case), SUBJECT, Execution.EAGER)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("kill-SIGSEGV", "the process ended by SIGSEGV"),
        ("kill-SIGHUP", "the process ended by SIGHUP"),
        ("kill-SIGABRT", "the process ended by SIGABRT"),
        ("exit-3", "the process ended by exit code 3"),
        ("hang", "no answer within 2 s"),
        ("slow", "no answer within 2 s"),
    ],
)
def test_a_lost_process_costs_its_trial_alone(
    process: TrialProcess, case: str, message: str
) -> None:
    lost = run(process, case)
    assert (lost.verdict, lost.message, lost.case) == (Verdict.ERROR, message, case)
    found = run(process, "next")
    assert (found.verdict, found.case) == (Verdict.PASSED, "next")
    assert DIRTY == []


def test_a_process_that_ends_after_its_answer_costs_no_other_trial(process: TrialProcess) -> None:
    verdict = run(process, "late").verdict
    assert verdict is Verdict.PASSED, (
        f"a trial whose process ends after its answer passed: {verdict}"
    )
    process._child.join(10)
    said = "a trial whose process the one before it took down runs in a new one"
    try:
        found = run(process, "next")
    except OSError as error:
        pytest.fail(f"{said}, and ends with no {error!r}")
    assert (found.verdict, found.case) == (Verdict.PASSED, "next"), f"{said}: {found.verdict}"


def test_a_process_ends_with_its_killed_parent() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def killed(pipe: Connection) -> None:
        """Says who runs its trials, which holds this end, too, and never comes to an end."""
        pipe.send(run(TrialProcess(acted, patience_s=10), "first").message)
        os.kill(os.getpid(), signal.SIGKILL)

    parent = context.Process(target=killed, args=(theirs,))
    parent.start()
    theirs.close()
    child = int(ours.recv())
    parent.join(10)
    is_over = ours.poll(10)
    if not is_over:
        os.kill(child, signal.SIGKILL)
    assert is_over, "a process of trials whose parent was killed ends by itself"
    with pytest.raises(EOFError):
        ours.recv()


def test_a_trial_that_never_ran_is_one_of_its_own_device() -> None:
    lost = untried(CASE, SUBJECT, Execution.GRAPH, torch.device("cpu", 0))
    said = "what a trial leaves that ended its process says which device it was to run on"
    assert (lost.device, lost.environment.device) == ("cpu:0", "cpu:0"), said


@pytest.mark.parametrize("case", ["exit-3", "hang"])
def test_a_lost_trial_keeps_its_device(case: str) -> None:
    with closing(TrialProcess(acted, patience_s=2, device="cpu:0")) as process:
        lost = run(process, case)
    said = (
        "a trial that ended its process, or never came back, is told of the device that it ran on"
    )
    assert (lost.device, lost.environment.device) == ("cpu:0", "cpu:0"), said


def test_what_an_earlier_trial_left_decides_no_verdict(process: TrialProcess) -> None:
    first = run(process, "first")
    second = run(process, "second")
    assert second.verdict is Verdict.PASSED
    assert first.message != second.message


def test_one_process_runs_trials_that_pass_and_a_red_one_is_run_again() -> None:
    pids: list[str] = []

    def clean(case: Case, subject: Subject, execution: Execution) -> Record:
        verdict = Verdict.WRONG_NUMBERS if case.id == "red" else Verdict.PASSED
        made = untried(case, subject, execution)
        return replace(made, verdict=verdict, message=str(os.getpid()))

    with closing(TrialProcess(clean, patience_s=10)) as process:
        pids += [run(process, case).message for case in ("a", "b", "red", "c")]
    assert pids[0] == pids[1]
    assert pids[2] == pids[3] != pids[0]


def test_a_red_trial_that_is_known_is_not_run_again() -> None:
    with closing(TrialProcess(acted, is_known=lambda record: True, patience_s=10)) as process:
        first = run(process, "first")
        red = run(process, "red")
    assert red.verdict is Verdict.WRONG_NUMBERS
    assert red.message == first.message


def test_a_red_trial_that_a_new_process_ran_first_is_not_run_again(tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    def noted(case: Case, subject: Subject, execution: Execution) -> Record:
        with ran.open("a") as file:
            file.write(f"{case.id} ")
        return acted(case, subject, execution)

    with closing(TrialProcess(noted, patience_s=10)) as process:
        for case in ("first", "kill-SIGSEGV", "red"):
            run(process, case)
    # The killed one was the second of its process and is run again; the red one is the first.
    said = "nothing ran before it in its process, so that nothing is left behind that could decide"
    assert ran.read_text().split() == ["first", "kill-SIGSEGV", "kill-SIGSEGV", "red"], said


def test_ctrl_c_ends_no_trial_before_its_parent_does(process: TrialProcess) -> None:
    # A shell's background has it ignored from the start, and forks inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        record = run(process, "interrupted")
    finally:
        signal.signal(signal.SIGINT, before)
    assert record.verdict is Verdict.PASSED, "a trial's process leaves Ctrl-C to its parent"


def test_a_process_of_its_own_shares_nothing_with_this_one() -> None:
    DIRTY.append("here")
    try:
        spawned = TrialProcess(acted, lambda record: True, patience_s=60, start="spawn")
        with closing(spawned) as process:
            first, lost = run(process, "first"), run(process, "kill-SIGSEGV")
            again = run(process, "again")
    finally:
        DIRTY.clear()
    assert first.verdict is again.verdict is Verdict.PASSED
    assert lost.message == "the process ended by SIGSEGV"
    assert len({first.message, again.message, str(os.getpid())}) == 3
