"""Which subjects a row meets, and which of them replay it."""

from __future__ import annotations

from collections import Counter

import pytest

from fixtures.plan import trials
from fixtures.tables import CASES
from harness.core.case import Case, Execution
from harness.subjects import REFERENCE, SUBJECTS, PagedSubject

Planned = list[tuple[Case, PagedSubject]]
FIELDS = ("kv_dtype", "dtype", "page_size", "num_draft_tokens", "sinks")


def planned(wanted: Execution) -> Planned:
    return [
        (case, subject)
        for case, subject, execution in trials(covering=0)
        if execution is wanted and isinstance(subject, PagedSubject)
    ]


@pytest.fixture(scope="module")
def eager() -> Planned:
    return planned(Execution.EAGER)


@pytest.fixture(scope="module")
def replayed() -> Planned:
    return planned(Execution.GRAPH)


def serves(subject: PagedSubject, case: Case, execution: Execution = Execution.EAGER) -> bool:
    return subject.family is case.family and subject.refusal(case, execution) is None


def test_every_row_meets_each_of_our_kernels_that_serves_it(eager: Planned) -> None:
    known = {(case.id, subject.name) for case, subject in eager}
    missing = [
        (case.id, subject.name)
        for case in CASES.values()
        for subject in SUBJECTS.values()
        if not subject.is_baseline and subject.kernel != REFERENCE and serves(subject, case)
        if (case.id, subject.name) not in known
    ]
    assert missing == []


@pytest.mark.parametrize(
    "name", sorted({n.split("/")[0] for n, s in SUBJECTS.items() if s.is_baseline})
)
def test_kernels_of_a_baseline_take_turns(name: str, eager: Planned) -> None:
    of = [s for s in SUBJECTS.values() if s.name.startswith(f"{name}/")]
    taken = [(case, subject) for case, subject in eager if subject in of and serves(subject, case)]
    assert set(Counter(case.id for case, _ in taken).values()) == {1}
    both = Counter(s.name for case, s in taken if all(serves(other, case) for other in of))
    assert both.keys() == {subject.name for subject in of}
    assert min(both.values()) > both.total() / len(of) / 2


def test_every_row_with_a_graph_is_replayed(replayed: Planned) -> None:
    known = {case.id for case, subject in replayed if not subject.is_baseline}
    missing = [
        case.id
        for case in CASES.values()
        if case.id not in known
        and any(serves(subject, case, Execution.GRAPH) for subject in SUBJECTS.values())
    ]
    assert missing == []


@pytest.mark.parametrize("field", FIELDS)
def test_every_kernel_replays_every_value_that_it_serves(field: str, replayed: Planned) -> None:
    known = {(s.name, case.mode, getattr(case, field)) for case, s in replayed}
    missing = {
        (subject.name, case.mode, getattr(case, field))
        for subject in SUBJECTS.values()
        if not subject.is_baseline and subject.kernel != REFERENCE
        for case in CASES.values()
        if serves(subject, case, Execution.GRAPH)
    } - known
    assert missing == set()


@pytest.mark.parametrize("field", FIELDS)
def test_a_baseline_replays_each_value_of_its_rows(
    field: str, eager: Planned, replayed: Planned
) -> None:
    ran, known = (
        {
            (subject.name, case.mode, getattr(case, field))
            for case, subject in trials
            if subject.is_baseline and serves(subject, case, Execution.GRAPH)
        }
        for trials in (eager, replayed)
    )
    assert known == ran


def test_a_baseline_replays_new_values_alone(eager: Planned, replayed: Planned) -> None:
    of = Counter(s.name for case, s in replayed if s.is_baseline and serves(s, case))
    ran = Counter(s.name for case, s in eager if s.is_baseline and serves(s, case))
    assert of.keys() == ran.keys()
    assert of.total() < ran.total() / 2, (of, ran)


def test_two_kernels_replay_a_row_by_turns(eager: Planned, replayed: Planned) -> None:
    of = Counter(s.name for case, s in replayed if not s.is_baseline and s.kernel != REFERENCE)
    ran = Counter(s.name for case, s in eager if s.name in of)
    assert all(0.4 < of[name] / ran[name] < 0.8 for name in of), (of, ran)
