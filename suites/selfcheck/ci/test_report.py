"""The report shows what the records say, no more and no less, in one page that needs no network."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from ci import report, summary
from fixtures.fakes.sample_records import ENVIRONMENT, compared, trial
from harness.core.record import Record, TokenCounts, Verdict, write_records

GRAPH = {"execution": "graph"}
RECORDS = [
    trial("one", quantities=compared(0.1), seconds=0.25, planned=8, effects={"host_syncs": 0}),
    trial(
        "two",
        Verdict.WRONG_NUMBERS,
        message="</script><b>",
        quantities=(*compared(0.2), *compared(2.0, name="hidden_states")),
        seconds=0.25,
        planned=8,
        effects={"host_syncs": 2, "kernels": 7},
    ),
    trial("one", mode="extend", quantities=compared(0.4), seconds=0.5, planned=8),
    trial("one", Verdict.REFUSED, message="head_dim", planned=8, seconds=9.0, **GRAPH),
    trial("two", Verdict.REFUSED, message="head_dim", planned=8, **GRAPH),
    trial("two", Verdict.WAIVED, message="#7", planned=8, subject="other", **GRAPH),
    trial(
        "gqa/p1",
        mode="generate",
        accept_lengths=(3, 1, 3),
        planned=8,
        seconds=5.0,
        tokens=TokenCounts(judged=8, tied=1),
    ),
    trial(
        "gqa/p2",
        mode="generate",
        accept_lengths=(4,),
        planned=8,
        seconds=5.0,
        tokens=TokenCounts(judged=5, tied=2, unjudged=1),
    ),
]
SUBJECT = ("trtllm_mha/reference", "cpu")


def payload(page: str) -> list[dict[str, object]]:
    found = re.search(r'<script type="application/json" id="rows">(.*?)</script>', page, re.DOTALL)
    assert found
    rows: list[dict[str, object]] = json.loads(found[1])
    return rows


def shown_at_80_columns(records: Sequence[Record]) -> str:
    """What a terminal of 80 columns is shown."""
    printed = StringIO()
    report.show(records, Console(width=80, file=printed))
    return printed.getvalue()


def test_matrix_groups_by_subject_place_mode_and_execution() -> None:
    cells = summary.matrix([*RECORDS, trial("one", device="cuda:0")])
    assert list(cells) == [("other", "cpu"), SUBJECT, ("trtllm_mha/reference", "cuda")]
    decode = cells[SUBJECT]["decode", "eager"]
    assert (decode.ran, decode.red, decode.worst, decode.state) == (2, 1, 4.0, "red")
    extend = cells[SUBJECT]["extend", "eager"]
    assert (extend.ran, extend.red, extend.worst, extend.state) == (1, 0, 0.8, "passed")
    refused = cells[SUBJECT]["decode", "graph"]
    assert (refused.ran, refused.compared, refused.state) == (0, False, "refused")
    assert ("extend", "graph") not in cells[SUBJECT]


def test_cell_is_red_beyond_its_allowance_whatever_the_verdict() -> None:
    assert summary.Cell(records=(trial("one", quantities=compared(0.51)),)).state == "red"


def test_columns_follow_the_modes_then_appearance() -> None:
    assert summary.columns(RECORDS) == [
        ("extend", "eager"),
        ("decode", "eager"),
        ("decode", "graph"),
        ("generate", "eager"),
    ]


def test_census_counts_every_trial_once() -> None:
    assert summary.census(RECORDS) == summary.Census(planned=8, run=5, refused=2, waived=1)
    assert summary.census(RECORDS).missing == 0
    assert summary.census(RECORDS[:6]).missing == 2
    assert summary.census([*RECORDS, RECORDS[0]]).missing == -1


def test_reasons_come_most_frequent_first() -> None:
    assert summary.reasons(RECORDS) == [("refused", "head_dim", 2), ("waived", "#7", 1)]


def test_rate_counts_compared_trials_alone() -> None:
    assert summary.rate([*RECORDS, trial("uncompared", seconds=7.0)]) == 3.0
    assert summary.rate(RECORDS[3:]) == 0.0


def test_accept_lengths_gather_the_prompts_of_a_pair() -> None:
    key = ("gqa", "trtllm_mha/reference", "eager")
    assert summary.accept_lengths(RECORDS) == {key: Counter({3: 2, 1: 1, 4: 1})}


def test_a_mean_accept_length_is_that_of_a_step() -> None:
    # Steps of 3, 1, 3 and 4 tokens.
    told = "a pair's mean accept length is its tokens, 11, over its steps, 4"
    assert "mean 2.75 over 4 steps" in report.page(RECORDS), told


def test_tokens_are_counted_over_all_texts() -> None:
    assert summary.tokens(RECORDS) == TokenCounts(judged=13, tied=3, unjudged=1)
    assert "13 judged, 3 tied, 1 unjudged" in report.page(RECORDS)


def test_the_page_tells_that_a_trial_that_failed_and_then_passed_contradicts_itself() -> None:
    failed = trial("one", Verdict.WRONG_NUMBERS, message="off", planned=1)
    told = "contradict each other"
    assert told in report.page([failed, trial("one", planned=1)]), "a page tells what the gate does"
    assert told not in report.page([trial("one", planned=1)] * 2)


def test_bars_keep_the_gap() -> None:
    assert report.bars({3: 2, 1: 1, 4: 1}) == [
        report.Bar(1, 1, 0.5, 0.25),
        report.Bar(2, 0, 0.0, 0.0),
        report.Bar(3, 2, 1.0, 0.5),
        report.Bar(4, 1, 0.5, 0.25),
    ]
    said = "a histogram begins at a length of 1, though no step was as short"
    assert [bar.length for bar in report.bars({4: 1, 3: 2})] == [1, 2, 3, 4], said


def test_a_subject_beyond_its_allowance_is_red_in_the_table_whatever_its_verdict() -> None:
    passed = [trial("one", quantities=compared(0.51)), trial("one", subject="other")]
    styles = [row.style for row in report.table(passed).rows]
    assert styles == ["", "bold red"], "a trial that passed with 1.02 × what was allowed is red"


def test_effects_keep_every_distinct_count() -> None:
    names, counts = summary.effects(RECORDS)
    assert names == ["host_syncs", "kernels"]
    key = ("trtllm_mha/reference", "decode", "eager")
    assert counts == {key: {"host_syncs": [0, 2], "kernels": [7]}}


@pytest.mark.parametrize(
    ("ratio", "shown"),
    [(0.0, "0.00"), (0.996, "1.00"), (9.994, "9.99"), (37.04, "37"), (float("inf"), "∞")],
)
def test_ratios_are_short(ratio: float, shown: str) -> None:
    assert report.times(ratio) == shown


def test_page_needs_nothing_else() -> None:
    page = report.page(RECORDS)
    assert not re.search(r"<link|<img|<iframe|\bsrc=|@import|url\(|https?:", page)


def test_page_carries_every_record_unharmed() -> None:
    rows = payload(report.page(RECORDS))
    assert [(row["case"], row["verdict"]) for row in rows] == [
        (r.case, str(r.verdict)) for r in RECORDS
    ]
    assert rows[1]["message"] == "</script><b>"
    assert rows[1]["quantities"] == [
        ["logits", "0.2", "0.5", "0.40", "request 1, position 17", False],
        ["hidden_states", "2", "0.5", "4.00", "request 1, position 17", True],
    ]


def test_page_shows_each_cell_by_state_and_absence() -> None:
    page = report.page(RECORDS)
    cells = re.findall(r'class="cell (\w+)" style="--level: (\d+)%"', page)
    assert cells == [
        ("refused", "0"),
        ("passed", "80"),
        ("red", "100"),
        ("refused", "0"),
        ("passed", "0"),
    ]
    assert page.count('class="absent"') == 3


def test_every_cell_has_an_address_that_the_script_knows() -> None:
    page = report.page([*RECORDS, trial("one", device="cuda:0")])
    cells = re.findall(
        r'id="([^"]+)" href="#([^"]+)" data-subject="([^"]*)" data-place="([^"]*)"\s+'
        r'data-mode="([^"]*)" data-execution="([^"]*)"',
        page,
    )
    assert len(cells) == page.count('class="cell ') - 2  # the legend shows two
    assert len({name for name, *_ in cells}) == len(cells)
    for name, link, subject, place, mode, execution in cells:
        assert name == link == f"{subject}@{place}/{mode}/{execution}"
    assert "trtllm_mha/reference@cuda/decode/eager" in {name for name, *_ in cells}
    script = page.rpartition("<script>")[2]
    assert "location.hash" in script
    assert 'addEventListener("hashchange", choose)' in script


@pytest.mark.parametrize(
    ("record", "shown"),
    [
        (trial("tokens", quantities=compared(0.0, 0.0)), "equal"),
        (trial("numbers", quantities=compared(0.0)), "equal"),
        (trial("numbers", quantities=compared(1e-9)), "0.00"),
        (trial("counts", effects={"kernels": 2}), "passed"),
        (trial("spoilt", Verdict.ERROR, quantities=compared(0.0)), "0.00"),
        (trial("none", Verdict.REFUSED, message="x"), "refused"),
        (trial("waived", Verdict.WAIVED, message="x", quantities=compared(0.0)), "0.00"),
    ],
)
def test_a_cell_is_equal_where_the_error_is_zero_and_nowhere_else(
    record: Record, shown: str
) -> None:
    [said] = re.findall(r"decode, eager: ([^,]+),", report.page([record]))
    assert said == shown


def test_page_says_what_stood_in_for_which_kernel() -> None:
    xqa, real = trial("one", subject="trtllm_mha/xqa"), {"device": "cuda:0"}
    refused = trial("one", Verdict.REFUSED, subject="trtllm_mla/flash_mla", message="x")
    gpu = trial("one", subject="trtllm_mla/trtllm_gen", **real)
    assert summary.stand_ins([*RECORDS, xqa, refused, gpu]) == {"cpu": ["xqa"]}
    page = report.page([xqa, refused, gpu])
    assert "On cpu no kernel is real: the reference stood in for xqa, as strict" in page
    assert "cpu, reference for xqa" in page
    assert "<small>cuda</small>" in page
    assert "no kernel is real" not in report.page([gpu, trial("one", **real)])


GPU = {"kind": "sm90", "device": "cuda:1", "planned": 2}
MIXED = [
    trial("one", subject="trtllm_mha/xqa", **GPU),
    trial("one", Verdict.REFUSED, subject="trtllm_mha/trtllm_gen", message="needs SM100", **GPU),
    trial("one", subject="trtllm_mha/xqa", kind="cpu", planned=3),
    trial("one", subject="trtllm_mha/trtllm_gen", kind="cpu", planned=3),
    trial("two", subject="trtllm_mha/reference", kind="cpu", planned=3),
]


def test_what_no_kind_verified_is_named_with_its_reason() -> None:
    assert summary.unverified(MIXED) == {"trtllm_mha/trtllm_gen": Counter({"needs SM100": 1})}
    on_sm100 = trial("one", subject="trtllm_mha/trtllm_gen", kind="sm100", device="cuda:0")
    assert summary.unverified([*MIXED, on_sm100]) == {}
    declared = trial("one", subject="trtllm_mha/trtllm_gen", kind="sm100")
    assert summary.unverified([*MIXED, declared]) == summary.unverified(MIXED)
    assert summary.unverified(MIXED[2:]) == {}


def test_a_trial_that_is_red_on_its_only_gpu_is_verified_by_no_kind() -> None:
    red = trial("one", Verdict.WRONG_NUMBERS, subject="trtllm_mha/xqa", **GPU)
    told = summary.unverified([red, *MIXED[1:]]).get("trtllm_mha/xqa")
    said = "a trial that is red on the only GPU that ran it is told as verified by no kind"
    assert told == Counter({f"{Verdict.WRONG_NUMBERS} on sm90": 1}), f"{said}: {told}"


def test_why_no_kind_verified_a_trial_is_what_a_gpu_said_of_it() -> None:
    there = trial("one", Verdict.REFUSED, subject="trtllm_mha/trtllm_gen", message="SM100", **GPU)
    on_cpu = trial("one", subject="trtllm_mha/trtllm_gen", kind="cpu", planned=3)
    told = "a stand-in passed on the CPU, whose record comes first, and a GPU refused: that is why"
    found = summary.unverified([on_cpu, there])
    assert found == {"trtllm_mha/trtllm_gen": Counter({"SM100": 1})}, f"{told}: {found}"


def test_every_trial_that_no_kind_verified_is_counted() -> None:
    gen = {"subject": "trtllm_mha/trtllm_gen", **GPU}
    causes = ("needs SM100", "head_dim", "needs SM100")
    refused = [trial(str(n), Verdict.REFUSED, message=m, **gen) for n, m in enumerate(causes)]
    shown = shown_at_80_columns(refused)
    told = "of three trials that no kind verified all are counted, beside the usual of two reasons"
    assert "verified by no kind: trtllm_mha/trtllm_gen: 3 trials, needs SM100\n" in shown, told


def test_a_mixed_run_has_a_column_per_kind() -> None:
    page = report.page(MIXED)
    kinds = page.partition('id="kinds-title"')[2].partition("</table>")[0]
    assert re.findall(r'scope="col">([^<]*)<', kinds) == ["subject", "sm90", "cpu"]
    assert re.search(r"planned</th><td>2</td><td>3</td>", kinds)
    assert "needs SM100</td>" in page.partition('id="unverified-title"')[2].partition("</table>")[0]
    assert "kinds-title" not in report.page(MIXED[:2])
    assert '<p class="verdict good">green</p>' in page


def test_the_table_of_a_mixed_run_tells_each_kind_and_what_none_verified() -> None:
    shown = shown_at_80_columns(MIXED)
    assert "sm90: planned 2 = run 1 + refused 1 + waived 0\n" in shown
    assert "cpu: planned 3 = run 3 + refused 0 + waived 0\n" in shown
    assert "verified by no kind: trtllm_mha/trtllm_gen: 1 trials, needs SM100\n" in shown


def test_page_says_when_the_trials_were_recorded() -> None:
    begun, ended, later = (
        f"2026-11-{day}" for day in ("21T23:50:59+00:00", "21T23:58:00+00:00", "22T00:01:00+00:00")
    )
    times = [trial(str(n), recorded=at) for n, at in enumerate((ended, begun, later))]
    assert summary.dates(times) == ("2026-11-21 23:50", "2026-11-22 00:01")
    first = [replace(times[1], verdict=Verdict.REFUSED, message="x"), times[2]]
    told = "a run begins with its first record, of a refused trial too"
    assert summary.dates(first) == ("2026-11-21 23:50", "2026-11-22 00:01"), told
    assert "2026-11-21 23:50</time> to 2026-11-22 00:01 UTC" in report.page(times)
    assert "2026-11-21 23:50</time> to 23:58 UTC" in report.page(times[:2])
    assert "2026-11-21 23:58</time> UTC" in report.page(times[:1])
    assert "<time" not in report.page(RECORDS)


def test_matrix_is_whole_at_every_width() -> None:
    css = (report.REPORT_FOLDER / "report.css").read_text(encoding="utf-8")
    assert re.search(r'\.matrix th\[scope="row"\][^}]*position: sticky;\s*left: 0;', css)
    assert not re.search(
        r"^[^{}]*\b(header|main|\.matrix)\b[^{}]*\{[^}]*max-width", css, re.MULTILINE
    )
    page = report.page(RECORDS)
    assert re.search(r'<div class="scroll"[^>]*>\s*<table class="matrix">', page)
    assert all(float(size) >= 12 for size in re.findall(r"font(?:-size)?: ([\d.]+)px", css))


def test_every_figure_has_a_label() -> None:
    page = report.page(RECORDS)
    drawn = re.findall(r"<svg[^>]*>", page)
    assert drawn
    assert all("aria-label=" in svg for svg in drawn)


def test_page_says_what_the_gate_says() -> None:
    assert '<p class="verdict bad">1 problem</p>' in report.page(RECORDS)
    assert '<p class="verdict bad">1 problem</p>' in report.page([])
    assert '<p class="verdict good">green</p>' in report.page([trial("one")])


def test_page_survives_numbers_json_cannot_say() -> None:
    [row] = payload(report.page([trial("one", quantities=compared(float("nan")))]))
    assert row["quantities"] == [["logits", "nan", "0.5", "∞", "request 1, position 17", True]]


def test_page_lists_an_environment_once() -> None:
    page = report.page([*RECORDS, trial("cuda", device="cuda:0")])
    assert page.count(f"<dd>{ENVIRONMENT.torch}</dd>") == 1


def test_page_lists_the_environment_of_every_machine() -> None:
    other = replace(ENVIRONMENT, torch="2.99.0")
    page = report.page([*RECORDS, trial("three", environment=other)])
    found = [page.count(f"<dd>{one.torch}</dd>") for one in (ENVIRONMENT, other)]
    assert found == [1, 1], f"the environments of the first and the last record are told: {found}"


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "records.jsonl"
    write_records(path, RECORDS)
    return path


def test_command_prints_a_line_a_subject_and_writes_the_page(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = recorded.with_name("index.html")
    assert report.main([str(recorded), "--out", str(page)]) == 0
    shown = capsys.readouterr().out
    [line] = [line for line in shown.splitlines() if "trtllm_mha/reference" in line]
    assert re.findall(r"[\d.–]+", line.partition("cpu")[2]) == ["5", "1", "2", "4.00", "–"]
    assert "planned 8 = run 5 + refused 2 + waived 1; 3.0 differential cases/s" in shown
    assert page.read_text(encoding="utf-8") == report.page(RECORDS)


def test_what_compared_no_number_has_no_worst_error() -> None:
    texts = trial("gqa/p1", subject="engine/texts", mode="generate", accept_lengths=(3, 1))
    shown = shown_at_80_columns([*RECORDS, texts])
    [line] = [line for line in shown.splitlines() if line.startswith("engine/texts")]
    told = (
        "a trial that ran and compared tokens alone has no worst error, which is not an error of 0"
    )
    assert line.split("cpu")[1].split() == ["1", "0", "0", "–", "–"], f"{told}: {line}"


def test_table_is_cut_nowhere_at_80_columns() -> None:
    longest = {"subject": "trtllm_mla-host_lengths/trtllm_gen", "device": "cuda:0", "kind": "sm100"}
    numbers = {"quantities": compared(0.1), **longest}
    many = [trial(str(n), execution=e, **numbers) for n in range(1000) for e in ("eager", "graph")]
    shown = shown_at_80_columns(many)
    assert "…" not in shown
    assert re.search(r"trtllm_gen @ sm100 +2000 +0 +0 +0\.20 +0\.20", shown)


@pytest.mark.parametrize("target", ["missing/index.html", "records.jsonl/index.html"])
def test_unwritable_page_leaves_nothing(
    recorded: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main([str(recorded), "--out", str(recorded.parent / target)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("report: --out = ")
    assert list(recorded.parent.iterdir()) == [recorded]


def test_page_on_a_folder_leaves_nothing(recorded: Path) -> None:
    folder = recorded.with_name("index.html")
    folder.mkdir()
    assert report.main([str(recorded), "--out", str(folder)]) == 2
    assert sorted(recorded.parent.iterdir()) == [folder, recorded]


def test_missing_records_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(tmp_path / "none.jsonl")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
