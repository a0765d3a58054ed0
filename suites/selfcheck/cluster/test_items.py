"""Commands that are spread item by item print their items, and take one of them."""

from __future__ import annotations

import pytest

from fixtures import mutants, upstream
from fixtures.tables.mutants import ROWS
from harness.sglang.releases import RELEASES


def test_mutants_print_their_ids(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutants.main(["--ids"]) == 0
    assert capsys.readouterr().out.splitlines() == [row.id for row in ROWS]
    assert mutants.main(["--ids", "--id", ROWS[3].id]) == 0
    assert capsys.readouterr().out.splitlines() == [ROWS[3].id]


def test_a_mutant_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutants.main(["--id", ROWS[3].id[:-1]]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"specgate mutants: --id = {ROWS[3].id[:-1]!r} is not accepted")


def test_releases_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert upstream.main(["--releases"]) == 0
    assert capsys.readouterr().out.split() == [*RELEASES]
