"""Commands that are spread item by item print their items, and take one of them."""

from __future__ import annotations

import pytest

from ci.cluster.lanes import work
from ci.cluster.node import items
from fixtures import mutants, upstream
from fixtures.tables.mutants import ROWS
from harness.sglang.releases import RELEASES


def test_mutants_print_their_ids(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutants.main(["--ids"]) == 0
    assert capsys.readouterr().out.splitlines() == [row.id for row in ROWS]
    assert mutants.main(["--ids", "--id", ROWS[3].id]) == 0
    assert capsys.readouterr().out.splitlines() == [ROWS[3].id]
    assert mutants.main(["--ids", "-k", "no such mutant"]) == 2
    assert capsys.readouterr().out == ""


def test_words_for_a_command_choose_its_items_too() -> None:
    chosen = work("mutants", "cpu", ["-k", "flash-mla"])
    assert chosen.items[-3:] == ("--ids", "-k", "flash-mla")
    assert chosen.argv[-2:] == ("-k", "flash-mla")
    assert items(chosen) == tuple(row.id for row in ROWS if "flash-mla" in row.id)
    assert work("upstream-all", "cpu", ["-k", "mha"]).items[-1] == "--releases"


def test_a_mutant_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutants.main(["--id", ROWS[3].id[:-1]]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"specgate mutants: --id = {ROWS[3].id[:-1]!r} is not accepted")


def test_releases_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert upstream.main(["--releases"]) == 0
    assert capsys.readouterr().out.split() == [*RELEASES]
