"""Two releases side by side: what is worse, what differs, and the text for a pull request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from rich.table import Table

from fixtures import compare_releases
from fixtures.compare_releases import Change, Key, Side, changes, comment, key, listed, main
from fixtures.latency import latency_sides
from fixtures.latency.latency_sides import EAGER, NEW, OLD, REPLAYED, Timed, medians
from fixtures.tables.latency import USUAL
from harness.core.environment import environment
from harness.core.paths import ROOT
from harness.core.record import Record, Verdict, write_records
from harness.errors import UsageError

PASSED = Record(
    case="mha-decode-bs1_short",
    subject="sglang-0.5.22/trtllm_mha/xqa",
    family="mha",
    mode="decode",
    execution="eager",
    device="cpu",
    verdict=Verdict.PASSED,
    environment=environment(),
    planned=1,
)
NEWER = replace(PASSED, subject="sglang-0.5.23/trtllm_mha/xqa")
RED = replace(NEWER, verdict=Verdict.WRONG_NUMBERS, message="hidden_states: 3 of 4 rows wrong")
KNOWN = replace(NEWER, verdict=Verdict.WAIVED, message="some-finding: stores 4 bytes past the end")


def by_key(*records: Record) -> dict[Key, Record]:
    return {key(record): record for record in records}


def test_the_release_is_no_part_of_a_trial_and_ours_is_a_side() -> None:
    ours = replace(PASSED, subject="trtllm_mha/xqa")
    assert key(PASSED) == key(NEWER) == key(ours)
    assert key(PASSED) != key(replace(PASSED, execution="graph"))


@pytest.mark.parametrize(
    ("old", "new", "worse"),
    [
        (PASSED, RED, True),
        (PASSED, KNOWN, True),
        (RED, PASSED, False),
        (KNOWN, PASSED, False),
        (
            replace(PASSED, effects={"host_syncs": 0}),
            replace(NEWER, effects={"host_syncs": 1}),
            True,
        ),
        (
            replace(PASSED, effects={"host_syncs": 1, "moved": 4096}),
            replace(NEWER, effects={"host_syncs": 2, "moved": 512}),
            True,
        ),
        (
            replace(PASSED, effects={"moved": 8}),
            replace(NEWER, effects={"moved": 9}),
            True,
        ),
        (
            replace(PASSED, effects={"host_syncs": 4}),
            replace(NEWER, effects={"host_syncs": 0}),
            False,
        ),
        (
            replace(PASSED, effects={"preparing": 4}),
            replace(NEWER, effects={"preparing": 9}),
            False,
        ),
    ],
)
def test_worse_is_a_new_red_trial_or_another_host_sync(
    old: Record, new: Record, worse: bool
) -> None:
    (change,) = changes(by_key(old), by_key(new))
    assert change.is_worse is worse, "one more host sync is worse, whatever else was saved"


@pytest.mark.parametrize(
    "new",
    [
        NEWER,
        replace(NEWER, message="another text", seconds=3.0),
        replace(NEWER, verdict=Verdict.REFUSED, message="no such mode"),
    ],
)
def test_equal_outcomes_and_refusals_are_no_change(new: Record) -> None:
    assert not list(changes(by_key(PASSED), by_key(new)))


def test_one_cause_is_told_once_with_its_command() -> None:
    found = [
        Change(
            replace(PASSED, case=f"case{i}"), replace(RED, case=f"case{i}", reproduce=f"run {i}")
        )
        for i in range(3)
    ]
    lines = listed(found)
    assert lines == [
        "worse: case0, eager, sglang-0.5.23/trtllm_mha/xqa",
        "  cause: hidden_states: 3 of 4 rows wrong",
        "  reproduce: run 0",
    ]


def test_of_many_causes_the_first_twelve_are_told_each_with_its_command() -> None:
    found = [Change(PASSED, replace(RED, message=f"cause {i}: off")) for i in range(13)]
    causes = [line for line in listed(found) if line.startswith("  cause: ")]
    told = "twelve changes of three lines are listed, not twelve lines"
    assert causes == [f"  cause: cause {i}: off" for i in range(12)], told
    assert len(listed(found)) == 36, told


def test_what_is_better_is_told_by_what_was_red() -> None:
    was = replace(RED, subject=PASSED.subject, reproduce="run it there")
    lines = listed([Change(was, NEWER)])
    assert lines == [
        "better: mha-decode-bs1_short, eager, sglang-0.5.22/trtllm_mha/xqa",
        "  cause: hidden_states: 3 of 4 rows wrong",
        "  reproduce: run it there",
    ], f"what is better has the name, cause and command of the red trial: {lines}"


def rows_of(table: Table) -> list[tuple[object, ...]]:
    return list(zip(*(column.cells for column in table.columns), strict=True))


def test_tables_count_what_was_run_on_both_sides() -> None:
    refused = {"verdict": Verdict.REFUSED, "message": "no such mode"}
    olds, news = {}, {}
    for case, old, new in (
        ("stays_green", PASSED, NEWER),
        ("stays_red", replace(RED, subject=PASSED.subject), KNOWN),
        ("turns", PASSED, RED),
        ("turns_too", PASSED, KNOWN),
        ("mended", replace(KNOWN, subject=PASSED.subject), NEWER),
        ("gone", replace(RED, subject=PASSED.subject), replace(NEWER, **refused)),
        ("new", replace(PASSED, **refused), RED),
    ):
        olds |= by_key(replace(old, case=case, effects={"moved": 8, "host_syncs": 1}))
        news |= by_key(replace(new, case=case, effects={"moved": 8, "recorded": 3}))
    olds |= by_key(replace(PASSED, case="one_side_alone"))
    told = "of what ran on both sides: 5 run, 2 red before, 3 red now, 2 worse, 1 better"
    verdicts = rows_of(compare_releases.mode_table(olds, news, ("0.5.22", "0.5.23")))
    wanted = [("trtllm_mha/xqa", "decode", "5", "2", "3", "2", "1")]
    assert verdicts == wanted, f"{told}, not {verdicts}"
    (turned,) = (name for name in olds if name[1] == "turns")
    names = ("0.5.22", "0.5.23")
    effects = compare_releases.effect_table({turned: olds[turned]}, {turned: news[turned]}, names)
    where = ("trtllm_mha/xqa", "decode", "eager")
    said = rows_of(effects)
    told = f"an effect that a side lacks is 0 there, and one that is equal is left out: {said}"
    assert said == [(*where, "host_syncs", "1", "0"), (*where, "recorded", "0", "3")], told


@pytest.mark.parametrize("is_checkout", [True, False])
def test_a_checkout_runs_as_the_release_that_it_is_like(
    is_checkout: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[object] = []
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    monkeypatch.setattr(
        compare_releases,
        "install",
        lambda release, *, wheel=True: ran.extend((release.version, wheel)),
    )
    monkeypatch.setattr(
        compare_releases,
        "run_release",
        lambda release, *given: ran.extend((release.version, given)),
    )
    Side(str(tmp_path) if is_checkout else "0.5.20", like="0.5.14").run(tmp_path, ["-k", "bs1"])
    version = "0.5.14" if is_checkout else "0.5.20"
    more = ["--sglang-source", str(tmp_path)] if is_checkout else []
    told = "a release runs as itself, from its wheel; a checkout as its --like, without the wheel"
    told = f"{told}: wanted {version}, wheel {not is_checkout}, not {ran}"
    assert ran == [version, not is_checkout, version, (tmp_path, [*more, "-k", "bs1"])], told


def test_flashinfer_alone_compares_a_release_with_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").touch()
    first, last = (replace(PASSED, case=case, subject=NEWER.subject) for case in "az")
    worse, was = replace(RED, case="z"), replace(RED, case="a", subject=PASSED.subject)
    asked: list[Side] = []

    def records_of(side: Side, *_: object) -> dict[Key, Record]:
        asked.append(side)
        return by_key(first, worse) if side.flashinfer else by_key(was, last)

    monkeypatch.setattr(compare_releases, "records_of", records_of)
    given = ["0.5.20", "--flashinfer", str(tmp_path), "--like", "0.5.14"]
    assert main([*given, "--report", str(tmp_path)]) == 1
    told = "--flashinfer compares the release that is named, with the checkout and without"
    sides = [Side("0.5.20", "0.5.14"), Side("0.5.20", "0.5.14", tmp_path)]
    assert asked == sides, f"{told}, not {asked}"
    turned = [line for line in capsys.readouterr().out.splitlines() if ", eager, " in line]
    names = [line.partition(",")[0] for line in turned]
    assert names == ["worse: z", "better: a"], (
        f"what is worse is told before what is better: {names}"
    )


def test_a_comment_groups_causes_and_stays_within_its_lines() -> None:
    found = [
        Change(
            PASSED, replace(RED, case=f"c{i}-{j}", message=f"{word * 3}: {j} of 4", reproduce="run")
        )
        for i, word in enumerate("abcdefghijklmnop")
        for j in range(2)
    ]
    text = comment(found, ["base", "head"])
    lines = text.splitlines()
    told = f"the first line counts what is worse: {lines[0]}"
    assert lines[0] == "**specgate**: head against base: 32 worse, 0 otherwise", told
    told = "a cause has the backend, number, case and command of its own trials"
    assert lines[2:5] == [
        "* trtllm_mha, decode: aaa: N of N",
        "  2 trials, first `c0-0`, eager",
        "  `run`",
    ], f"{told}: {lines[2:5]}"
    second = ["* trtllm_mha, decode: bbb: N of N", "  2 trials, first `c1-0`, eager"]
    assert lines[6:8] == second, f"{told}: {lines[6:8]}"
    assert len(lines) <= 40, f"a comment has 40 lines at most, not {len(lines)}"
    assert lines[-1] == "… and 16 causes in all", f"the last line counts the causes: {lines[-1]}"
    for most in range(6, 12):
        found_lines = len(comment(found, ["base", "head"], most).splitlines())
        told = f"of at most {most} lines one is kept for the count of the causes: {found_lines}"
        assert found_lines <= most, told


def run_main(tmp_path: Path, old: Sequence[Record], new: Sequence[Record], *words: str) -> int:
    for version, records in (("0.5.22", old), ("0.5.23", new)):
        (tmp_path / version).mkdir()
        write_records(tmp_path / version / "records.jsonl", records)
    return main(["0.5.22", "0.5.23", "--report", str(tmp_path), *words])


def test_records_of_this_checkout_are_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare_releases, "_is_whole", bool)
    said = tmp_path / "made" / "comment.md"
    assert run_main(tmp_path, [PASSED], [RED], "--comment", str(said)) == 1
    assert "0.5.23 against 0.5.22: 1 worse, 0 otherwise" in capsys.readouterr().out
    assert "hidden_states: N of N rows wrong" in said.read_text(encoding="utf-8")


def test_chosen_trials_do_not_pass_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, ...]] = []

    def run(side: compare_releases.Side, folder: Path, args: Sequence[str]) -> int:
        asked.append(tuple(args))
        folder.mkdir(parents=True, exist_ok=True)
        cases = ["chosen"] if args else ["chosen", "another"]
        records = [
            replace(PASSED, case=case, planned=len(cases), environment=ours) for case in cases
        ]
        write_records(folder / "records.jsonl", records)
        return 0

    ours = replace(PASSED.environment, commit="c1", dirty=False)
    monkeypatch.setattr(compare_releases, "environment", lambda: ours)
    monkeypatch.setattr(compare_releases.Side, "run", run)
    words = ["0.5.22", "0.5.23", "--report", str(tmp_path)]
    assert main([*words, "-k", "chosen"]) == 0
    assert main(words) == 0
    assert asked == [("-k", "chosen")] * 2 + [()] * 2
    assert main(words) == 0
    assert len(asked) == 4
    capsys.readouterr()


@pytest.mark.parametrize(
    ("code", "planned", "told"),
    [
        (0, 1, None),
        (1, 1, None),
        (2, 1, "0.5.23: its run broke off: pytest ended with 2"),
        (3, 1, "0.5.23: its run broke off: pytest ended with 3"),
        (4, 1, "0.5.23: its run broke off: pytest ended with 4"),
        (-9, 1, "0.5.23: its run broke off: pytest ended with -9"),
        (1, 3, "0.5.23: 2 of 3 trials left no record"),
    ],
)
def test_a_run_that_broke_off_is_told_and_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, planned: int, told: str | None
) -> None:
    chosen = tmp_path / compare_releases.CHOSEN
    chosen.mkdir()

    def run(side: compare_releases.Side, folder: Path, args: Sequence[str]) -> int:
        said = f"trials that {args} choose are run into a folder of their own, not among all"
        assert folder == chosen, f"{said}: {folder.name}, expected {chosen.name}"
        return code

    monkeypatch.setattr(compare_releases.Side, "run", run)
    write_records(chosen / "records.jsonl", [replace(PASSED, planned=planned)])
    side = compare_releases.Side("0.5.23")
    if told is None:
        assert compare_releases.records_of(side, tmp_path, ("-k", "bs1")) == by_key(PASSED)
        return
    with pytest.raises(UsageError, match=f"^{told}$"):
        compare_releases.records_of(side, tmp_path, ("-k", "bs1"))


@pytest.mark.parametrize("has_flashinfer", [False, True])
def test_a_checkout_that_may_have_changed_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_flashinfer: bool
) -> None:
    ran: list[str] = []

    def run(side: compare_releases.Side, folder: Path, args: Sequence[str]) -> int:
        ran.append(side.name)
        write_records(folder / "records.jsonl", [PASSED])
        return 0

    monkeypatch.setattr(compare_releases.Side, "run", run)
    monkeypatch.setattr(compare_releases, "_is_whole", bool)
    write_records(tmp_path / "records.jsonl", [PASSED])
    checkout = (
        compare_releases.Side("0.5.23", "0.5.23", tmp_path)
        if has_flashinfer
        else compare_releases.Side(str(tmp_path), "0.5.23")
    )
    for _ in range(2):
        compare_releases.records_of(checkout, tmp_path, ())
    assert ran == [checkout.name] * 2
    compare_releases.records_of(compare_releases.Side("0.5.23", "0.5.23"), tmp_path, ())
    assert len(ran) == 2


@pytest.mark.parametrize(
    ("here", "there", "planned", "is_whole"),
    [
        (("c1", False), ("c1", False), 1, True),
        (("c1", False), ("c2", False), 1, False),
        (("c1", False), ("c1", False), 2, False),
        (("c1", False), ("c1", True), 1, False),
        (("c1", True), ("c1", False), 1, False),
        (("c1", True), ("c1", True), 1, False),
    ],
)
def test_records_of_other_changes_are_made_again(
    here: tuple[str, bool],
    there: tuple[str, bool],
    planned: int,
    is_whole: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = (
        replace(PASSED.environment, commit=commit, dirty=dirty) for commit, dirty in (here, there)
    )
    monkeypatch.setattr(compare_releases, "environment", lambda: ours)
    record = replace(PASSED, environment=theirs, planned=planned)
    assert compare_releases._is_whole([record]) is is_whole


def test_records_of_two_trees_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = (replace(PASSED.environment, commit=c, dirty=False) for c in ("c1", "c2"))
    monkeypatch.setattr(compare_releases, "environment", lambda: first)
    two = [replace(PASSED, environment=made, planned=2) for made in (first, other)]
    for records in (two, two[::-1]):
        assert not compare_releases._is_whole(records), "every record is of this very commit"
    assert compare_releases._is_whole([two[0], two[0]])


def test_each_side_has_a_folder_of_its_own(tmp_path: Path) -> None:
    sides = [
        Side("0.5.22"),
        Side("0.5.23"),
        Side(compare_releases.OURS),
        Side("0.5.23", flashinfer=tmp_path / "a"),
        Side("0.5.23", flashinfer=tmp_path / "b"),
        Side(str(tmp_path / "a")),
        Side(str(tmp_path / "b")),
        Side(str(tmp_path / "a"), flashinfer=tmp_path / "a"),
    ]
    folders = [compare_releases._folder(side) for side in sides]
    assert folders[:3] == ["0.5.22", "0.5.23", "ours"]
    assert len(set(folders)) == len(sides), "records of one side must not answer for another"


def test_equal_releases_end_with_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_releases, "_is_whole", bool)
    assert run_main(tmp_path, [PASSED], [NEWER]) == 0


def timed(old: float, new: float) -> Timed:
    return Timed(USUAL, REPLAYED, {OLD: (old,) * 40, NEW: (new,) * 40})


@pytest.mark.parametrize(("new", "code"), [(10.2, 0), (10.4, 1), (5.0, 0)])
def test_on_a_gpu_slower_metadata_is_worse(
    new: float,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = []

    def compared(folders: Sequence[Path | None], device: torch.device) -> list[Timed]:
        asked.extend(folders)
        eager = replace(timed(10.0, 20.0), clock=EAGER, is_judged=False)
        return [timed(10.0, new), eager, Timed(USUAL, REPLAYED, {})]

    monkeypatch.setattr(compare_releases, "_is_whole", bool)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(latency_sides, "compared", compared)
    assert run_main(tmp_path, [PASSED], [NEWER]) == code
    assert [folder.name for folder in asked if folder] == ["sglang-0.5.22", "sglang-0.5.23"]
    said = capsys.readouterr().out
    assert f"{new / 10:.3g} [" in said
    assert "one side reads lengths on the host" in said
    assert ("0 worse, 0 otherwise, metadata slower" in said) is bool(code)


@pytest.mark.parametrize(
    ("old", "new", "slower"),
    [
        (
            (31.0, 32.6, 31.1, 31.2, 32.5, 31.0, 31.3),
            (32.6, 31.1, 32.5, 32.4, 31.0, 32.6, 32.5),
            False,
        ),
        (
            (31.0, 31.1, 31.0, 31.2, 31.1, 31.0, 31.2),
            (32.6, 32.5, 32.6, 32.4, 32.5, 32.6, 32.5),
            True,
        ),
    ],
)
def test_captures_that_differ_by_themselves_blame_no_side(
    old: tuple[float, ...], new: tuple[float, ...], slower: bool
) -> None:
    arms = {(OLD, i): partial(float, took) for i, took in enumerate(old)}
    arms |= {(NEW, i): partial(float, took) for i, took in enumerate(new)}
    taken = medians(arms)
    assert taken == {OLD: old, NEW: new}
    assert Timed(USUAL, REPLAYED, taken).is_slower is slower


def test_a_side_that_cannot_be_timed_is_told_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare_releases, "_is_whole", bool)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("SPECGATE_UPSTREAM", str(tmp_path / "none"))
    assert run_main(tmp_path, [PASSED], [NEWER]) == 0
    assert "metadata is not timed: sglang = " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("dirty", "planned", "whole"), [(False, 1, True), (True, 1, False), (False, 2, False)]
)
def test_only_whole_runs_of_a_clean_checkout_are_used_again(
    dirty: bool, planned: int, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = replace(environment(), commit="abc", dirty=dirty)
    monkeypatch.setattr(compare_releases, "environment", lambda: replace(here, dirty=False))
    record = replace(PASSED, environment=here, planned=planned)
    assert compare_releases._is_whole([record]) is whole
    assert not compare_releases._is_whole([])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["0.5.22"], "NEW = None is not accepted"),
        (["0.5.22", "/nope"], "release = '/nope' is not accepted; accepted: 0.5.12, "),
        (["0.5.22", "0.5.23", "--like", "0.1"], "argument --like: invalid choice: '0.1'"),
        (
            ["0.5.20", "0.5.23", "--source", "elsewhere"],
            "--source = 'elsewhere' is not accepted; accepted: NEW or --source, not both",
        ),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "0.5.22").mkdir()
    with pytest.raises(SystemExit) as ended:
        compare_releases.main([*words, "--report", str(tmp_path)])
    assert ended.value.code == 2
    assert text in capsys.readouterr().err.splitlines()[-1]


def test_the_workflow_gives_the_action_its_inputs() -> None:
    action = yaml.safe_load((ROOT / "ci/action.yml").read_text(encoding="utf-8"))
    workflow = yaml.safe_load((ROOT / "ci/pull_request.yml").read_text(encoding="utf-8"))
    (step,) = (step for step in workflow["jobs"]["compare"]["steps"] if step.get("id") == "compare")
    required = {name for name, given in action["inputs"].items() if given.get("required")}
    assert required <= step["with"].keys() <= action["inputs"].keys()
    script = action["runs"]["steps"][-1]
    used = {
        value.split("inputs.")[1].split()[0]
        for value in script["env"].values()
        if "inputs." in value
    }
    assert used == action["inputs"].keys()
    assert "python3 -m ci compare-releases --" in script["run"]
