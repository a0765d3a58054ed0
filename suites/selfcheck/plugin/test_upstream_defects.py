"""Defects are planted beside the release; a judge tells the first question that they turn red."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fixtures import upstream_defects
from fixtures.tables.upstream_defects import RELEASE, UPSTREAM_DEFECTS, UpstreamDefect
from fixtures.upstream_defects import (
    KIT,
    OURS,
    REGISTERED,
    Judged,
    Notice,
    first_red,
    main,
    planned,
)
from fixtures.upstream_judges.overlay import edited, overlay
from fixtures.upstream_judges.questions import Answer, Found, Question, answers
from harness.errors import UsageError
from harness.sglang.releases import find_release, source_of

DEFECT = UpstreamDefect(
    id="off-by-one",
    path="srt/lengths.py",
    old="length + step",
    new="length",
    effect="A step is lost.",
    source="#1",
)
LEFT_BEHIND: list[str] = []
QUIET = Notice(question="", message="", seconds=1.0, asked=3)
LOUD = Notice(question="a row", message="wrong_numbers: off", seconds=0.5, asked=1)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "release"
    for name, text in {
        "srt/lengths.py": "def at(length, step):\n    return length + step\n",
        "srt/pool.py": "SIZE = 4\n",
        "srt/layers/mask.py": "",
        "version.py": "",
    }.items():
        path = folder / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def test_an_overlay_differs_in_one_file_and_leaves_the_release_alone(
    source: Path, tmp_path: Path
) -> None:
    compiled = source / "sglang" / "srt" / "__pycache__"
    compiled.mkdir()
    for stem in ("lengths", "pool"):
        (compiled / f"{stem}.cpython-311.pyc").touch()
    tree = overlay(DEFECT, source, tmp_path / "tree") / "sglang"
    kept = [path.name for path in (tree / "srt" / "__pycache__").iterdir()]
    assert kept == ["pool.cpython-311.pyc"], "what was compiled of the edited file is not the edit"
    assert (tree / DEFECT.path).read_text() == "def at(length, step):\n    return length\n"
    assert "length + step" in (source / "sglang" / DEFECT.path).read_text()
    for name in ("srt/pool.py", "srt/layers/mask.py", "version.py"):
        assert (tree / name).samefile(source / "sglang" / name)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"path": "srt/gone.py"}, "path = 'srt/gone.py'"),
        ({"old": "nowhere"}, "old = 'text found 0 times'"),
        ({"old": "length"}, "old = 'text found 2 times'"),
        ({"new": "length +"}, "new = 'invalid syntax"),
    ],
)
def test_a_row_that_does_not_fit_is_refused(
    source: Path, changes: dict[str, str], told: str
) -> None:
    with pytest.raises(UsageError, match="off-by-one") as refused:
        edited(replace(DEFECT, **changes), source)
    assert told in str(refused.value)


def test_rows_change_something_in_the_backends_of_a_family() -> None:
    assert len(UPSTREAM_DEFECTS) >= 24
    for defect in UPSTREAM_DEFECTS.values():
        assert defect.old != defect.new
        assert set(defect.families) <= {"mha", "mla"}
        assert defect.families


def test_every_row_fits_the_release() -> None:
    folder = source_of(find_release(RELEASE))
    if not (folder / "sglang").is_dir():
        pytest.skip(f"sglang {RELEASE} is not installed in {folder}")
    for defect in UPSTREAM_DEFECTS.values():
        assert defect.new in edited(defect, folder)


def test_a_fork_answers_and_what_ends_it_is_told() -> None:
    given = answers(
        [
            _question("green"),
            _question("red", _red),
            _question("dead", lambda: os.kill(os.getpid(), signal.SIGKILL)),
            _question("left", lambda: os._exit(0)),
            _question("exits", _exits),
            _question("interrupted", _interrupted),
            _question("hung", lambda: time.sleep(60)),
            _question("counted", lambda: ("", {"host_syncs": 1})),
        ],
        patience_s=2.0,
    )
    told = {answer.name: (answer.message, answer.counts) for answer in given}
    assert told == {
        "green": ("", {}),
        "red": ("ValueError: off by one", {}),
        "dead": ("the process ended by SIGKILL", {}),
        "left": ("the process ended by exit code 0", {}),
        "exits": ("SystemExit: no kit", {}),
        "interrupted": ("", {}),
        "hung": ("no answer within 2 s", {}),
        "counted": ("", {"host_syncs": 1}),
    }


def test_what_is_asked_again_is_given_up_as_soon() -> None:
    def hangs() -> Found:
        time.sleep(20)
        return "", {}

    asked = [_question("green"), _question("hung", hangs)]
    told = [answer.message for answer in answers(asked, patience_s=2.0)]
    assert told == ["", "no answer within 2 s"]


def test_an_answer_tells_whether_sglang_asks_its_question() -> None:
    asked = [replace(_question("own"), is_registered=True), _question("ours", _red)]
    given = list(answers(asked))
    assert [answer.is_registered for answer in given] == [True, False]
    told = "an answer is of its question's kind, by which questions take turns"
    assert [answer.kind for answer in given] == ["kind"] * 2, told


def test_what_an_earlier_question_left_behind_decides_nothing() -> None:
    def leaves() -> Found:
        LEFT_BEHIND.append("stale")
        return "", {}

    clean = _question("clean", lambda: (" ".join(LEFT_BEHIND), {}))
    given = answers([_question("leaves", leaves), clean])
    assert [answer.message for answer in given] == ["", ""]


def test_a_count_above_the_release_is_red_and_one_below_is_not() -> None:
    answer = Answer(name="cost", kind="cost", counts={"host_syncs": 1, "recorded": 9})
    assert answer.against({"host_syncs": 0, "recorded": 9}) == "host_syncs = 1, 0 without"
    assert answer.against({"host_syncs": 1, "recorded": 10}) == ""


def test_the_plan_takes_turns_between_kinds_and_leaves_out_what_is_red_anyway() -> None:
    given = [
        Answer(name=name, kind=kind, seconds=seconds, message=message)
        for name, kind, seconds, message in (
            ("a1", "a", 3.0, ""),
            ("a2", "a", 1.0, ""),
            ("b1", "b", 2.0, ""),
            ("b2", "b", 0.1, "KernelRefusal"),
        )
    ]
    assert [name for name, _ in planned(given)] == ["a2", "b1", "a1"]


def test_a_judge_stops_at_the_first_red_question(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [_question("green"), _question("red", _red), _question("never")]
    found = first_red(asked, [("green", {}), ("red", {}), ("never", {})])
    assert (found.question, found.message, found.asked) == ("red", "ValueError: off by one", 2)
    given = [Answer(name=n, kind="kind", seconds=s) for n, s in (("green", 1.5), ("never", 0.25))]
    monkeypatch.setattr(upstream_defects, "answers", lambda _: (answer for answer in given))
    missed = first_red(asked, [("never", {}), ("green", {})])
    assert missed.seconds == 1.75, "how long it took is how long all of them took"
    assert (missed.question, missed.asked) == ("", 2)


def test_shares_of_the_unmodified_release_are_all_of_its_questions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def questions_of(judge: str, *_: object) -> list[Question]:
        return [_question(f"{judge} {number}") for number in range(5)]

    monkeypatch.setattr(upstream_defects, "questions_of", questions_of)
    shares = [upstream_defects.unmodified(Path(), ["mha"], share, 2) for share in range(2)]
    for judge in (OURS, KIT):
        names = [[answer.name for answer in share[judge]] for share in shares]
        assert names == [[f"{judge} {n}" for n in numbers] for numbers in ((0, 2, 4), (1, 3))]


class Threads(ThreadPoolExecutor):
    """Stands in for processes, which would not see what a test replaces."""

    def __init__(self, workers: int, *_: object, **__: object) -> None:
        super().__init__(workers)


def test_every_defect_is_judged_by_what_is_green_without_one(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    families: list[list[str]] = []
    slow, quick = (replace(DEFECT, id=name) for name in ("slow", "quick"))
    ended: list[str] = []

    def unmodified(_: Path, given: list[str], share: int, shares: int) -> dict[str, list[Answer]]:
        families.append(given)
        kit = [
            Answer(name=f"own{share}", kind="own", is_registered=True),
            Answer(name=f"other{share}", kind="other"),
        ]
        return {OURS: [Answer(name=f"row{share}", kind="row")], KIT: kit}

    def first_reds(
        tree: Path, _: Sequence[str], plans: Mapping[str, upstream_defects.Plan]
    ) -> Mapping[str, Notice]:
        while tree.name == "slow" and ended != ["quick"]:
            time.sleep(0.01)
        ended.append(tree.name)
        return {j: replace(QUIET, question=" ".join(n for n, _ in p)) for j, p in plans.items()}

    monkeypatch.setattr(upstream_defects, "ProcessPoolExecutor", Threads)
    monkeypatch.setattr(upstream_defects, "unmodified", unmodified)
    monkeypatch.setattr(upstream_defects, "first_reds", first_reds)
    mixed = replace(quick, families=("mla",))
    _, rows = upstream_defects.judged([slow, mixed], source, 2, lambda _: None)
    assert [row.defect.id for row in rows] == ["slow", "quick"], "judged in the table's order"
    told = f"questions are of every family that a defect is of, ['mha', 'mla'], not {families}"
    assert families == [["mha", "mla"]] * 2, told
    told = "a judge is asked all that is its own, the kit as registered no question of other kinds"
    for row in rows:
        asked = {judge: sorted(notice.question.split()) for judge, notice in row.by.items()}
        assert asked == {
            OURS: ["row0", "row1"],
            KIT: ["other0", "other1", "own0", "own1"],
            REGISTERED: ["own0", "own1"],
        }, f"{told}: {asked}"


def test_nine_of_ten_defects_are_enough(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = {f"d{number}": replace(DEFECT, id=f"d{number}") for number in range(10)}
    monkeypatch.setattr(upstream_defects, "UPSTREAM_DEFECTS", table)
    for missed, code in ((1, 0), (2, 1)):
        ours = [QUIET] * missed + [LOUD] * (10 - missed)
        rows = [
            Judged(defect=defect, by={OURS: notice, KIT: QUIET, REGISTERED: QUIET})
            for defect, notice in zip(table.values(), ours, strict=True)
        ]
        monkeypatch.setattr(
            upstream_defects, "judged", lambda *_, rows=rows: ({OURS: [], KIT: []}, rows)
        )
        assert main(["--source", str(source)]) == code
        assert f"ours: {10 - missed} of 10 noticed" in capsys.readouterr().out


@pytest.mark.parametrize(("notice", "code"), [(LOUD, 0), (QUIET, 1)])
def test_the_table_has_both_judges_and_the_exit_code_is_ours(
    notice: Notice,
    code: int,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def judged(
        defects: Sequence[UpstreamDefect], *_: Any
    ) -> tuple[Mapping[str, Any], list[Judged]]:
        left_out = Answer(name="needs_cuda", kind="kit", message="no CUDA")
        rows = [Judged(defect=d, by={OURS: notice, KIT: QUIET, REGISTERED: QUIET}) for d in defects]
        return {OURS: [], KIT: [left_out]}, rows

    monkeypatch.setattr(upstream_defects, "judged", judged)
    told = tmp_path / "told.json"
    word = "verify-lengths-are-int64"
    assert main(["-k", word, "--source", str(source), "--json", str(told)]) == code
    out = capsys.readouterr().out
    assert "left out: needs_cuda: no CUDA" in out
    assert f"ours: {1 - code} of 1 noticed" in out
    assert "kit: 0 of 1 noticed" in out
    assert ("missed: verify-lengths-are-int64" in out) == bool(code)
    row = json.loads(told.read_text())["defects"][0]
    assert (row["id"], row["noticed"][OURS]["message"]) == (word, notice.message)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["-k", "nothing-like-it"], "-k = 'nothing-like-it'"),
        (["--source", "/nowhere"], "--source = '/nowhere' is not accepted"),
        (["--json", "/nowhere/told.json"], "--json = '/nowhere/told.json' is not accepted"),
    ],
)
def test_what_cannot_be_asked_is_one_line(
    argv: list[str],
    told: str,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(upstream_defects, "source_of", lambda _: source)
    monkeypatch.setattr(upstream_defects, "judged", lambda *_: pytest.fail("defects are judged"))
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"specgate upstream-defects: {told}")
    assert said.count("\n") == 1


def _red() -> Found:
    raise ValueError("off by one")


def _exits() -> Found:
    raise SystemExit("no kit")


def _interrupted() -> Found:
    os.kill(os.getpid(), signal.SIGINT)  # of a Ctrl-C, which a terminal sends to every fork
    return "", {}


def _question(name: str, ask: Any = lambda: ("", {})) -> Question:
    return Question(name, "kind", ask)


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    yield
    LEFT_BEHIND.clear()
