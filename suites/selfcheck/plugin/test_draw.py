"""``--draw N`` runs the same rows on other inputs, which the oracle alone judges."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.core.paths import ROOT
from harness.core.record import Record, Verdict, read_records

ROW = "mha-decode-bs2_ragged"
CHOICE = f"{ROW} and trtllm_mha/xqa-eager"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n0", "-q", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def drawn(folder: Path, *words: str) -> Record:
    done = run("suites/differential/test_cases.py", "-k", CHOICE, "--report", str(folder), *words)
    assert done.returncode == 0, done.stdout
    [record] = read_records(folder / "records.jsonl")
    assert record.verdict is Verdict.PASSED
    return record


def test_other_inputs_of_a_row_are_named_and_repeated_by_its_command(tmp_path: Path) -> None:
    usual = drawn(tmp_path / "usual")
    third = drawn(tmp_path / "third", "--draw", "3")
    assert (usual.case, third.case) == (ROW, f"{ROW}+draw3")
    assert third.axes == usual.axes
    errors = [[quantity.error for quantity in r.quantities] for r in (usual, third)]
    assert errors[0] != errors[1]
    command = shlex.split(third.reproduce)
    assert command[0] == "pytest"
    assert command[-2:] == ["--draw", "3"]
    again = tmp_path / "again"
    assert run(*command[1:], "--report", str(again)).returncode == 0
    [record] = read_records(again / "records.jsonl")
    assert [quantity.error for quantity in record.quantities] == errors[1]


@pytest.mark.parametrize("number", ["0", "-1", "x"])
def test_what_is_no_number_is_refused(number: str) -> None:
    done = run("suites/differential", "--draw", number)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"{number!r} is not accepted; accepted: 1 or more" in done.stderr
