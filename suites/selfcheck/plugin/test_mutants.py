"""A mutant is planted where its row says, meets the tests that execute it first, and survives only all."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from fixtures import mutants
from fixtures.mutants import ROOT, Copy, Fate, Kept, Outcome, main, matrix, show
from fixtures.mutation.asker import Asker
from fixtures.mutation.planting import locate, planted
from fixtures.mutation.recorder import Recorder
from fixtures.mutation.recording import Recording, record
from fixtures.tables.mutants import LAYERS, ROWS
from fixtures.tables.mutants.mutant import Mutant, Seam, Text
from harness.errors import UsageError

pytestmark = pytest.mark.untraced
TOY = '''\
"""A module with a seam of each kind."""
from dataclasses import dataclass
from functools import cached_property

ARROW = "→ ·"
LIMIT = 3
SHIFT = min(
    2, 0
)
if True:
    INSIDE, ELSE = 1, 2


def twice(x):
    """Two times."""
    return 2 * x


def caller(x):
    return twice(x) + LIMIT + SHIFT


@dataclass(frozen=True)
class Toy:
    size: int = 4
    kind = "toy"

    def grown(self, by=1):
        return self.size + by

    @property
    def half(self):
        return self.size / 2

    @cached_property
    def third(self):
        return self.size / 3

    @classmethod
    def named(cls):
        return cls.__name__

    @staticmethod
    def zero():
        return 0

    @property
    def wide(self):
        return self.size

    @wide.setter
    def wide(self, value):
        pass


async def later():
    return 1
'''
IMPORTS = "from harness.toy import *\nfrom harness.toy import Toy, caller, twice\n"
TESTS = {
    "test_two.py": "def test_two():\n    assert twice(2) == 4\n",
    "test_three.py": "import time\ndef test_three():\n    time.sleep(0.5)\n    assert twice(3) == 6\n",
    "test_caller.py": "def test_caller():\n    assert caller(0) == 3\n",
    "test_grown.py": "def test_grown():\n    assert Toy().grown() == 5\n",
    "cluster/test_nodes.py": "def test_nodes():\n    assert twice(2) == 4\n",
    "test_wrong.py": "def test_wrong():\n    assert twice(1) == 3\n",
    "test_process.py": (
        "import subprocess, sys\ndef test_process():\n"
        "    ask = 'from harness.toy import Toy; print(Toy.zero())'\n"
        "    assert subprocess.check_output([sys.executable, '-c', ask]) == b'0\\n'\n"
    ),
}
INI = """[pytest]
pythonpath = .
testpaths = suites
addopts = -p no:anyio -p no:hypothesispytest -p no:schemathesis
"""
TELLS_PLUGINS = """
import json, sys
from importlib.metadata import entry_points
from pathlib import Path

def run(notes, **_):
    plugins = {entry.module.partition(".")[0] for entry in entry_points(group="pytest11")}
    Path(notes).write_text(json.dumps({"imported": sorted(plugins & sys.modules.keys())}))
    return 0
"""
MODULE = "harness.toy"


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__.rpartition(".")[2])
def test_every_row_fits_the_source(layer: ModuleType) -> None:
    # One test a row would take longer to begin and to report than to ask.
    unfit = []
    for row in layer.ROWS:
        try:
            locate(row, ROOT)
        except UsageError as error:
            unfit.append(str(error))
    assert unfit == [], "\n".join(unfit)
    assert [row.id for row in layer.ROWS if not row.effect.endswith(".")] == []


def test_ids_are_unique() -> None:
    assert len({row.id for row in ROWS}) == len(ROWS)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project in little, with the folders that a recording looks at."""
    root = tmp_path_factory.mktemp("mutants") / "toy"
    for folder in ("harness", "ci", "fixtures", "suites/cluster"):
        (root / folder).mkdir(parents=True)
    for package in ("harness", "fixtures"):  # before those that PYTHONPATH may name
        (root / package / "__init__.py").touch()
    shutil.copytree(ROOT / "fixtures" / "mutation", root / "fixtures" / "mutation")
    (root / "pytest.ini").write_text(INI)
    (root / "harness" / "toy.py").write_text(TOY)
    for name, text in TESTS.items():
        (root / "suites" / name).write_text(IMPORTS + text)
    return root


@pytest.fixture(scope="module")
def recording(toy: Path) -> Recording:
    seen: list[int] = []
    folder = toy.parent / "recording"
    record(toy, folder, "the toy", 1, seen.append)
    assert seen[-1] == 100
    return Recording(folder, toy)


@pytest.fixture(scope="module")
def copy(toy: Path) -> Iterator[Copy]:
    with Copy(toy) as made:
        yield made


def seam(name: str, replacement: str, id_: str = "a") -> Seam:
    return Seam(id=id_, effect="It breaks.", seam=f"{MODULE}.{name}", replacement=replacement)


def evaluated(root: Path, expression: str) -> str:
    """What another process makes of an expression over the toy."""
    ask = f"import harness.toy as toy; print({expression})"
    return subprocess.check_output([sys.executable, "-c", ask], cwd=root, text=True).strip()


@pytest.mark.parametrize(
    ("name", "replacement", "expression", "before", "after"),
    [
        ("twice", "lambda original, x: original(x) + LIMIT", "toy.caller(1), toy.twice.__doc__", "5 Two times.", "8 Two times."),
        ("LIMIT", "original + 4", "toy.caller(0)", "3", "7"),
        ("Toy.grown", "lambda original, self, by=1: original(self, by=by + self.size)", "toy.Toy().grown()", "5", "9"),
        ("Toy.half", "lambda original, self: original(replace(self, size=20))", "toy.Toy().half", "2.0", "10.0"),
        ("Toy.third", "lambda original, self: 1", "toy.Toy(9).third", "3.0", "1"),
        ("Toy.named", "lambda original, cls: original(cls) + 's'", "toy.Toy.named()", "Toy", "Toys"),
        ("Toy.zero", "lambda original: 1", "toy.Toy().zero()", "0", "1"),
        ("Toy.size", "original * 2", "toy.Toy().size", "4", "8"),
        ("ARROW", "original[::-1]", "ascii(toy.ARROW)", r"'\u2192 \xb7'", r"'\xb7 \u2192'"),
        ("Toy.kind", "'car'", "toy.Toy().kind", "toy", "car"),
    ],
)  # fmt: skip
def test_a_seam_of_each_kind_is_planted_and_undone(
    toy: Path, name: str, replacement: str, expression: str, before: str, after: str
) -> None:
    source = toy / "harness" / "toy.py"
    assert evaluated(toy, expression) == before
    changed = source.stat().st_mtime_ns
    with planted(seam(name, replacement), toy):
        assert evaluated(toy, expression) == after
    assert source.read_text() == TOY
    told = "with a new time the source may be taken for a compiled mutant of its size"
    assert source.stat().st_mtime_ns == changed, told
    assert evaluated(toy, expression) == before


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (seam("twice", "lambda original:"), r"mutant a: replacement = 'lambda original:'"),
        (seam("twice", "lambda original: 1"), r"function of the original and of \(x\)"),
        (seam("Toy.grown", "lambda original, self: 1"), r"of the original and of \(self, by=1\)"),
        (seam("thrice", "1"), r"seam = 'harness\.toy\.thrice' .* not 0 times"),
        (seam("Toy.wide", "1"), r"seam = 'harness\.toy\.Toy\.wide' .* not 2 times"),
        (seam("Toy", "1"), r"seam = 'harness\.toy\.Toy' .* not 0 times"),
        (seam("later", "1"), r"seam = 'harness\.toy\.later' .* no coroutine"),
        (Seam(id="a", effect="", seam="harness.cat.x", replacement="1"), r"seam = 'harness\.cat\.x'"),
        (Text(id="a", effect="", path="harness/cat.py", old="", new=""), r"path = 'harness/cat\.py'"),
        (Text(id="a", effect="", path="harness/toy.py", old="def", new="x"), r"old = 'text found \d+ times'"),
        (Text(id="a", effect="", path="harness/toy.py", old="2 * x", new="2 *"), r"mutant a: new = "),
        (Text(id="a", effect="", path="harness/toy.py", old="2 * x", new="(2 * x)"), r"new = 'the same"),
    ],
)  # fmt: skip
def test_a_row_that_does_not_fit_is_named(toy: Path, row: Mutant, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        locate(row, toy)
    assert (toy / "harness" / "toy.py").read_text() == TOY


def test_a_mutant_is_told_by_the_first_red_phase_of_its_test(tmp_path: Path) -> None:
    asker = Asker(None, (), tmp_path / "notes")
    for when, said in (("call", "the rule that is broken"), ("teardown", "what it left open")):
        asker.pytest_runtest_logreport(
            pytest.TestReport("a.py::b", ("a.py", 1, "b"), {}, "failed", said, when)  # type: ignore[arg-type]
        )
    noted = json.loads((tmp_path / "notes").read_text())
    told = "the test's own message names the rule, its teardown's does not"
    assert noted["message"] == "the rule that is broken", f"{told}: {noted}"


def test_a_text_in_a_nested_function_is_of_that_one(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(
        "def outer(x):\n    def inner():\n        return x\n    return inner\n"
    )
    site = locate(Text(id="a", effect="", path="toy.py", old="return x", new="return 1"), tmp_path)
    told = "who executes the function right around a text is asked before who executes another"
    assert (site.name, [*site.around]) == ("inner", [3]), told


def test_a_text_in_a_signature_is_asked_of_those_who_call_the_function(toy: Path) -> None:
    text = Text(id="a", effect="", path="harness/toy.py", old="self, by=1", new="self, by=2")
    site = locate(text, toy)
    body = TOY.splitlines()[site.lines.start - 1 : site.lines.stop - 1]
    assert (site.lines, body) == (site.around, ["        return self.size + by"])


def test_of_a_text_the_lines_that_change_are_asked_about(toy: Path) -> None:
    around = "        pass\n\n\nasync def later():\n    return "
    text = Text(id="a", effect="", path="harness/toy.py", old=around + "1", new=around + "2")
    site = locate(text, toy)
    told = "the lines around a change belong to others, whose tests do not execute it"
    assert (site.name, TOY.splitlines()[site.lines.start - 1]) == ("later", "    return 1"), told
    above = "    @property\n    def half"
    row = Text(id="a", effect="", path="harness/toy.py", old=above, new=above.partition("\n")[2])
    assert locate(row, toy).name == "half", "a decorator is asked about by those who call below it"


def names(order: list[str]) -> list[str]:
    return [name.partition("::")[2] for name in order]


def test_a_skipped_test_is_asked_nothing(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for name, outcome in (("ran", "passed"), ("skipped", "skipped")):
        recorder.pytest_runtest_logreport(
            pytest.TestReport(name, ("a.py", 1, name), {}, outcome, None, "setup")  # type: ignore[arg-type]
        )
    recorder.pytest_sessionfinish()
    known = [*json.loads((tmp_path / "seconds.json").read_text())]
    assert known == ["ran"], f"a test that was skipped cannot notice a mutant: {known}"


def test_tests_that_execute_a_seam_come_first_and_the_fastest_of_them_at_the_start(
    recording: Recording, toy: Path
) -> None:
    order = names(recording.order(locate(seam("Toy.grown", "1"), toy)))
    assert order[0] == "test_grown"
    order = names(recording.order(locate(seam("twice", "1"), toy)))
    assert set(order[:2]) == {"test_two", "test_caller"}
    assert order[2] == "test_three"
    assert set(order[3:]) == {"test_grown", "test_process"}


def test_a_constant_is_asked_of_those_who_use_it(recording: Recording, toy: Path) -> None:
    text = Text(id="toy", path="harness/toy.py", effect="Toy.", old="2, 0", new="2, 1")
    for row in (seam("LIMIT", "1"), text):
        assert names(recording.order(locate(row, toy)))[0] == "test_caller"


def test_a_test_is_known_by_what_its_processes_execute(recording: Recording, toy: Path) -> None:
    assert names(recording.order(locate(seam("Toy.zero", "1"), toy)))[0] == "test_process"


def test_those_that_execute_a_site_are_asked_while_they_fit(
    recording: Recording, toy: Path
) -> None:
    grown = locate(seam("Toy.grown", "1"), toy)
    assert names(recording.executing(grown, 60.0)) == ["test_grown"]
    assert recording.executing(grown, 0.1) == []
    on_import = locate(seam("LIMIT", "1"), toy)
    assert recording.executing(on_import, 60.0) == recording.order(on_import)


def test_a_mutant_that_nobody_executes_is_told_apart(recording: Recording, copy: Copy) -> None:
    wide = Text(id="wide", effect="", path="harness/toy.py", old="        pass", new="        self")
    told: list[Outcome] = []
    rows = (wide, square("seen", "x * x"), square("unseen", "original(x)"))
    matrix(rows, [copy], recording, {}, told.append, 60.0)
    found = {each.id: each for each in told}
    assert found["wide"].fate is Fate.UNEXECUTED
    assert found["seen"].fate is Fate.KILLED
    assert found["unseen"].fate is Fate.SURVIVED
    assert found["unseen"].asked < len(TESTS), "the others do not execute it"


def test_batches_grow_and_hold_each_test_once(recording: Recording, toy: Path) -> None:
    order = recording.order(locate(seam("twice", "1"), toy))
    batches = [names for names, _ in recording.batches([*order, order[0], "unknown"][:-2])]
    assert sorted(name for batch in batches for name in batch) == sorted(order)


def square(id_: str, replacement: str) -> Seam:
    return seam("twice", f"lambda original, x: {replacement}", id_)


def test_matrix(recording: Recording, copy: Copy) -> None:
    rows = (
        square("seen", "x * x"),
        square("unseen", "original(x)"),
        square("hung", "__import__('time').sleep(60)"),
        square("ended", "__import__('os').kill(__import__('os').getpid(), 9)"),
        Text(id="broken", effect="", path="harness/toy.py", old="LIMIT = 3", new="LIMIT = three"),
    )
    told: list[Outcome] = []
    killers = {"seen": "suites/test_three.py::test_three"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mutants, "PATIENCE_S", 5.0)
        patch.setattr(mutants, "PATIENCE_FACTOR", 0.0)
        ended = matrix(rows, [copy], recording, killers, told.append)
    fates = {each.id: each.fate for each in ended}
    assert fates == {
        "seen": Fate.KILLED,
        "unseen": Fate.SURVIVED,
        "hung": Fate.HUNG,
        "ended": Fate.KILLED,
        "broken": Fate.BROKEN,
    }
    found = {each.id: each for each in told}
    assert found["seen"].test == killers["seen"]
    assert found["seen"].asked == 1
    assert "assert 9 == 6" in found["seen"].message
    assert found["unseen"].asked == len(TESTS) - 1
    assert "SIGKILL" in found["ended"].message
    assert "three" in found["broken"].message


@pytest.fixture
def wrong(recording: Recording) -> Recording:
    """A recording of a test that was green then, and is red without a mutant."""
    green = {**recording._green, "suites/test_wrong.py::test_wrong": (0.0, 0.0)}
    made = Recording(recording._lines.parent, recording._root)
    made._green = green
    return made


def test_a_killer_that_is_red_without_the_mutant_notices_nothing(
    wrong: Recording, copy: Copy
) -> None:
    killers = {"unseen": "suites/test_wrong.py::test_wrong"}
    told: list[Outcome] = []
    [ended] = matrix([square("unseen", "original(x)")], [copy], wrong, killers, told.append)
    assert [each.fate for each in told] == [Fate.KILLED, Fate.SURVIVED]
    assert ended == told[-1]


def outcome(id_: str, fate: Fate, test: str = "suites/t.py::test_t") -> Outcome:
    return Outcome(
        id=id_, effect=f"{id_} breaks.", fate=fate, test=test, message="m", asked=2, seconds=1.0
    )


def test_what_was_noticed_in_this_source_is_known(tmp_path: Path) -> None:
    path = tmp_path / "mutants.jsonl"
    fates = (Fate.KILLED, Fate.SURVIVED, Fate.HUNG, Fate.BROKEN)
    for row, fate in zip(ROWS[:4], fates, strict=True):
        Kept(path, ROWS, "this").add(outcome(row.id, fate))
    expected = [outcome(ROWS[0].id, Fate.KILLED), outcome(ROWS[2].id, Fate.HUNG)]
    assert Kept(path, ROWS, "this").noticed(ROWS) == expected
    assert Kept(path, ROWS, "this").noticed(ROWS[1:]) == expected[1:]
    assert Kept(path, ROWS, "another").noticed(ROWS) == [], "what it says of another source"
    changed = [replace(row, effect="Something else breaks.") for row in ROWS]
    assert Kept(path, changed, "this").noticed(changed) == [], "another row may have another fate"


def test_an_outcome_that_is_known_is_not_asked_again_but_its_killer_is(
    wrong: Recording, copy: Copy
) -> None:
    rows = (square("rightly", "original(x)"), square("wrongly", "original(x)"))
    known = [
        outcome("rightly", Fate.KILLED, "suites/test_three.py::test_three"),
        outcome("wrongly", Fate.KILLED, "suites/test_wrong.py::test_wrong"),
    ]
    told: list[Outcome] = []
    ended = matrix(rows, [copy], wrong, {}, told.append, known=known)
    assert [(each.id, each.fate) for each in told] == [("wrongly", Fate.SURVIVED)]
    assert ended == [known[0], told[0]]


def test_resume_goes_on_and_a_run_without_it_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[list[Outcome]] = []

    def judged(*_: object, known: list[Outcome], **__: object) -> list[Outcome]:
        handed.append([*known])
        return handed[0]

    monkeypatch.setattr(mutants, "judged", judged)
    seen = outcome(ROWS[0].id, Fate.KILLED)
    Kept(tmp_path / "mutants.jsonl", ROWS, mutants.digest(mutants.sources())).add(seen)
    words = ["--report", str(tmp_path)]
    assert [main([*words, "--resume"]), main(words)] == [0, 0]
    assert handed == [[seen], []], "outcomes of this source that specgate mutants goes on with"


def test_what_is_missed_is_said_with_its_effect_in_80_columns() -> None:
    text = io.StringIO()
    both = [outcome("seen", Fate.KILLED), outcome("missed", Fate.SURVIVED)]
    assert show(both, Console(file=text, width=80)) == 1
    lines = text.getvalue().splitlines()
    assert lines[0].startswith("survived: missed: missed breaks. (after 2 tests)")
    assert lines[-1] == "1 of 2 noticed"
    assert max(map(len, lines)) <= 80
    assert show(both[:1], Console(file=text, width=80)) == 0


def test_the_last_outcomes_are_kept_and_their_killers_asked_first(tmp_path: Path) -> None:
    path = tmp_path / "mutants.jsonl"
    for fate in (Fate.SURVIVED, Fate.KILLED):
        Kept(path, ROWS).add(outcome(ROWS[0].id, fate))
    Kept(path, ROWS).add(outcome("gone", Fate.KILLED))
    Kept(path, ROWS).add(outcome(ROWS[1].id, Fate.HUNG))
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == [
        ROWS[0].id,
        ROWS[1].id,
    ]
    assert Kept(path, ROWS).killers == {ROWS[0].id: "suites/t.py::test_t"}


def test_outcomes_outlive_a_run_that_is_killed_as_it_notes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path, text: str, **_: object) -> None:
        path.write_bytes(text[: len(text) // 2].encode())
        raise KeyboardInterrupt  # as SIGKILL, in the middle of a file

    path = tmp_path / "mutants.jsonl"
    kept = Kept(path, ROWS)
    kept.add(outcome(ROWS[0].id, Fate.KILLED))
    before = path.read_text()
    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        kept.add(outcome(ROWS[1].id, Fate.HUNG))
    said = "what was known is whole, and the next run reads it"
    assert path.read_text() == before, said


def test_what_cannot_be_asked_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-k", "no such mutant"]) == 2
    assert "-k = 'no such mutant'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["--workers", "0"])
    assert "argument --workers: '0' is not accepted; accepted: 1 or" in capsys.readouterr().err


def test_what_is_red_of_every_mutant_notices_none(pytestconfig: pytest.Config) -> None:
    other, table = "a.py::test_a", f"b.py::{test_every_row_fits_the_source.__name__}[a-row]"
    told = "that a row no longer fits where it has been planted notices nothing"
    for asked in (None, [table, other]):
        items: list[Any] = [SimpleNamespace(nodeid=name) for name in (table, other)]
        Asker(asked, (), Path()).pytest_collection_modifyitems(pytestconfig, items)
        assert [item.nodeid for item in items] == [other], told


def test_a_process_that_ends_while_it_notes_leaves_the_last_whole_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asker = Asker(None, (), tmp_path / "notes")
    asker.pytest_runtest_logstart("test_first")
    write = Path.write_text

    def killed(path: Path, text: str, encoding: str) -> int:
        write(path, text[: len(text) // 2], encoding)
        raise SystemExit

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(SystemExit):
        asker.pytest_runtest_logstart("test_second")
    noted = json.loads((tmp_path / "notes").read_text())
    assert noted == {"asked": 1, "now": "test_first"}


@pytest.fixture
def own_asker(copy: Copy) -> Iterator[Path]:
    """What a fork imports, as it was after the test."""
    asker = copy.root / "fixtures" / "mutation" / "asker.py"
    its_own = asker.read_text()
    yield asker
    asker.write_text(its_own)


def test_no_plugin_of_pytest_is_imported_before_the_fork(copy: Copy, own_asker: Path) -> None:
    own_asker.write_text(TELLS_PLUGINS)
    _, noted = copy.ask(None, (), 60.0)
    said = "pytest warns of a plugin that was imported before it ran"
    assert noted["imported"] == [], f"{said}: {noted}"


def test_a_mutant_of_the_notes_themselves_ends_no_table(copy: Copy, own_asker: Path) -> None:
    own_asker.write_text("def run(notes, **_):\n    open(notes, 'w').write('{\"asked\": ')\n")
    fate, noted = copy.ask(None, (), 60.0)
    assert (fate, noted["message"]) == (Fate.KILLED, "what it noted is no JSON")
