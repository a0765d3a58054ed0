"""Which subjects a row meets: each of ours that serves it, and of a baseline's kernels one."""

from __future__ import annotations

from collections import Counter

import pytest

from fixtures.plan import trials
from fixtures.tables import CASES
from harness.core.case import Case, Execution
from harness.subjects import REFERENCE, SUBJECTS, PagedSubject

EAGER = [
    (case, subject)
    for case, subject, execution in trials(covering=0)
    if execution is Execution.EAGER and isinstance(subject, PagedSubject)
]


def serves(subject: PagedSubject, case: Case) -> bool:
    return subject.family is case.family and subject.refusal(case, Execution.EAGER) is None


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
