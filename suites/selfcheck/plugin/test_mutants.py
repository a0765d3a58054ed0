"""The kill matrix says who noticed, and counts nothing that proves nothing."""

from __future__ import annotations

import ast
import io
from pathlib import Path
from queue import SimpleQueue

import pytest
from rich.console import Console

from fixtures import mutants
from fixtures.mutants import ROOT, Fate, ask, main, matrix, planted, show
from fixtures.tables.mutants import ROWS
from fixtures.tables.mutants.mutant import Mutant
from harness.errors import UsageError

TWICE = "def twice(x):\n    return 2 * x\n"
TESTS = {
    "test_two.py": "from twice import twice\ndef test_two():\n    assert twice(2) == 4\n",
    "test_three.py": "from twice import twice\ndef test_three():\n    assert twice(3) == 6\n",
    "test_wrong.py": "def test_wrong():\n    assert 1 == 2\n",
    "test_none.py": "",
    "test_slow.py": "import time\ndef test_slow():\n    time.sleep(60)\n",
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_every_row_changes_one_place_into_python(row: Mutant) -> None:
    source = (ROOT / row.path).read_text(encoding="utf-8")
    assert source.count(row.old) == 1
    assert ast.unparse(ast.parse(source.replace(row.old, row.new))) != ast.unparse(
        ast.parse(source)
    )
    assert all((ROOT / word).exists() for word in row.tests if word.startswith("suites"))


def test_ids_are_unique() -> None:
    assert len({row.id for row in ROWS}) == len(ROWS)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "twice.py").write_text(TWICE)
    for name, text in TESTS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def square(id_: str, *tests: str) -> Mutant:
    return Mutant(id=id_, path="twice.py", old="2 * x", new="x * x", tests=tests)


def test_a_defect_is_taken_out_again(root: Path) -> None:
    with planted(square("a"), root):
        assert "x * x" in (root / "twice.py").read_text()
    assert (root / "twice.py").read_text() == TWICE


def test_a_row_that_no_longer_fits_is_named(root: Path) -> None:
    (root / "twice.py").write_text(TWICE * 2)
    with (
        pytest.raises(UsageError, match=r"a: twice\.py holds its text = 2 .* accepted: once"),
        planted(square("a"), root),
    ):
        pytest.fail("it does not fit")


def test_only_red_tests_notice(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(["test_two.py"], root).fate is Fate.SURVIVED
    red = ask(["test_wrong.py"], root)
    assert red.fate is Fate.KILLED
    assert "test_wrong.py::test_wrong" in red.witness
    assert ask(["test_none.py"], root).fate is Fate.BROKEN
    monkeypatch.setattr(mutants, "PATIENCE_S", 2.0)
    assert ask(["test_slow.py"], root).fate is Fate.HUNG


def test_matrix(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copies(into: Path, count: int) -> SimpleQueue[Path]:
        free: SimpleQueue[Path] = SimpleQueue()
        free.put(root)
        return free

    monkeypatch.setattr(mutants, "copies", copies)
    rows = (
        square("seen", "test_three.py"),
        square("unseen", "test_two.py"),
        square("unsound", "test_wrong.py"),
    )
    fates = matrix(rows, workers=1)
    assert {name: outcome.fate for name, outcome in fates.items()} == {
        "seen": Fate.KILLED,
        "unseen": Fate.SURVIVED,
        "unsound": Fate.BROKEN,
    }
    assert fates["unsound"].witness.startswith("red without it: FAILED test_wrong.py")
    text = io.StringIO()
    assert show(fates, Console(file=text, width=160)) == 1
    assert "1 of 3 noticed" in text.getvalue()
    assert show({"seen": fates["seen"]}, Console(file=text)) == 0


def test_what_cannot_be_asked_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-k", "nothing"]) == 2
    assert "-k = 'nothing'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["--workers", "0"])
    assert "argument --workers: '0' is not accepted; accepted: 1 or" in capsys.readouterr().err
