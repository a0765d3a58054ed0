"""Which subjects a row meets, and which of them replay it."""

from __future__ import annotations

from collections import Counter

import pytest

from fixtures.plan import trials
from fixtures.tables import CASES
from harness.core.case import Case, Execution
from harness.subjects import REFERENCE, SUBJECTS, PagedSubject

PLANNED = {
    wanted: [
        (case, subject)
        for case, subject, execution in trials(covering=0)
        if execution is wanted and isinstance(subject, PagedSubject)
    ]
    for wanted in Execution
}
EAGER, REPLAYED = PLANNED[Execution.EAGER], PLANNED[Execution.GRAPH]


def serves(subject: PagedSubject, case: Case, execution: Execution = Execution.EAGER) -> bool:
    return subject.family is case.family and subject.refusal(case, execution) is None


def test_every_row_meets_each_of_our_kernels_that_serves_it() -> None:
    planned = {(case.id, subject.name) for case, subject in EAGER}
    missing = [
        (case.id, subject.name)
        for case in CASES.values()
        for subject in SUBJECTS.values()
        if not subject.is_baseline and subject.kernel != REFERENCE and serves(subject, case)
        if (case.id, subject.name) not in planned
    ]
    assert missing == []


@pytest.mark.parametrize(
    "name", sorted({n.split("/")[0] for n, s in SUBJECTS.items() if s.is_baseline})
)
def test_kernels_of_a_baseline_take_turns(name: str) -> None:
    of = [s for s in SUBJECTS.values() if s.name.startswith(f"{name}/")]
    taken = [(case, subject) for case, subject in EAGER if subject in of and serves(subject, case)]
    assert set(Counter(case.id for case, _ in taken).values()) == {1}
    both = Counter(s.name for case, s in taken if all(serves(other, case) for other in of))
    assert both.keys() == {subject.name for subject in of}
    assert min(both.values()) > both.total() / len(of) / 2


def test_every_row_with_a_graph_is_replayed() -> None:
    planned = {case.id for case, subject in REPLAYED if not subject.is_baseline}
    missing = [
        case.id
        for case in CASES.values()
        if case.id not in planned
        and any(serves(subject, case, Execution.GRAPH) for subject in SUBJECTS.values())
    ]
    assert missing == []


@pytest.mark.parametrize("field", ["kv_dtype", "dtype", "page_size", "num_draft_tokens", "sinks"])
def test_every_kernel_replays_every_value_that_it_serves(field: str) -> None:
    replayed = {(s.name, case.mode, getattr(case, field)) for case, s in REPLAYED}
    missing = {
        (subject.name, case.mode, getattr(case, field))
        for subject in SUBJECTS.values()
        if not subject.is_baseline and subject.kernel != REFERENCE
        for case in CASES.values()
        if serves(subject, case, Execution.GRAPH)
    } - replayed
    assert missing == set()


def test_two_kernels_replay_a_row_by_turns() -> None:
    of = Counter(s.name for case, s in REPLAYED if not s.is_baseline and s.kernel != REFERENCE)
    eager = Counter(s.name for case, s in EAGER if s.name in of)
    assert all(0.4 < of[name] / eager[name] < 0.8 for name in of), (of, eager)
