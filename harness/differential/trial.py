"""A trial: one case on one subject, from the row to the record."""

from __future__ import annotations

import time

import torch

from harness.core.case import Case, Execution
from harness.core.record import Record, Verdict
from harness.differential.compare import Comparison
from harness.differential.diagnose import explain
from harness.differential.forward import decoys, run_forward
from harness.differential.golden import Golden
from harness.differential.inputs import make_trial_inputs
from harness.differential.judge import judge
from harness.errors import FAILURES, first_line
from harness.kernels.workspace import shared_workspaces
from harness.subjects import Subject

# Wrong outputs of attention that no invariant explains; the keys that were read may.
UNEXPLAINED = {
    (quantity, verdict)
    for quantity in ("hidden_states", "logits")
    for verdict in (Verdict.WRONG_NUMBERS, Verdict.NON_FINITE)
}


def run_trial(
    case: Case,
    subject: Subject,
    execution: Execution,
    device: torch.device | str = "cpu",
    golden: Golden | None = None,
) -> Record:
    """Refuse, or run and judge; none of ``errors.FAILURES`` escapes.

    The message of a red record names the broken invariant, or the wrong quantity with its place
    and the keys that were read instead of the expected ones.

    Args:
        case: the row.
        subject: that runs it.
        execution: eager or replayed.
        device: it runs on.
        golden: of the row, where one is recorded: a second judge beside the oracle.
    """
    started = time.perf_counter()
    reason = subject.refusal(case, execution, device)
    if reason is not None:
        return _record(case, subject, execution, device, Verdict.REFUSED, reason)
    case = subject.adapted(case)
    try:
        inputs = make_trial_inputs(case, *(decoys(case) if execution is Execution.GRAPH else ()))
        result = run_forward(subject, inputs, execution, device)
        comparisons = judge(
            result,
            execution,
            subject.numerics(device),
            shared_workspaces(),
            subject.conventions,
            golden,
        )
        bad = [comparison for comparison in comparisons if not comparison.passed]
        lines = [comparison.message for comparison in bad[:3]]
        if bad and (bad[0].quantity, bad[0].verdict) in UNEXPLAINED:
            lines.insert(0, explain(case, subject, execution, device, result))
    except FAILURES as error:
        return _record(case, subject, execution, device, Verdict.ERROR, first_line(error))
    return _record(
        case,
        subject,
        execution,
        device,
        bad[0].verdict if bad else Verdict.PASSED,
        "; ".join(lines),
        comparisons,
        time.perf_counter() - started,
    )


def untried(
    case: Case, subject: Subject, execution: Execution, device: torch.device | str = "cpu"
) -> Record:
    """The record of a trial that has not run: an error without a cause."""
    return _record(case, subject, execution, device, Verdict.ERROR, "")


def _record(
    case: Case,
    subject: Subject,
    execution: Execution,
    device: torch.device | str,
    verdict: Verdict,
    message: str,
    comparisons: list[Comparison] | None = None,
    seconds: float = 0.0,
) -> Record:
    return Record(
        case=case.id,
        subject=subject.name,
        family=case.family,
        mode=case.mode,
        execution=execution,
        device=str(device),
        verdict=verdict,
        message=message,
        quantities=tuple(c.to_quantity() for c in comparisons or () if c.quantity != "invariant"),
        seconds=seconds,
        environment=subject.environment(device),
        reproduce=subject.reproduce(f"{case.id}-{subject.name}-{execution}"),
    )


def explanation(record: Record) -> str:
    """The failure of a trial: fault, place, size, and the command that repeats it."""
    worst = max(record.quantities, key=lambda quantity: quantity.ratio, default=None)
    numbers = ""
    if worst is not None:
        allowed = f"{worst.error:.2e}, allowed {worst.allowed:.2e}"
        numbers = f"\nworst: {worst.name} at {worst.where}: {allowed}"
    return (
        f"{record.case} on {record.subject}, {record.execution}: {record.verdict}\n"
        f"cause: {record.message}{numbers}\nreproduce: {record.reproduce}"
    )
