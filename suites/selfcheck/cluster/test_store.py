"""What ended is kept at once, and a run that was killed goes on from there."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ci.cluster import store as store_module
from ci.cluster.store import Store, held
from ci.cluster.work import LaneWork, UnitEnd
from fixtures.fakes.sample_records import ENVIRONMENT, trial
from harness.core.record import Verdict, read_records
from harness.errors import UsageError

TREE = "abc" * 20
WORK = LaneWork(lane="run", kind="sm90", argv=(), tree=TREE)
SOURCE = ("c" * 40, True)


def store(folder: Path, *, resume: bool = False, work: LaneWork = WORK) -> Store:
    return Store(folder, [work], resume=resume, source=SOURCE)


def end(name: str, outcome: str = "passed", kind: str = "sm90", **facts: object) -> UnitEnd:
    verdict = Verdict.PASSED if outcome == "passed" else Verdict.ERROR
    environment = replace(ENVIRONMENT, tree=TREE)
    record = trial(name, verdict, kind=kind, test=name, environment=environment)
    usual: dict[str, object] = {"seconds": 2.5, "record": record.to_json()}
    return UnitEnd(unit=name, outcome=outcome, **usual | facts)  # type: ignore[arg-type]


def cases(folder: Path) -> list[str]:
    return [record.case for record in read_records(folder / "records.jsonl")]


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    store(tmp_path).add(WORK, [end("a"), end("b", "failed"), end("c", record="")])
    # A record whose unit was not noted yet, and half a line: so a process that is killed leaves it.
    store_of_dead = store(tmp_path, resume=True)
    store_of_dead.add(WORK, [end("d")])
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write(end("e").record + "\n" + end("f").record[:50])
    with (tmp_path / "ended.jsonl").open("a") as file:
        file.write('{"kind": "sm9')
    again = store(tmp_path, resume=True)
    assert again.kept(WORK) == {"a", "c", "d"}
    assert cases(tmp_path) == ["a", "d"]
    again.add(WORK, [end("b"), end("e")])
    assert sorted(cases(tmp_path)) == ["a", "b", "d", "e"]


def test_what_was_skipped_is_not_run_again(tmp_path: Path) -> None:
    store(tmp_path).add(WORK, [end("a"), end("b", "skipped", record=""), end("c", "failed")])
    kept = store(tmp_path, resume=True).kept(WORK)
    assert kept == {"a", "b"}, f"a unit has ended well where it did not fail, skipped too: {kept}"


@pytest.mark.parametrize("resume", [True, False], ids=["goes_on", "begins_anew"])
@pytest.mark.parametrize("nth", [0, 1, 2, 3])
def test_a_unit_of_a_run_that_is_killed_as_it_begins_has_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int, resume: bool
) -> None:
    store(tmp_path).add(WORK, [end("a"), end("b", "failed"), end("c")])
    steps = iter(range(4))

    def until(step: Callable[..., object]) -> Callable[..., object]:
        def made(path: Path, *words: object, **more: object) -> object:
            if next(steps) == nth:
                raise KeyboardInterrupt  # as SIGKILL, at any file that is written or renamed
            return step(path, *words, **more)

        return made

    with monkeypatch.context() as patch:
        for name in ("write_text", "replace"):
            patch.setattr(Path, name, until(getattr(Path, name)))
        with pytest.raises(KeyboardInterrupt):
            store(tmp_path, resume=resume)
    forgotten = not resume and nth > 1
    kept: set[str] = set()
    told = ""
    try:
        kept = store(tmp_path, resume=True).kept(WORK)
    except UsageError as error:
        told = str(error)
    said = "a run that is killed before its new ended.jsonl is whole has lost no unit"
    assert forgotten or not told, f"{said}: {told}"
    said = f"each unit that counts as done, of {sorted(kept)}, has its record"
    assert kept <= {*cases(tmp_path)}, f"{said}: records are of {cases(tmp_path)}"
    if forgotten:
        said = "what a run begun anew has forgotten cannot be resumed"
        assert "the folder of a run" in told, f"{said}: {told or kept}"
    else:
        assert kept == {"a", "c"}, f"good ends are kept, a and c, not {kept}"
        assert cases(tmp_path) == ["a", "c"], f"records of good ends are kept: {cases(tmp_path)}"


def test_a_unit_has_ended_once_its_record_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    made = store(tmp_path)
    monkeypatch.setattr(store_module, "write_records", full)
    with pytest.raises(OSError, match="No space left"):
        made.add(WORK, [end("a")])
    said = "a run that goes on would count it as done, and its record would be missing"
    assert (tmp_path / "ended.jsonl").read_text() == "", said


def test_a_good_end_on_one_kind_keeps_no_record_of_another(tmp_path: Path) -> None:
    works = [WORK, replace(WORK, kind="cpu")]
    began = Store(tmp_path, works, resume=False, source=SOURCE)
    began.add(works[0], [end("a", "failed")])
    began.add(works[1], [end("a", kind="cpu")])
    again = Store(tmp_path, works, resume=True, source=SOURCE)
    assert [again.kept(work) for work in works] == [set(), {"a"}]
    assert [record.kind for record in read_records(tmp_path / "records.jsonl")] == ["cpu"]


def test_without_it_all_begins_anew_in_the_order_of_what_was_timed(tmp_path: Path) -> None:
    store(tmp_path).add(WORK, [end("a"), end("b", seconds=0.5)])
    again = store(tmp_path)
    assert again.kept(WORK) == set()
    assert cases(tmp_path) == []
    assert again.recorded(WORK) == {"a": 2.5, "b": 0.5}
    assert again.recorded(replace(WORK, kind="cpu")) == {}


def test_another_tree_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    store(tmp_path).add(WORK, [end("a")])
    other = replace(WORK, tree="def" * 20)
    with pytest.raises(UsageError, match="tree = 'abcabcabcabc' is not accepted; accepted: def"):
        store(tmp_path, resume=True, work=other)
    assert cases(tmp_path) == ["a"]
    ended = tmp_path / "ended.jsonl"
    ended.write_text(ended.read_text() + ended.read_text().replace(TREE, other.tree))
    with pytest.raises(UsageError, match="tree = 'defdefdefdef' is not accepted; accepted: abc"):
        store(tmp_path, resume=True)


def test_nothing_to_resume_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--resume = .* accepted: the folder of a run"):
        store(tmp_path / "none", resume=True)


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UsageError, match=r"--report = .* accepted: a writable folder"),
        held(tmp_path / "file"),
    ):
        pass


def test_a_tree_that_travelled_gets_the_commit_it_was_made_of(tmp_path: Path) -> None:
    known = replace(ENVIRONMENT, commit="d" * 40)
    own = trial("own", environment=known).to_json()
    store(tmp_path).add(WORK, [end("a"), end("own", record=own)])
    found = {r.case: r.environment for r in read_records(tmp_path / "records.jsonl")}
    assert (found["a"].commit, found["a"].dirty) == SOURCE
    assert (found["own"].commit, found["own"].dirty) == ("d" * 40, False)


def test_files_and_failures_without_a_record_are_kept(tmp_path: Path) -> None:
    made = store(tmp_path)
    made.add(WORK, [end("x/y", record="", files={"a/b.txt": b"1"})])
    made.add(WORK, [end("z", "failed", record="", message="off", place="far, GPU 3")])
    made.add(WORK, [end("red", "failed")])
    assert (tmp_path / "sm90" / "x/y" / "a/b.txt").read_bytes() == b"1"
    assert made.failures == ["z on sm90: off"]
    last = json.loads((tmp_path / "ended.jsonl").read_text().splitlines()[1])
    assert (last["unit"], last["message"], last["tree"]) == ("z", "off", TREE)
    assert last["place"] == "far, GPU 3"


def test_a_unit_that_runs_again_has_the_files_of_its_last_run(tmp_path: Path) -> None:
    files = {"log/a.txt": b"1", "log/b.txt": b"2"}
    store(tmp_path).add(WORK, [end("x", "failed", record="", files=files)])
    store(tmp_path, resume=True).add(WORK, [end("x", record="", files={"log/b.txt": b"3"})])
    found = (tmp_path / "sm90" / "x" / "log" / "b.txt").read_bytes()
    assert found == b"3", f"a failed item that passes after --resume has its new files: {found!r}"


def test_a_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "report" / "run"
    with held(folder):
        told = f"--report = {str(folder)!r} is not accepted; accepted: a folder that no other run"
        with pytest.raises(UsageError, match=f"^{re.escape(told)}"), held(folder):
            pass
    with held(folder):
        assert [*folder.iterdir()] == []
