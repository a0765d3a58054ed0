"""Findings: which red trials of a release they explain, and which they miss."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fixtures import upstream
from fixtures.fakes.sample_records import trial
from fixtures.plan import effect_trials, upstream_trials
from fixtures.tables import CASES
from fixtures.tables.findings import FINDINGS, Finding, find_finding
from fixtures.upstream import unseen_findings, verdict_tables
from harness.core.capability import refusal
from harness.core.case import Execution, Mode
from harness.core.record import Record, Verdict, write_records
from harness.differential.isolated import TrialProcess
from harness.differential.trial import untried
from harness.errors import UsageError
from harness.sglang.context import INTERPRETED
from harness.sglang.releases import FOLDER, RELEASES, Release, find_release
from harness.sglang_subjects import SGLangSubject, sglang_subjects
from harness.subjects import REFERENCE
from suites.upstream import test_releases as releases

FINDING = Finding(
    id="wall",
    title="the table is too narrow",
    subject="trtllm_mha/*",
    case="mha-*-context_edge*",
    execution="graph",
    message=r"<= \d+, the block table",
    since="0.5.14",
    fixed="0.5.22",
    where="trtllm_mha_backend.py",
    produced="always",
    effect="wrong",
)
SHOWN = trial(
    "mha-decode-context_edge_bs1",
    Verdict.ERROR,
    subject="sglang-0.5.16/trtllm_mha/xqa",
    execution="graph",
    message="seq_lens = [193]; accepted: <= 192, the block table's width",
)


@pytest.mark.parametrize(
    ("changes", "explained"),
    [
        ({}, True),
        ({"subject": "sglang-0.5.14/trtllm_mha/trtllm_gen"}, True),
        ({"subject": "sglang-0.5.13/trtllm_mha/xqa"}, False),
        ({"subject": "sglang-0.5.22/trtllm_mha/xqa"}, False),
        ({"subject": "sglang-0.5.16/trtllm_mla/xqa"}, False),
        ({"subject": "trtllm_mha/xqa"}, False),
        ({"case": "mha-decode-bs1_short"}, False),
        ({"execution": "eager"}, False),
        ({"message": "hidden_states: wrong"}, False),
    ],
)
def test_a_finding_explains_its_own_trials_in_its_releases(
    changes: dict[str, str], explained: bool
) -> None:
    found = find_finding(replace(SHOWN, **changes), [FINDING])
    assert found is (FINDING if explained else None)


@pytest.mark.parametrize(
    ("pattern", "device", "explained"),
    [
        ("*", "cpu", True),
        ("*", "cuda:0", True),
        ("cuda", "cuda:0", True),
        ("cuda", "cpu", False),
        ("cpu", "cuda:1", False),
    ],
)
def test_a_finding_names_the_devices_that_show_it(
    pattern: str, device: str, explained: bool
) -> None:
    finding = replace(FINDING, device=pattern)
    assert finding.explains(replace(SHOWN, device=device)) is explained


@pytest.mark.parametrize("field", ["title", "where", "produced", "effect"])
def test_a_finding_says_what_where_and_how_bad(field: str) -> None:
    with pytest.raises(UsageError, match=f"finding.{field}"):
        replace(FINDING, **{field: ""})


def test_the_table_names_releases_and_rows_that_exist() -> None:
    assert len({finding.id for finding in FINDINGS}) == len(FINDINGS)
    for finding in FINDINGS:
        assert finding.since in RELEASES
        assert finding.fixed in ("", *RELEASES)
        assert any(finding.is_in(version) for version in RELEASES)


def test_a_finding_that_no_trial_shows_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "FINDINGS", (FINDING, replace(FINDING, id="other")))
    seen = replace(SHOWN, verdict=Verdict.WAIVED, message=f"wall: {SHOWN.message}")
    assert unseen_findings(find_release("0.5.16"), [seen]) == ["other"]
    assert unseen_findings(find_release("0.5.22"), [seen]) == []
    gpus = (FINDING, replace(FINDING, id="other", device="cuda"))
    monkeypatch.setattr(upstream, "FINDINGS", gpus)
    assert unseen_findings(find_release("0.5.16"), [seen]) == []
    elsewhere = replace(seen, subject="sglang-0.5.16/trtllm_mla/trtllm_gen")
    assert unseen_findings(find_release("0.5.16"), [elsewhere]) == []


@pytest.mark.parametrize(
    ("codes", "code"),
    [({}, 0), ({"0.5.14": 1}, 1), ({"0.5.16": 1, "0.5.18": 2}, 2), ({"0.5.16": -9}, -9)],
)
def test_of_several_releases_the_worst_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: dict[str, int], code: int
) -> None:
    def run(release: Release, folder: Path, *_: object) -> int:
        folder.mkdir(parents=True)
        write_records(folder / "records.jsonl", [trial("mha-decode-bs1_short")])
        return codes.get(release.version, 0)

    monkeypatch.setattr(upstream, "run_release", run)
    monkeypatch.setattr(upstream, "install", lambda *_, **__: None)
    monkeypatch.setattr(upstream, "FINDINGS", ())
    words = ["0.5.14", "0.5.16", "0.5.18", "--report", str(tmp_path)]
    ended = upstream.main(words)
    told = (
        f"the exit code is the one farthest from 0 of all releases: {code} of {codes}, not {ended}"
    )
    assert ended == code, told


def test_a_run_that_shows_a_finding_no_more_is_red(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    passed = replace(SHOWN, verdict=Verdict.PASSED, message="")

    def run(release: Release, folder: Path, *_: object) -> int:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "records.jsonl").unlink(missing_ok=True)
        write_records(folder / "records.jsonl", [passed])
        return 0

    monkeypatch.setattr(upstream, "run_release", run)
    monkeypatch.setattr(upstream, "install", lambda *_, **__: None)
    monkeypatch.setattr(upstream, "FINDINGS", (FINDING,))
    words = ["0.5.16", "--report", str(tmp_path)]
    assert upstream.main(words) == 1, "the table says that the release has it"
    assert "finding wall is not seen in 0.5.16" in capsys.readouterr().out
    assert upstream.main([*words, "-k", "decode"]) == 0, "a part of the rows need not show it"
    told = "with --all-backends every row runs, too: a finding that is not seen ends it with 1"
    assert upstream.main([*words, "--all-backends"]) == 1, told


def test_a_finding_whose_trials_show_another_may_be_there_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = (
        "mha-decode-context_edge_bs1 trtllm_mha/xqa graph",
        "mha-decode-page16 trtllm_mha/xqa graph",
    )
    hidden = replace(FINDING, id="hidden", case="mha-*", message="never", trials=own)
    monkeypatch.setattr(upstream, "FINDINGS", (FINDING, hidden))
    release = find_release("0.5.16")
    seen = replace(SHOWN, verdict=Verdict.WAIVED, message=f"wall: {SHOWN.message}")
    assert unseen_findings(release, [seen]) == []
    passed = replace(SHOWN, case="mha-decode-page16", verdict=Verdict.PASSED, message="")
    assert unseen_findings(release, [seen, passed]) == ["hidden"]
    assert unseen_findings(release, [replace(seen, case="mha-decode-fp16")]) == ["hidden"]


def whole_matrix(subjects: Iterable[SGLangSubject]) -> list[SGLangSubject]:
    """Those that every row of their family is planned on."""
    return [s for s in subjects if s.kernel not in (REFERENCE, INTERPRETED)]


def test_kernels_that_run_interpreted_get_a_few_eager_rows_of_every_mode() -> None:
    subjects = [s for s in sglang_subjects(find_release("0.5.13")) if s.kernel == INTERPRETED]
    planned = list(upstream_trials(subjects))
    assert {e for _, _, e in planned} == {Execution.EAGER}
    for subject in subjects:
        modes = [c.mode for c, s, _ in planned if s is subject]
        assert set(modes) == set(Mode) - {Mode.IDLE}
        assert len(modes) <= 40


def test_a_mode_that_a_release_lacks_is_one_refusal_of_each_subject() -> None:
    subjects = sglang_subjects(find_release("0.5.23"))
    v1 = [(s.name, e) for c, s, e in upstream_trials(subjects) if c.mode is Mode.DRAFT_EXTEND]
    real = [s for s in whole_matrix(subjects) if Mode.DRAFT_EXTEND in s.modes]
    assert v1 == [(subject.name, Execution.EAGER) for subject in real]
    refused = {
        s.refusal(c, e) for c, s, e in upstream_trials(subjects) if c.mode is Mode.DRAFT_EXTEND
    }
    assert refused == {"sglang 0.5.23 has no ForwardMode.DRAFT_EXTEND"}


def test_every_row_of_a_family_is_planned_on_every_backend_of_it() -> None:
    subjects = sglang_subjects(find_release("0.5.13"))
    planned = {(c.id, s.name) for c, s, _ in upstream_trials(subjects)}
    real = whole_matrix(subjects)
    whole = [subject for subject in real if subject.served_modes == frozenset(Mode)]
    assert {subject.classes.name for subject in whole} >= {"trtllm_mha", "trtllm_mla"}
    assert planned >= {
        (case.id, s.name) for s in whole for case in CASES.values() if case.family is s.family
    }
    unlimited = {
        (c.id, s.classes) for c, s, _ in upstream_trials(subjects) if s.kernel == REFERENCE
    }
    assert all(
        refusal(CASES[row], s.capability)
        for row, classes in unlimited
        for s in real
        if s.classes == classes
    )
    assert len(unlimited) > 0
    counted = {(c.mode, e) for c, s, e in effect_trials(subjects) if s is subjects[0]}
    assert counted >= {(Mode.DECODE, Execution.GRAPH), (Mode.TARGET_VERIFY, Execution.EAGER)}


def counts(records: list[Record]) -> list[list[str]]:
    (table,) = verdict_tables(records)
    return [list(column.cells) for column in table.columns]


def test_a_table_counts_findings_apart_from_red() -> None:
    records = [
        replace(SHOWN, execution="eager", verdict=verdict)
        for verdict in (Verdict.PASSED, Verdict.PASSED, Verdict.WAIVED, Verdict.ERROR)
    ]
    assert counts(records) == [["decode"], ["eager"], ["2"], ["1"], [""], ["1"]]


def test_a_trial_of_a_release_names_the_release_or_the_checkout(tmp_path: Path) -> None:
    release = find_release("0.5.18")
    released, checkout = sglang_subjects(release)[0], sglang_subjects(release, tmp_path)[0]
    assert released.environment("cpu").sglang == "0.5.18"
    assert checkout.environment("cpu").sglang == f"0.5.18 at {tmp_path}"
    assert f"upstream 0.5.18 --source {tmp_path} -k 'x'" in checkout.reproduce("x")


def test_a_command_finds_folders_whose_names_have_spaces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "all releases"))
    checkout = sglang_subjects(find_release("0.5.18"), tmp_path / "my checkout")[0]
    where, *words = shlex.split(checkout.reproduce("x"))
    assert where == f"{FOLDER}={tmp_path / 'all releases'}"
    assert words == [
        "specgate",
        "upstream",
        "0.5.18",
        "--source",
        f"{tmp_path}/my checkout",
        "-k",
        "x",
    ]


def test_a_release_s_trial_on_a_gpu_is_run_again_there(pytestconfig: pytest.Config) -> None:
    case, subject = CASES["mha-decode-bs2_ragged"], sglang_subjects(find_release("0.5.18"))[0]
    options = {"--device": "cuda:1"}
    asked = cast(
        "pytest.Config",
        SimpleNamespace(getoption=lambda name: options.get(name) or pytestconfig.getoption(name)),
    )
    kept: list[Record] = []

    def run(*one: Any) -> Record:
        return replace(untried(*one), verdict=Verdict.PASSED)

    process = cast("TrialProcess", SimpleNamespace(run=run))
    cpu = torch.device("cpu")
    releases.test_case(case, subject, Execution.GRAPH, process, cpu, kept.append, asked)
    said = "the command of a release's trial on a GPU names the device, before and after the trial"
    ends = [record.reproduce.partition("-k ")[2].partition(" ")[2] for record in kept]
    assert ends == ["--device cuda"] * 2, f"{said}: {ends}"


def test_on_cuda_nothing_is_installed_and_records_have_a_folder_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run: list[tuple[Path, str]] = []

    def ran(release: Release, folder: Path, args: object, device: str) -> int:
        run.append((folder, device))
        folder.mkdir(parents=True)
        (folder / "records.jsonl").touch()
        return 0

    monkeypatch.setattr(upstream, "run_release", ran)
    monkeypatch.setattr(upstream, "install", None)
    given = ["0.5.16", "--device", "cuda", "--report", str(tmp_path)]
    assert upstream.main(given) == 0
    assert run == [(tmp_path / "0.5.16-cuda", "cuda")]


@pytest.mark.parametrize(("code", "told"), [(4, 4), (0, 1)])
def test_a_run_without_records_ends_as_pytest_did_and_never_well(
    code: int, told: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "run_release", lambda *_: code)
    monkeypatch.setattr(upstream, "install", lambda *_, **__: None)
    assert upstream.main(["0.5.16", "--report", str(tmp_path)]) == told


@pytest.mark.parametrize("package", ["sglang", "flashinfer"])
def test_a_checkout_is_run_in_the_place_of_the_wheel_and_keeps_its_own_records(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def run(release: Release, folder: Path, args: Sequence[str], device: str) -> int:
        asked.extend((folder, list(args)))
        folder.mkdir(parents=True)
        (folder / "records.jsonl").touch()
        return 0

    (tmp_path / "python" / package).mkdir(parents=True)
    (tmp_path / "python" / package / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(upstream, "run_release", run)
    monkeypatch.setattr(upstream, "install", lambda release, *, wheel=True: asked.append(wheel))
    option, theirs = {
        "sglang": ("--source", "--sglang-source"),
        "flashinfer": ("--flashinfer", "--flashinfer"),
    }[package]
    assert upstream.main(["0.5.16", option, "python", "--report", "made"]) == 0
    # The process of the trials has another working folder.
    folder, args = tmp_path / "made/checkout", [theirs, str(tmp_path / "python")]
    wheel, made, given = asked
    told = (
        "a checkout of sglang is installed without the release's wheel, one of FlashInfer with it"
    )
    assert wheel is (package == "flashinfer"), told
    assert made == folder, f"records lie in REPORT/checkout, {folder}, not in {made}"
    assert given == args, f"trials are given the absolute path of the checkout, {args}, not {given}"


def test_each_release_on_a_checkout_keeps_its_own_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").touch()
    folders: list[Path] = []
    monkeypatch.setattr(upstream, "run_release", lambda _, folder, *__: folders.append(folder) or 1)
    monkeypatch.setattr(upstream, "install", lambda *_, **__: None)
    words = ["--flashinfer", str(tmp_path), "--report", str(tmp_path)]
    assert upstream.main(["0.5.22", "0.5.23", *words]) == 1
    names = [folder.name for folder in folders]
    told = "a release does not replace the records of the one before it"
    assert names == ["0.5.22-checkout", "0.5.23-checkout"], told


def test_records_of_a_run_before_are_not_told_as_those_of_one_that_did_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "0.5.16").mkdir()
    write_records(tmp_path / "0.5.16" / "records.jsonl", [SHOWN])
    monkeypatch.setattr(upstream, "run_release", lambda *_: int(pytest.ExitCode.USAGE_ERROR))
    monkeypatch.setattr(upstream, "install", lambda *_, **__: None)
    assert upstream.main(["0.5.16", "--report", str(tmp_path)]) == 4
    assert capsys.readouterr().out == "", "pytest refused its options: nothing of it ran"


def test_an_impossible_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        upstream.main(["0.5.16", "--device", "tpu"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "--device = 'tpu' is not accepted; accepted: cpu or cuda[:INDEX]" in told


@pytest.mark.parametrize("release", RELEASES.values(), ids=lambda release: release.version)
def test_most_rows_of_a_releases_modes_are_run(release: Release) -> None:
    run: dict[tuple[str, str], dict[str, bool]] = {}
    for case, subject, execution in upstream_trials(sglang_subjects(release)):
        lacks_mode = case.mode is Mode.DRAFT_EXTEND and not release.has_draft_extend_v1
        if subject.kernel != INTERPRETED and not lacks_mode:
            rows = run.setdefault((subject.classes.name, subject.family), {})
            is_run = subject.refusal(case, execution) is None
            rows[case.id] = rows.get(case.id, False) or is_run
    assert len(run) == 6
    for (name, family), rows in run.items():
        least = 0.9 if name.startswith("trtllm") else 0.8
        assert sum(rows.values()) >= least * len(rows), (name, family)
