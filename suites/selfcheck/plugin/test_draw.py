"""``--draw N`` runs the same rows on other inputs, which the oracle alone judges."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from fixtures import plan
from fixtures.pytest_plugin.run_again import run_again
from harness.core.paths import ROOT
from harness.core.record import Record, Verdict, read_records

pytestmark = pytest.mark.untraced
pytest_plugins = ["pytester"]

IMPORTED = plan
"""With torch's operators, registered once in a process: pytester forgets what a run imports."""
ROW = "mha-decode-bs2_ragged"
CHOICE = f"{ROW} and trtllm_mha/xqa-eager"
Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs pytest in the repository, in this process."""
    monkeypatch.chdir(ROOT)

    def start(*words: str) -> pytest.RunResult:
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-n0", "-q", *words)

    return start


def drawn(run: Run, folder: Path, *words: str) -> Record:
    done = run("suites/differential/test_cases.py", "-k", CHOICE, "--report", str(folder), *words)
    assert done.ret == 0
    [record] = read_records(folder / "records.jsonl")
    assert record.verdict is Verdict.PASSED
    return record


def test_other_inputs_of_a_row_are_named_and_repeated_by_its_command(
    run: Run, tmp_path: Path
) -> None:
    usual = drawn(run, tmp_path / "usual")
    third = drawn(run, tmp_path / "third", "--draw", "3")
    assert (usual.case, third.case) == (ROW, f"{ROW}+draw3")
    assert third.axes == usual.axes
    errors = [[quantity.error for quantity in r.quantities] for r in (usual, third)]
    assert errors[0] != errors[1]
    command = shlex.split(third.reproduce)
    assert command[0] == "pytest"
    assert command[-2:] == ["--draw", "3"]
    again = tmp_path / "again"
    assert run(*command[1:], "--report", str(again)).ret == 0
    [record] = read_records(again / "records.jsonl")
    assert [quantity.error for quantity in record.quantities] == errors[1]


def test_the_command_of_a_row_of_triples_has_their_option(run: Run, tmp_path: Path) -> None:
    pairs = {case.id for case, _, _ in plan.covering_trials(None, 2)}
    case, subject, execution = next(
        trial for trial in plan.covering_trials(None, 3) if trial[0].id not in pairs
    )
    chosen = f"test_case[{case.id}-{subject.name}-{execution}]"
    words = (f"suites/differential/test_cases.py::{chosen}", "--report", str(tmp_path))
    assert run(*words).ret == pytest.ExitCode.USAGE_ERROR
    assert run(*words, "--covering", "3").ret == 0
    [record] = read_records(tmp_path / "records.jsonl")
    assert shlex.split(record.reproduce)[2:] == ["--covering", "3"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("cpu", 2, None, None), ""),
        (("cuda:1", 2, None, None), " --device cuda"),
        (("cpu", 0, 7, None), " --covering 0 --draw 7"),
        (("cpu", 2, None, Path("a checkout")), " --flashinfer 'a checkout'"),
    ],
)
def test_a_command_has_the_options_that_are_not_usual(
    options: tuple[str, int, int | None, Path | None], words: str
) -> None:
    names = ("--device", "--covering", "--draw", "--flashinfer")
    asked = cast(
        "pytest.Config",
        SimpleNamespace(getoption=dict(zip(names, options, strict=True)).__getitem__),
    )
    assert run_again("pytest 'a.py::b[c]'", asked) == f"pytest 'a.py::b[c]'{words}"


@pytest.mark.parametrize("number", ["0", "-1", "x"])
def test_what_is_no_number_is_refused(run: Run, number: str) -> None:
    done = run("suites/differential", "--draw", number)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    assert f"{number!r} is not accepted; accepted: 1 or more" in done.stderr.str()
