"""A red trial is waived only with an issue, and a waiver lives only while its trial is red."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from fixtures.plan import trials
from fixtures.pytest_plugin.goldens import PAIRS, prompts
from fixtures.pytest_plugin.waivers import idle
from fixtures.tables import findings, waivers
from fixtures.tables.findings import Finding
from fixtures.tables.waivers import WAIVERS, Waiver
from harness.core.case import Execution
from harness.core.record import Verdict, read_records
from harness.errors import UsageError
from harness.subjects import SUBJECTS

pytest_plugins = ["pytester"]

WAIVER = Waiver(
    case="waived*",
    subject="trtllm_mha/*",
    execution="eager",
    place="cpu",
    issue="owner/kernels#17",
    reason="wrong past 4096 tokens",
)
TESTS = """
import pytest
from fixtures.fakes.sample_records import trial
from harness.core.record import Verdict

@pytest.mark.parametrize("case", ["waived_red", "waived_green", "waived_refused", "other_red"])
def test_trial(record_trial, case):
    record_trial(trial(case, Verdict.ERROR))
    if case.endswith("green"):
        record_trial(trial(case))
    elif case.endswith("refused"):
        record_trial(trial(case, Verdict.REFUSED, message="head_dim"))
        pytest.skip("head_dim")
    else:
        record_trial(trial(case, Verdict.WRONG_NUMBERS, message="row 3"))
        pytest.fail("row 3")

@pytest.fixture
def breaks_later():
    yield
    raise OSError("late")

def test_breaks_in_teardown(record_trial, breaks_later):
    record_trial(trial("waived_late", Verdict.WRONG_NUMBERS, message="row 3"))
    pytest.fail("row 3")

def test_is_refused_and_breaks(record_trial, breaks_later):
    record_trial(trial("refused_late", Verdict.REFUSED, message="head_dim"))
    pytest.skip("head_dim")
"""
STALE = "passes, though waived for owner/kernels#17: wrong past 4096 tokens; take the waiver out"
EXPECTED = {
    "waived_red": (Verdict.WAIVED, "owner/kernels#17: wrong past 4096 tokens"),
    "waived_green": (Verdict.ERROR, STALE),
    "waived_refused": (Verdict.REFUSED, "head_dim"),
    "waived_late": (Verdict.ERROR, "OSError: late"),
    "refused_late": (Verdict.ERROR, "OSError: late"),
    "other_red": (Verdict.WRONG_NUMBERS, "row 3"),
}


def test_covered_trials_are_waived_while_red(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waivers, "WAIVERS", (WAIVER,))
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_inprocess(
        "-p", "fixtures.pytest_plugin.records", "-n0", "--report", "out"
    )
    result.assert_outcomes(xfailed=2, failed=2, skipped=2, errors=2)
    result.stdout.fnmatch_lines([f"*{STALE}*"])
    records = read_records(Path("out", "records.jsonl"))
    obtained = {r.case: (r.verdict, r.message) for r in records}
    told = "a refused trial whose teardown fails leaves a red record"
    assert obtained["refused_late"] == EXPECTED["refused_late"], told
    assert obtained == EXPECTED


EXPLAINED = """
import pytest
from fixtures.fakes.sample_records import trial
from harness.core.record import Verdict

def leave(record_trial, case):
    red = {"subject": "sglang-0.5.16/trtllm_mha/xqa", "message": "row 3"}
    record_trial(trial(case, Verdict.WRONG_NUMBERS, **red))

@pytest.fixture
def breaks_before(record_trial):
    leave(record_trial, "in_setup")
    raise OSError("early")

@pytest.fixture
def breaks_later():
    yield
    raise OSError("late")

def test_before(breaks_before):
    pass

def test_itself(record_trial):
    leave(record_trial, "in_call")
    pytest.fail("row 3")

def test_later(record_trial, breaks_later):
    leave(record_trial, "in_teardown")
"""


def test_a_finding_excuses_the_call_alone(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = ("where", "produced", "effect")
    finding = Finding(
        id="F1",
        title="row 3 is off",
        subject="trtllm_mha/*",
        case="in_*",
        message="row 3",
        since="0.5.16",
        **dict.fromkeys(facts, "told"),
    )
    monkeypatch.setattr(findings, "FINDINGS", (finding,))
    pytester.makepyfile(EXPLAINED)
    result = pytester.runpytest_inprocess(
        "-p", "fixtures.pytest_plugin.records", "-n0", "--report", "out"
    )
    verdicts = {r.case: r.verdict for r in read_records(Path("out", "records.jsonl"))}
    red = dict.fromkeys(("in_setup", "in_teardown"), Verdict.WRONG_NUMBERS)
    said = "a setup or a teardown that breaks is no symptom of a finding"
    assert verdicts == red | {"in_call": Verdict.WAIVED}, said
    result.assert_outcomes(xfailed=1, passed=1, errors=2)


@pytest.mark.parametrize("field", ["case", "subject", "execution", "place"])
def test_every_name_counts(field: str) -> None:
    names = {"case": "waived_red", "subject": "trtllm_mha/xqa", "execution": "eager"}
    names["place"] = "cpu"
    assert WAIVER.covers(**names)
    assert not WAIVER.covers(**names | {field: "other"})


@pytest.mark.parametrize("issue", ["", "17", "#17", "kernels#17", "owner/kernels#0", "see mail"])
def test_waiver_refers_to_an_issue(issue: str) -> None:
    with pytest.raises(UsageError, match=r"waiver\.issue = .* accepted: owner/repository#number"):
        replace(WAIVER, issue=issue)


def test_waiver_has_a_reason() -> None:
    with pytest.raises(UsageError, match=r"waiver\.reason"):
        replace(WAIVER, reason="")


def test_waiver_that_matches_nothing_is_found() -> None:
    planned = [("waived_red", "trtllm_mha/xqa", "eager"), ("other", "trtllm_mla/xqa", "graph")]
    gone = replace(WAIVER, case="gone", place="sm*")
    assert idle([WAIVER, gone], planned) == [gone]
    found = [waiver.case for waiver in idle([gone, WAIVER], iter(planned))]
    said = "every waiver is held to all trials, also behind one that matched none of them"
    assert found == ["gone"], f"{said}: {found}"


def test_every_waiver_matches_a_planned_trial() -> None:
    texts = [f"{pair}/prompt{i}" for pair in PAIRS for i in range(len(prompts(pair)))]
    planned = [(case.id, subject.name, str(how)) for case, subject, how in trials()]
    assert idle(WAIVERS, [*planned, *product(texts, SUBJECTS, map(str, Execution))]) == []
