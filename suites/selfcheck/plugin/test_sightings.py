"""The document of findings says what their trials said in each release, and no more."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from fixtures import findings
from fixtures.fakes.sample_records import compared, trial
from fixtures.plan import effect_trials, upstream_trials
from fixtures.sightings import (
    Sighting,
    State,
    command,
    edges,
    from_json,
    shown_trials,
    sightings,
    to_json,
    trial_id,
    windows,
)
from fixtures.tables.findings import EFFECTS, FINDINGS, NO_FINDINGS, Finding
from harness.core.record import Record, Verdict, write_records
from harness.errors import UsageError
from harness.sglang.releases import RELEASES, find_release
from harness.sglang_subjects import NOT_PRODUCED, sglang_subjects

NARROW, STRIDED = "mha-decode-narrow trtllm_mha/xqa graph", "mha-decode-narrow triton/triton graph"
FINDING = Finding(
    id="wall",
    title="the table is too narrow",
    trials=(NARROW, STRIDED),
    subject="t*/*",
    case="mha-*",
    execution="graph",
    message=r"<= \d+, the width",
    since="0.5.14",
    fixed="0.5.18",
    where="trtllm_mha_backend.py",
    produced="always",
    effect="wrong",
)


def ended(release: str, verdict: Verdict, message: str = "", subject: str = "triton") -> Record:
    name = {"triton": "triton/triton", "xqa": "trtllm_mha/xqa"}[subject]
    return trial(
        "mha-decode-narrow",
        verdict,
        subject=f"sglang-{release}/{name}",
        execution="graph",
        message=message,
        quantities=(*compared(0.1), *compared(3.0, name="hidden_states")),
    )


def only(*records: Record) -> Sighting:
    (found,) = sightings([FINDING], shown_trials(records))
    return found


RED = ("wall: 193 > 192; accepted: <= 192, the width", State.RED)


@pytest.mark.parametrize(
    ("verdict", "message", "state", "other"),
    [
        pytest.param(Verdict.WAIVED, RED[0], State.RED, "", id="its_own"),
        pytest.param(Verdict.WAIVED, "other: stride", State.OTHER, "other", id="another_finding"),
        pytest.param(Verdict.ERROR, "stride", State.OTHER, "", id="nobody_explains_it"),
        pytest.param(Verdict.PASSED, "", State.GREEN, "", id="passed"),
        pytest.param(Verdict.REFUSED, "no such mode", State.GONE, "", id="refused"),
    ],
)
def test_a_trial_decides_the_state(
    verdict: Verdict, message: str, state: State, other: str
) -> None:
    found = only(ended("0.5.16", verdict, message))
    assert (found.release, found.state, found.other) == ("0.5.16", state, other)
    assert found.message == message.removeprefix("wall: ").removeprefix("other: ")
    assert (found.worst == "hidden_states: error 3.0e+00, allowed 5.0e-01") is (state is State.RED)


@pytest.mark.parametrize("red", ["triton", "xqa"])
def test_one_red_trial_of_several_shows_it(red: str) -> None:
    verdicts = {"triton": Verdict.PASSED, "xqa": Verdict.PASSED} | {red: Verdict.WAIVED}
    found = only(*(ended("0.5.16", verdict, RED[0], s) for s, verdict in verdicts.items()))
    assert (found.state, found.trial) == (State.RED, NARROW if red == "xqa" else STRIDED)


def test_where_none_is_red_the_last_trial_decides() -> None:
    passed = ended("0.5.16", Verdict.PASSED, "", "xqa")
    found = only(passed, ended("0.5.16", Verdict.REFUSED, "no such mode", "triton"))
    assert (found.state, found.trial) == (State.GONE, STRIDED), "of a finding's trials the last"


def test_a_quantity_within_its_budget_is_no_symptom() -> None:
    within = replace(ended("0.5.16", Verdict.WAIVED, RED[0]), quantities=compared(0.25))
    assert only(within).worst == "", "an invariant that was broken, and numbers that were right"


def test_no_trial_no_sighting() -> None:
    ours = replace(ended("0.5.16", Verdict.ERROR), subject="trtllm_mha/xqa")
    elsewhere = replace(ended("0.5.16", Verdict.WAIVED, RED[0]), case="mha-decode-wide")
    assert sightings([FINDING], shown_trials([ours, elsewhere])) == []


def test_messages_are_kept_without_folders_and_short() -> None:
    where = "wall: item at /home/me/sglang-0.5.16/sglang/srt/trtllm.py:4; " + "again " * 80
    message = only(ended("0.5.16", Verdict.WAIVED, where)).message
    assert message.startswith("item at sglang/srt/trtllm.py:4; again")
    assert message.endswith("again …")
    assert len(message) <= 242
    deep = f"wall: item at /{'home/' * 48}sglang/srt/trtllm.py:4; again"
    said = "a message is as long as it is without its folders: nothing is cut off"
    kept = only(ended("0.5.16", Verdict.WAIVED, deep)).message
    assert kept == "item at sglang/srt/trtllm.py:4; again", f"{said}, not {kept!r}"


def test_sightings_survive_their_file() -> None:
    seen = [only(ended("0.5.16", Verdict.WAIVED, RED[0]))]
    assert from_json(to_json(seen)) == seen


GREEN = ended("0.5.18", Verdict.PASSED)


@pytest.mark.parametrize(
    ("bad", "good", "shown"),
    [
        pytest.param(RED[0], GREEN, True, id="red_then_green"),
        pytest.param(RED[0], ended("0.5.18", Verdict.REFUSED), True, id="red_then_gone"),
        pytest.param(RED[0], ended("0.5.18", Verdict.WAIVED, "x: stride"), True, id="goes_on"),
        pytest.param(RED[0], ended("0.5.18", Verdict.WAIVED, RED[0]), False, id="still_red"),
        pytest.param(RED[0], ended("0.5.18", Verdict.ERROR, "segfault"), False, id="dies"),
        pytest.param(
            RED[0], ended("0.5.18", Verdict.WAIVED, "x: <= 8, the width"), False, id="same_words"
        ),
        pytest.param("other: stride", GREEN, False, id="hidden_before"),
        pytest.param(RED[0], ended("0.5.20", Verdict.PASSED), False, id="not_run_after"),
    ],
)
def test_a_window_is_red_then_past_it(bad: str, good: Record, shown: bool) -> None:
    records = [ended("0.5.16", Verdict.WAIVED, bad), good]
    (window,) = windows([FINDING], sightings([FINDING], shown_trials(records)))
    assert edges(FINDING) == ("0.5.16", "0.5.18")
    assert window.is_shown is shown


def test_a_window_that_is_not_shown_is_told_with_what_each_side_said() -> None:
    again = replace(FINDING, id="again", trials=(STRIDED,))
    unseen = replace(FINDING, id="unseen", trials=("mla-decode-x triton/triton graph",), case="*")
    both = [NARROW, STRIDED, STRIDED]
    asked = findings.window_trials([FINDING, again])
    told = f"both sides of a window run the trials of every finding that it closes, not {asked}"
    assert asked == {"0.5.16": both, "0.5.18": both}, told
    records = [
        ended("0.5.16", Verdict.WAIVED, RED[0]),
        ended("0.5.18", Verdict.WAIVED, "step: stride"),
    ]
    table = findings.window_table(
        windows([FINDING, again, unseen], sightings([FINDING, again], shown_trials(records)))
    )
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    said, then = "193 > 192; accepted: <= 192, the width", "goes on to step: stride"
    assert rows == [
        ("wall", "0.5.16", f"red: {said}", "0.5.18", then),
        ("again", "0.5.16", f"goes on to wall: {said}", "0.5.18", then),
        ("unseen", "0.5.16", "not run", "0.5.18", "not run"),
    ], f"a window goes on to another finding or a message, never to its own finding: {rows}"
    styles = [row.style for row in table.rows]
    told = f"windows that are not shown are red, and those that are have no style: {styles}"
    assert styles == ["", "red", "red"], told


def test_records_are_kept_of_every_release_in_the_folder(tmp_path: Path) -> None:
    for version in ("0.5.23", "0.5.14"):
        (tmp_path / version).mkdir()
        write_records(tmp_path / version / "records.jsonl", [ended(version, Verdict.PASSED)])
    subjects = [record.subject for record in findings.kept_records(tmp_path)]
    assert subjects == ["sglang-0.5.14/triton/triton", "sglang-0.5.23/triton/triton"]


def test_an_open_finding_has_no_window() -> None:
    assert windows([replace(FINDING, fixed="")], []) == []


@pytest.mark.parametrize(
    "named",
    ["mha-decode-narrow trtllm_mha/xqa", "mla-decode-x triton/triton graph", f"{STRIDED} eager"],
)
def test_a_finding_refuses_a_trial_that_is_none_of_its(named: str) -> None:
    with pytest.raises(UsageError, match=r"finding\.trials = "):
        replace(FINDING, trials=(named,))


def test_the_command_names_the_backends_that_it_needs() -> None:
    assert trial_id(NARROW, "0.5.16") == "mha-decode-narrow-sglang-0.5.16/trtllm_mha/xqa-graph"
    assert "--all-backends" not in command(NARROW, "0.5.16")
    assert command(STRIDED, "0.5.16").startswith("specgate upstream 0.5.16 --all-backends -k '")


# What is committed.

SEEN = from_json(findings.KEPT.read_text(encoding="utf-8"))


def test_the_document_is_written_from_what_is_kept() -> None:
    assert findings.DOCUMENT.read_text(encoding="utf-8") == findings.document(FINDINGS, SEEN)


ON_A_CPU = [finding for finding in FINDINGS if finding.device != "cuda"]


@pytest.mark.parametrize("finding", ON_A_CPU, ids=lambda finding: finding.id)
def test_a_finding_is_red_in_its_releases_and_in_no_other(finding: Finding) -> None:
    states = {s.release: s.state for s in SEEN if s.finding == finding.id}
    assert states, f"no trial of {finding.id} was run: specgate findings --run"
    red = {release for release, state in states.items() if state is State.RED}
    its = {release for release in RELEASES if finding.is_in(release)}
    hidden = {release for release, state in states.items() if state is State.OTHER}
    assert red
    assert red <= its
    assert its - red <= hidden


def test_every_window_is_seen() -> None:
    shown = windows(FINDINGS, SEEN)
    assert [window.finding.id for window in shown if not window.is_shown] == []
    assert len(shown) >= 11


def test_trials_are_planned_in_a_release() -> None:
    planned = set()
    for release in RELEASES:
        subjects = sglang_subjects(find_release(release))
        planned |= {f"{c.id}-{s.name}-{e}" for c, s, e in upstream_trials(subjects)}
        planned |= {f"{EFFECTS}{c.id}-{s.name}-{e}" for c, s, e in effect_trials(subjects)}
    for finding in FINDINGS:
        for named in finding.trials:
            assert any(trial_id(named, release) in planned for release in RELEASES), named


def test_an_unreported_finding_of_today_has_a_report_that_names_it() -> None:
    for finding in ON_A_CPU:
        if not finding.fixed and not finding.source:
            text = findings.report_path(finding).read_text(encoding="utf-8")
            for part in ("**Version**", "## Reproduction", "## Measured", "## Proposed fix"):
                assert part in text, f"{finding.id}: {part}"


def test_the_page_shows_every_finding_and_fetches_nothing() -> None:
    page = findings.page(FINDINGS, SEEN)
    assert set(re.findall(r'<h2 id="([^"]+)">', page)) >= {f.id for f in FINDINGS}
    for state in State:
        kind = "passed" if state is State.GREEN else state
        shown = len(re.findall(rf'class="cell {kind}"', page))
        assert shown == sum(s.state is state for s in SEEN)
    assert not re.search(r'(src|href)="(https?:)?//', page)


def test_the_document_says_what_is_no_finding() -> None:
    text = findings.document(FINDINGS, SEEN)
    for why in (*NOT_PRODUCED.values(), *(none.why for none in NO_FINDINGS)):
        assert why in text


@pytest.mark.parametrize("what", ["--run", "--kept"])
@pytest.mark.parametrize("page", ["file/page.html", "."])
def test_a_page_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    what: str,
    page: str,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(findings, "run_releases", lambda _: pytest.fail("trials of hours ran"))
    with pytest.raises(SystemExit, match="2"):
        findings.main([what, "--out", str(tmp_path / page)])
    said = capsys.readouterr().err.splitlines()
    told = f"a page that cannot be written is refused in one line: {said}"
    assert len(said) == 1, told
    assert said[0].startswith(f"--out = '{tmp_path / page}' is not accepted"), told


def test_a_folder_without_records_is_refused_in_one_line(
    tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        findings.main(["--report", str(tmp_path)])
    (line,) = capsys.readouterr().err.splitlines()
    accepted = "a folder that specgate upstream wrote"
    assert line == f"--report = '{tmp_path}' is not accepted; accepted: {accepted}"


@pytest.mark.parametrize("code", [0, 1, 2, 3, -9])
def test_a_run_that_broke_off_is_no_sighting(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        options = dict(zip(command[-8::2], command[-7::2], strict=True))
        assert options.pop("-k") == "some-sglang-0.5.16/trtllm_mha/xqa-eager"
        wanted = {"--release": "0.5.16", "--backends": "all", "--report": str(tmp_path)}
        assert options == wanted, "a finding may be of any backend"
        write_records(tmp_path / "records.jsonl", [trial("some")])
        return subprocess.CompletedProcess(command, code, "collected 3 items\n", "")

    monkeypatch.setattr(findings.subprocess, "run", run)
    asked = partial(findings.run_trials, "0.5.16", ["some trtllm_mha/xqa eager"], tmp_path)
    if code in (0, 1):
        assert [record.case for record in asked()] == ["some"]
        return
    with pytest.raises(UsageError, match=r"left no records, or not all:\ncollected 3 items"):
        asked()


@pytest.mark.parametrize(
    ("answer", "code", "told"), [(Verdict.PASSED, 0, "1 of 1"), (Verdict.ERROR, 1, "0 of 1")]
)
def test_a_window_that_does_not_show_ends_with_1(
    answer: Verdict,
    code: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = []

    def ran(trials: dict[str, list[str]]) -> list[Record]:
        asked.append(trials)
        return [ended("0.5.16", Verdict.WAIVED, RED[0]), ended("0.5.18", answer)]

    monkeypatch.setattr(findings, "FINDINGS", (FINDING,))
    monkeypatch.setattr(findings, "run_releases", ran)
    assert findings.main(["--windows"]) == code
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"{told} windows seen red, then green"
    assert asked == [{"0.5.16": [NARROW, STRIDED], "0.5.18": [NARROW, STRIDED]}]


def test_one_window_of_two_that_does_not_show_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [ended("0.5.16", Verdict.WAIVED, RED[0]), ended("0.5.18", Verdict.PASSED)]
    monkeypatch.setattr(findings, "FINDINGS", (FINDING, replace(FINDING, id="unseen")))
    monkeypatch.setattr(findings, "run_releases", lambda trials: records)
    code = findings.main(["--windows"])
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 2 windows seen red, then green"
    assert code == 1, f"every window has to show, not only one of them; obtained exit code {code}"
