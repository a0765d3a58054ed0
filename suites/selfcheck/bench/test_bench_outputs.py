"""Every output of a run says what its findings say, whichever tool or person reads it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as Xml

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from ci.bench import __main__ as command
from ci.bench import (
    charts,
    exports,
    github,
    history_plots,
    junit,
    outputs,
    page,
    plots,
    pytorch_benchmark,
    request_plots,
)
from ci.bench.bench_report import BenchReport
from ci.bench.case_report import number
from ci.bench.history import Series, all_series
from fixtures.fakes import synthetic_bench
from fixtures.tables.margins import MARGINS
from harness.bench import bench_serving
from harness.bench.analysis import verdict
from harness.bench.jsonl import append
from harness.bench.session_records import Role, Session, Trial
from harness.bench.stats.bench_verdict import BenchVerdict
from harness.bench.stats.design import Design, draw_order
from harness.bench.stats.validity import Conditions

pytestmark = pytest.mark.untraced
BS1, BS8 = (workload.id for workload in synthetic_bench.WORKLOADS)
SLOWER = math.log(1.05)
MOVED = {
    f"{BS8}/tpot": SLOWER,
    f"{BS8}/step_time": SLOWER,
    f"{BS1}/output_throughput": math.log(1.08),
}
ONE = synthetic_bench.WORKLOADS[1:]


def bench_report(effects: dict[str, float] | None = None, **more: object) -> BenchReport:
    return BenchReport.of(synthetic_bench.run_lines(effects, **more))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def moved() -> BenchReport:
    return bench_report(MOVED)


@pytest.fixture(scope="module")
def broken() -> BenchReport:
    return bench_report({}, same=0.04)


def cases(text: str) -> dict[tuple[str, str], Xml.Element]:
    found = Xml.fromstring(text).iter("testcase")
    return {(case.get("classname", ""), case.get("name", "")): case for case in found}


def outcome(case: Xml.Element) -> list[str]:
    return [child.tag for child in case if child.tag != "properties"]


def test_verdicts_are_those_of_the_injected_effects(moved: BenchReport) -> None:
    verdicts = {row.case: row.verdict for row in moved.judged if row.verdict is not BenchVerdict.OK}
    assert verdicts == {
        f"{BS8}/tpot": BenchVerdict.REGRESSED,
        f"{BS8}/step_time": BenchVerdict.REGRESSED,
        f"{BS1}/output_throughput": BenchVerdict.IMPROVED,
    }
    assert [row.case for row in moved.judged[:3]] == list(verdicts)
    assert (moved.title, moved.is_red, moved.reasons) == ("REGRESSED", True, ())


def test_of_one_verdict_the_worst_cost_is_first() -> None:
    lost = {"tpot": math.log(1.05), "step_time": math.log(1.08), "output_throughput": -0.15}
    rows = bench_report(lost, workloads=ONE).judged[:3]
    assert {row.verdict for row in rows} == {BenchVerdict.REGRESSED}
    worst_first = [f"{BS8}/{name}" for name in ("output_throughput", "step_time", "tpot")]
    assert [row.case for row in rows] == worst_first, "the worst cost stands first"


def test_noise_that_hides_what_must_be_found_is_no_success() -> None:
    moved = {f"{BS8}/tpot": 0.4}
    loud = bench_report(moved, noise=0.03, injected=0.4, blocks=16)
    by_case = {row.case: row for row in loud.judged}
    assert (loud.title, loud.is_red, loud.reasons) == ("REGRESSED", True, ())
    assert by_case.pop(f"{BS8}/tpot").verdict is BenchVerdict.REGRESSED
    same = {row.case: row.finding for row in loud.cases if row.session.id == "A/A"}
    blind = {case for case, row in by_case.items() if row.verdict is BenchVerdict.BLIND}
    assert {case.partition("/")[2] for case in blind} >= {"step_time", "output_throughput"}
    assert blind == {
        case
        for case, row in by_case.items()
        if row.detectable > math.exp(row.bounds.delta1 + 0.001)
        or same[case].verdict is BenchVerdict.INCONCLUSIVE
    }
    found = cases(junit.document(loud.judged))
    assert {tuple(outcome(found["bench.candidate", case])) for case in blind} == {("error",)}
    text = github.summary(loud)
    assert "| **blind** |" in text
    assert text.splitlines()[4].startswith("* seen of what must be: tpot ")
    quiet = bench_report({}, blocks=16)
    assert (quiet.title, quiet.is_red) == ("OK", False)


def test_an_inconclusive_control_vouches_for_nothing(moved: BenchReport) -> None:
    found = [
        replace(f, evidence=replace(f.evidence, verdict=BenchVerdict.INCONCLUSIVE))
        if f.role is Role.SAME and f.metric in ("ttft", "tpot")
        else f
        for f in moved.run.findings
    ]
    said = {f.id: f for f in verdict(found).findings if f.role is Role.CANDIDATE}
    assert said[f"candidate/{BS1}/ttft"].verdict is BenchVerdict.BLIND
    assert said[f"candidate/{BS1}/ttft"].reasons == ("its A/A case is inconclusive",)
    # What was shown stands by itself.
    assert said[f"candidate/{BS8}/tpot"].verdict is BenchVerdict.REGRESSED
    assert said[f"candidate/{BS1}/accept_length"].verdict is BenchVerdict.OK


def test_junit_maps_verdicts_to_outcomes(moved: BenchReport) -> None:
    found = cases(junit.document(moved.cases))
    assert len(found) == len(moved.cases) == 3 * 2 * 5
    failures = [name for (suite, name), case in found.items() if "failure" in outcome(case)]
    assert failures == [f"{BS8}/tpot", f"{BS8}/step_time"]
    assert outcome(found["bench.candidate", f"{BS1}/output_throughput"]) == []
    assert outcome(found["bench.injected", f"{BS8}/tpot"]) == []
    [suite] = [
        s for s in Xml.fromstring(junit.document(moved.cases)) if "candidate" in s.attrib["name"]
    ]
    totals = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert totals == {"tests": "10", "failures": "2", "errors": "0", "skipped": "0"}


def test_junit_carries_the_numbers(moved: BenchReport) -> None:
    case = cases(junit.document(moved.cases))["bench.candidate", f"{BS8}/tpot"]
    numbers = {p.attrib["name"]: float(p.attrib["value"]) for p in case.iter("property")}
    [row] = [row for row in moved.judged if row.case == f"{BS8}/tpot"]
    assert numbers["ratio"] == pytest.approx(row.evidence.ratio, rel=1e-5)
    assert numbers["ratio"] == pytest.approx(1.05, abs=0.004)
    assert numbers["e_regressed"] == pytest.approx(row.evidence.e_regressed, rel=1e-5)
    assert numbers["delta0"] == pytest.approx(math.log1p(MARGINS["tpot"].delta0), rel=1e-5)
    assert numbers["blocks"] == row.evidence.blocks
    assert numbers["mde"] == pytest.approx(row.finding.mde)
    assert case.get("time") == f"{2.0 * 2 * 10:.3f}"
    assert "B / A +5" in case.find("failure").attrib["message"]  # type: ignore[union-attr]


def test_junit_is_xml_whatever_a_server_logged(moved: BenchReport) -> None:
    row = moved.judged[0]
    logged = "\x1b[31mout of memory\x1b[0m\x00, 4 \u2264 5"
    odd = replace(row, finding=replace(row.finding, reasons=(logged,)))
    [case] = cases(junit.document([odd])).values()
    told = case[-1].get("message", "")
    assert told.endswith("\ufffd[31mout of memory\ufffd[0m\ufffd, 4 \u2264 5"), told


def test_few_blocks_are_inconclusive_and_skipped_with_a_message() -> None:
    few = bench_report({}, blocks=3, workloads=ONE)
    found = cases(junit.document([row for row in few.cases if not row.is_control]))
    assert {tuple(outcome(case)) for case in found.values()} == {("error",)}
    assert few.title == "INVALID"  # the injected slowdown cannot be seen in three blocks
    alone = [replace(row, finding=replace(row.finding, evidence=e)) for row in few.judged[:1]
             for e in [replace(row.evidence, verdict=BenchVerdict.INCONCLUSIVE)]]  # fmt: skip
    [case] = cases(junit.document(alone)).values()
    assert outcome(case) == ["skipped"]
    assert "inconclusive" in case.find("skipped").attrib["message"]  # type: ignore[union-attr]


def test_a_run_whose_control_failed_is_invalid_everywhere(broken: BenchReport) -> None:
    assert (broken.title, broken.is_red) == ("INVALID", True)
    found = cases(junit.document(broken.cases))
    assert {tuple(outcome(c)) for (s, _), c in found.items() if s == "bench.candidate"} == {
        ("error",)
    }
    assert outcome(found["bench.A/A", f"{BS1}/tpot"]) == ["error"]
    assert outcome(found["bench.A/A", f"{BS1}/ttft"]) == []
    text = github.summary(broken)
    assert "control A/A: regressed instead of ok or inconclusive" in text
    lines = list(github.remarks(broken))
    assert len(lines) == github.MOST_ANNOTATIONS
    assert lines[0].startswith("::error title=regressed bs1-in64-out32/tpot::")


def test_equal_arms_of_which_one_is_faster_are_a_failed_control() -> None:
    faster = bench_report({}, same=-0.04)
    found = cases(junit.document(faster.cases))
    told = "an A/A case that improved is an error in JUnit and an annotation, as one that regressed"
    assert outcome(found["bench.A/A", f"{BS1}/tpot"]) == ["error"], told
    assert next(github.remarks(faster)).startswith(f"::error title=improved {BS1}/"), told


LATENCIES = {
    "device": "NVIDIA H200",
    "rows": [
        {
            "what": "metadata, device", "point": "80K-bs1", "arm": "specgate mha", "blocks": 60,
            "value": 2.7812, "low": 2.75, "high": 2.8, "floor": 1.5,
        }
    ],
    "lines": [],
}  # fmt: skip


def test_latencies_follow_the_ratios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "page", lambda *_: "")  # it shows none of them, and takes a second
    for line in synthetic_bench.run_lines({}, workloads=ONE):
        append(tmp_path / "bench.jsonl", line)
    ask = ["--out", str(tmp_path), str(tmp_path / "bench.jsonl")]
    assert command.main(ask) == 0
    without = json.loads((tmp_path / "bench.json").read_text())
    (tmp_path / "latency.json").write_text(json.dumps(LATENCIES))
    assert command.main(ask) == 0
    *ratios, latency = json.loads((tmp_path / "bench.json").read_text())
    assert ratios == without
    assert latency == {
        "name": "metadata, device: specgate mha 80K-bs1 @ NVIDIA H200",
        "unit": "µs",
        "value": 2.781,
        "range": "2.750 to 2.800",
        "extra": "median of 60 blocks",
    }
    families = text_string_to_metric_families((tmp_path / "bench.openmetrics.txt").read_text())
    found = {s.name: s for f in families for s in f.samples if s.name.startswith("specgate_lat")}
    assert found["specgate_latency_microseconds_high"].value == 2.8
    assert found["specgate_latency_microseconds"].labels == {
        "what": "metadata, device",
        "point": "80K-bs1",
        "arm": "specgate mha",
        "sku": "NVIDIA H200",
    }


@pytest.mark.parametrize("text", ["", "[]", '{"device": "x"}', '{"device": "x", "rows": [{}]}'])
def test_latencies_that_are_none_are_refused(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in synthetic_bench.run_lines({}, workloads=ONE):
        append(tmp_path / "bench.jsonl", line)
    (tmp_path / "latency.json").write_text(text)
    assert command.main(["--out", str(tmp_path), str(tmp_path / "bench.jsonl")]) == 2
    assert "latency.json: not what the latency suite writes" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"bench.jsonl", "latency.json"}


def test_dropped_blocks_are_told(moved: BenchReport) -> None:
    dropped = bench_report(MOVED, blocks=12, invalid=(2, 7), workloads=ONE)
    [row] = [row for row in dropped.judged if row.case == f"{BS8}/tpot"]
    assert (row.evidence.dropped, row.verdict) == (2, BenchVerdict.REGRESSED)
    assert "(+2 dropped)" in github.summary(dropped)
    told = f"candidate {BS8}: 2 of 12 blocks dropped: 2 × a request failed"
    assert dropped.dropped == [told]
    assert told in page.page(dropped, {})
    assert f"* {dropped.dropped[0]}" in github.summary(dropped).splitlines()
    assert not moved.dropped
    assert "a request failed" in row.sentence


def test_summary_names_what_is_not_ok_and_nothing_else(moved: BenchReport) -> None:
    text = github.summary(moved, notes=["a note"], link="bench.html")
    assert len(text.splitlines()) <= github.MOST_LINES
    table = [line for line in text.splitlines() if line.startswith("| bs")]
    named = [line.split(" | ")[0].removeprefix("| ") for line in table]
    assert sorted(named[:2]) == [f"{BS8}/step_time", f"{BS8}/tpot"]
    assert named[2:] == [f"{BS1}/output_throughput"]
    assert "2 regressed, 1 improved, 7 ok of 10 cases on cpu" in text
    assert "a note" in text
    assert text.splitlines()[-1] == "[The whole report](bench.html)"


def test_a_long_summary_is_cut_to_sixty_lines_and_says_so(moved: BenchReport) -> None:
    [slow, *_] = moved.judged
    named = [replace(slow.workload, id=f"w{number}") for number in range(60)]
    found = tuple(replace(slow.finding, workload=workload) for workload in named)
    many = BenchReport(replace(moved.run, findings=found), ())
    text = github.summary(many, notes=["a note"], link="bench.html")
    rows = text.count("| **regressed** |")
    assert len(text.splitlines()) <= github.MOST_LINES
    assert rows > 30
    assert f"… and {60 - rows} more in the report." in text
    assert text.splitlines()[-1] == "[The whole report](bench.html)"
    assert sum(line.startswith("::error") for line in github.remarks(many)) == 10


def test_ten_annotations_of_every_level_are_shown(moved: BenchReport) -> None:
    shown = (BenchVerdict.REGRESSED, BenchVerdict.INCONCLUSIVE, BenchVerdict.IMPROVED)
    one = moved.judged[0].finding
    found = tuple(
        replace(one, evidence=replace(one.evidence, verdict=verdict)) for verdict in shown * 12
    )
    lines = list(github.remarks(BenchReport(replace(moved.run, findings=found), ())))
    levels = [line.split(" ")[0] for line in lines]
    said = "GitHub shows ten of a level, whatever the others have"
    assert [levels.count(name) for name in ("::error", "::warning", "::notice")] == [10] * 3, said


@pytest.mark.parametrize("dropped", [52, 47, 70])
def test_a_summary_with_a_long_head_ends_with_its_link_and_counts_its_rows(
    moved: BenchReport, monkeypatch: pytest.MonkeyPatch, dropped: int
) -> None:
    lines = [f"candidate w{number}: 1 of 9 blocks dropped: busy" for number in range(dropped)]
    monkeypatch.setattr(BenchReport, "dropped", lines)
    text = github.summary(moved, link="bench.html")
    rows = sum(f"| {row.case} |" in text for row in moved.judged)
    assert text.splitlines()[-1] == "[The whole report](bench.html)"
    assert len(text.splitlines()) <= github.MOST_LINES
    assert f"… and {3 - rows} more in the report." in text, "three cases are not ok"


@pytest.mark.parametrize("many", [3, 40, 41, 90])
def test_a_summary_with_many_notes_keeps_its_verdict_and_its_link(
    moved: BenchReport, many: int
) -> None:
    notes = [f"alarm: case {number} creeps" for number in range(many)]
    why = ("control A/A: missing", "control injected: missing", "no candidate was measured")
    report = BenchReport(replace(moved.run, reasons=why), moved.trials)
    text = github.summary(report, notes=notes, link="bench.html")
    lines = [line.rstrip() for line in text.splitlines()]
    said = "a summary begins with the verdict and ends with its link, however many notes there are"
    title, link = "## specgate bench: INVALID", "[The whole report](bench.html)"
    assert [*lines[:3], lines[-1]] == [title, "", report.sentence, link], said
    assert len(lines) <= github.MOST_LINES
    assert [line for line in lines if line in notes] == notes[:40], "the first 40 notes are shown"
    told = [line for line in lines if line.endswith(" more notes.")]
    hidden = {41: ["… and 1 more notes."], 90: ["… and 50 more notes."]}
    assert told == hidden.get(many, []), "notes that are hidden are counted"


def test_annotations_keep_to_one_line(moved: BenchReport) -> None:
    [row] = [row for row in moved.judged if row.case == f"{BS8}/tpot"]
    named = replace(row.workload, id="a,b:c\nd%")
    odd = replace(row.finding, workload=named, reasons=("100 %\r\n::error::",))
    run = replace(moved.run, findings=(odd,))
    [line] = github.remarks(BenchReport(run, ()))
    assert line.startswith("::error title=regressed a%2Cb%3Ac%0Ad%25/tpot::a,b:c%0Ad%25/tpot")
    assert line.endswith("100 %25%0D%0A::error::")


def test_smaller_is_better_is_the_cost_of_b_over_a(moved: BenchReport) -> None:
    entries = {entry["name"]: entry for entry in json.loads(exports.smaller_is_better(moved.cases))}
    assert len(entries) == 10
    faster = entries[f"{BS1}/output_throughput @ cpu"]
    [wanted] = [row for row in moved.judged if row.case == f"{BS1}/output_throughput"]
    assert faster["value"] == pytest.approx(1 / 1.08, abs=0.003)
    assert faster["extra"].startswith(
        f"improved, e = {wanted.evidence.e_improved:.3g}, 9 blocks, B / A +8"
    )
    slower = entries[f"{BS8}/tpot @ cpu"]
    assert (slower["unit"], slower["value"]) == ("× reference", pytest.approx(1.05, abs=0.003))
    half = float(slower["range"].removeprefix("± "))
    [row] = [row for row in moved.judged if row.case == f"{BS8}/tpot"]
    ends = (row.evidence.low, row.evidence.high)
    assert half == pytest.approx(max(abs(x / row.evidence.ratio - 1) for x in ends), abs=1e-4)
    assert entries[f"{BS1}/tpot @ cpu"]["range"] == "± ∞"  # five blocks bound nothing


@pytest.mark.parametrize(
    ("low", "high", "told"),
    [
        (0.9, 1.02, "± 0.1000"),
        (0.98, 1.1, "± 0.1000"),
        (0.0, 1.1, "± ∞"),
        (0.9, math.inf, "± ∞"),
    ],
)
def test_a_range_reaches_the_farther_end_of_its_interval(
    moved: BenchReport, low: float, high: float, told: str
) -> None:
    row = moved.judged[0]
    evidence = replace(row.evidence, ratio=1.0, low=low, high=high)
    [entry] = json.loads(
        exports.smaller_is_better([replace(row, finding=replace(row.finding, evidence=evidence))])
    )
    assert entry["range"] == told, f"an interval of {low} to {high} around 1 is {told}"


def test_pytorch_records_have_the_number_of_every_trial(moved: BenchReport) -> None:
    records = json.loads(pytorch_benchmark.document(moved.cases))
    named = {
        (r["model"]["name"], r["metric"]["name"], r["metric"]["extra_info"]["arm"]): r
        for r in records
        if r["metric"]["extra_info"]["session"] == "candidate"
    }
    [case] = [row for row in moved.judged if row.case == f"{BS8}/tpot"]
    a, b = named[BS8, "tpot", "A"], named[BS8, "tpot", "B"]
    assert (a["model"]["backend"], b["model"]["backend"]) == (
        case.session.a.name,
        case.session.b.name,
    )
    valid = [block for block in case.blocks if not block.invalid]
    own, other = (record["metric"]["benchmark_values"] for record in (a, b))
    # Every block has as many trials of one arm as of the other.
    assert len(own) == len(other) == sum(len(block.values) for block in valid) / 2
    assert sum(own) + sum(other) == pytest.approx(sum(sum(block.values) for block in valid))
    assert sum(other) / sum(own) == pytest.approx(1.05, abs=0.02)
    assert b["metric"]["unit"] == case.unit
    assert b["metric"]["extra_info"]["verdict"] == "regressed"
    # Required fields of the format, and controls left out.
    for record in records:
        assert all(record[part]["name"] for part in ("benchmark", "model", "metric"))
        assert record["metric"]["benchmark_values"]
    controls = {row.session.id for row in moved.cases if row.is_control}
    assert not controls & {record["metric"]["extra_info"]["session"] for record in records}


@pytest.mark.parametrize(("words", "told"), [("", ""), ("--seed 3", "--seed 3")])
def test_pytorch_records_have_the_arguments_of_a_load_that_another_program_sends(
    moved: BenchReport, words: str, told: str
) -> None:
    row = moved.judged[0]
    finding = replace(row.finding, workload=bench_serving.workload(words))
    first, _ = json.loads(pytorch_benchmark.document([replace(row, finding=finding)]))
    said = "numbers that only the program knows are not 0; its arguments are told, if only none"
    assert first["benchmark"]["extra_info"] == {"bench_serving": told}, said


def test_pytorch_records_have_no_number_of_a_dropped_block(moved: BenchReport) -> None:
    [case] = [row for row in moved.judged if row.case == f"{BS8}/tpot"]
    first, *others = case.blocks
    dropped = replace(first, invalid=("another process used the GPU",))
    finding = replace(case.finding, blocks=(dropped, *others))
    told = json.loads(pytorch_benchmark.document([replace(case, finding=finding)]))
    values = [value for record in told for value in record["metric"]["benchmark_values"]]
    expected = sorted(value for block in others for value in block.values)
    assert sorted(values) == expected, "numbers of a dropped block are left out"


def test_openmetrics_can_be_read_back(moved: BenchReport) -> None:
    text = exports.openmetrics(moved.cases)
    assert text.endswith("# EOF\n")
    samples = {
        (
            sample.name,
            sample.labels["session"],
            sample.labels["workload"],
            sample.labels["metric"],
        ): sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert len(samples) == len(exports.BENCH_GAUGES) * len(moved.cases)
    slower = samples["specgate_bench_slowdown", "candidate", BS8, "tpot"]
    assert slower.value == pytest.approx(SLOWER, abs=0.003)
    assert (slower.labels["a"], slower.labels["sku"]) == ("pinned", "cpu")
    assert samples["specgate_bench_red", "candidate", BS8, "tpot"].value == 1
    assert samples["specgate_bench_red", "injected", BS8, "tpot"].value == 0
    assert samples["specgate_bench_ratio_high", "candidate", BS1, "tpot"].value == math.inf


def test_costs_turn_where_more_is_better(moved: BenchReport) -> None:
    [row] = [row for row in moved.judged if row.case == f"{BS1}/output_throughput"]
    assert row.evidence.ratio > 1.07
    assert row.cost == pytest.approx(-math.log(row.evidence.ratio))
    low, high = row.interval
    assert low < row.cost < high < 0
    assert (low, high) == pytest.approx((-math.log(row.evidence.high), -math.log(row.evidence.low)))


@pytest.mark.parametrize(
    ("shown", "value"), [("+Inf", math.inf), ("-Inf", -math.inf), ("0.5", 0.5)]
)
def test_numbers_in_xml(shown: str, value: float) -> None:
    assert number(value) == shown


def test_evidence_that_reaches_no_threshold_is_drawn_below_them(moved: BenchReport) -> None:
    row = moved.judged[0]
    assert plots._thresholds(row) == (20.0, 200.0)
    weak = replace(row.evidence, path=((1.5, 0.8, 0.7),))
    one = replace(row, finding=replace(row.finding, evidence=weak))
    [panel] = plots.evidence([one]).panels
    [path, line] = panel.chart.to_dict()["layer"]
    assert line["encoding"]["y"]["field"] == "line"
    assert path["encoding"]["y"]["scale"]["domain"] == [0.001, 1000.0], "both lines are seen"


def test_shift_of_every_decile_is_the_injected_one() -> None:
    lines = list(synthetic_bench.run_lines({f"{BS1}/ttft": math.log(1.2)}, noise=0.0, blocks=3))
    session = next(one for one in lines if isinstance(one, Session) and one.role is Role.CANDIDATE)
    trials = [one for one in lines if isinstance(one, Trial)]
    rows = request_plots.shifts(session, trials)
    assert len(rows) == 2 * 2 * 9
    for row in rows:
        injected = 0.2 if row["panel"] == f"{BS1}: TTFT" else 0.0
        assert [row[key] for key in ("low", "shift", "high")] == pytest.approx([injected] * 3)


def test_every_trial_of_an_arm_shifts_its_deciles(moved: BenchReport) -> None:
    a, b = (
        next(
            t for t in moved.trials if (t.session, t.workload, t.arm) == (Role.CANDIDATE, BS1, arm)
        )
        for arm in "AB"
    )
    first, later = (replace(a.samples[0], ttft_ms=ms) for ms in (40.0, 60.0))
    trials = [
        replace(trial, block=0, place=place, samples=(sample,))
        for place, (trial, sample) in enumerate(((a, first), (b, first), (b, later), (a, first)))
    ]
    session = replace(moved.judged[0].session, design=Design.QUADS)
    found = request_plots.shifts(session, trials)
    shift = {row["decile"]: row["shift"] for row in found if row["panel"] == f"{BS1}: TTFT"}
    # B's requests took 40 and 60 ms, of which the percentile p is 40 + 20 p.
    assert shift == pytest.approx({p: 20 * p / 100 / 40 for p in range(10, 100, 10)})


def test_conditions_are_told_in_run_order(moved: BenchReport) -> None:
    rows = [row for row in request_plots.conditions(moved.trials) if row["fact"] == "GPU, °C"]
    assert [row["value"] for row in rows[:4]] == [60.0, 60.0, 61.0, 61.0]
    assert [row["arm"] for row in rows] == [trial.arm for trial in moved.trials]
    assert {row["fact"] for row in request_plots.conditions(moved.trials)} == {
        "GPU, °C",
        "host load / cores",
    }


def test_a_block_with_a_failed_trial_shifts_nothing() -> None:
    lines = list(synthetic_bench.run_lines({"ttft": 0.1}, noise=0.0, blocks=2, invalid=(0, 1)))
    session = next(one for one in lines if isinstance(one, Session) and one.role is Role.CANDIDATE)
    assert request_plots.shifts(session, [one for one in lines if isinstance(one, Trial)]) == []


def test_what_an_interruption_cut_off_shifts_nothing() -> None:
    effects = {"ttft": math.log(1.2)}
    lines = list(synthetic_bench.run_lines(effects, noise=0.0, blocks=2, workloads=ONE))
    session = next(one for one in lines if isinstance(one, Session) and one.role is Role.CANDIDATE)
    first, second, third, fourth = (
        one for one in lines if isinstance(one, Trial) and one.session == session.id
    )

    def shifted(plan: Session, *trials: Trial) -> set[float]:
        rows = [row for row in request_plots.shifts(plan, trials) if "TTFT" in row["panel"]]
        return {round(row[key], 9) for row in rows for key in ("low", "shift", "high")}

    def late(trial: Trial) -> Trial:
        samples = (replace(sample, ttft_ms=900.0) for sample in trial.samples)
        return replace(trial, samples=tuple(samples))

    measured_again = shifted(session, first, second, late(third), third, fourth)
    said = "of a trial that was measured again the requests before the interruption do not count"
    assert measured_again == {0.2}, said
    quads = replace(session, design=Design.QUADS)
    whole = [replace(one, place=place) for place, one in enumerate((first, second) * 2)]
    cut_off = shifted(quads, *whole, late(third), fourth)
    assert cut_off == {0.2}, "a block of which two of four trials are there is none"


def test_a_block_without_all_its_numbers_is_not_drawn_under_the_wrong_arms() -> None:
    lines = [
        replace(line, metrics={}, invalid=("it died",))
        if isinstance(line, Trial)
        and (line.session, line.block, line.place) == (Role.CANDIDATE, 1, 0)
        else line
        for line in synthetic_bench.run_lines(blocks=3, workloads=ONE)
    ]
    row = next(row for row in BenchReport.of(lines).judged if row.metric == "tpot")
    [panel] = plots.slopes([row]).panels
    [table] = panel.chart.to_dict()["datasets"].values()
    drawn = [(point["block"], point["arm"]) for point in table]
    orders = [draw_order("orders", block, Design.PAIRS) for block in (0, 2)]
    due = [(block, arm) for block, order in zip((1, 3), orders, strict=True) for arm in order]
    said = "of block 2 the first trial left no number, so that the only one belongs to the second"
    assert drawn == due, said


def test_waterfall_adds_up_to_tpot() -> None:
    effects = {"step_time": math.log(1.1), "accept_length": math.log(1.25), "tpot": math.log(0.9)}
    rows = [
        row for row in bench_report(effects, noise=0.0, workloads=ONE).cases if not row.is_control
    ]
    steps = {row["part"]: row for row in request_plots.halves(rows) if row["workload"] == BS8}
    # 1.1 / 1.25 = 0.88, so the rest must bring 0.9 / 0.88.
    ends = [1.1, 0.88, 0.9, 0.9]
    assert [steps[part]["end"] + 1 for part in request_plots.PARTS] == pytest.approx(ends)
    starts = [1.0, 1.1, 0.88, 1.0]
    assert [steps[part]["start"] + 1 for part in request_plots.PARTS] == pytest.approx(starts)
    assert [steps[part]["way"] for part in request_plots.PARTS] == [
        "slower",
        "faster",
        "slower",
        "faster",
    ]


def two_nights(report: BenchReport) -> dict[tuple[str, str], Series]:
    """The run and one a night before, and the same on another machine."""
    entries = report.entries()
    before = [replace(entry, night="2026-11-19T02:00:00+00:00") for entry in entries]
    other = [replace(entry, sku="NVIDIA B200") for entry in entries]
    return all_series([*before, *entries, *other])


@pytest.fixture(scope="module")
def followed(moved: BenchReport) -> str:
    return page.page(moved, two_nights(moved))


@pytest.fixture(scope="module")
def alone(moved: BenchReport) -> str:
    """The page of one run on one kind of machine."""
    return page.page(moved, all_series(moved.entries()))


def panels(text: str, figure: str) -> list[str]:
    """The SVG of every panel of a figure."""
    section = text.partition(f'<section id="{figure}"')[2].partition("</section>")[0]
    return re.findall(r"<svg .*?</svg>", section, re.DOTALL)


def test_a_case_without_a_block_has_no_change() -> None:
    none = bench_report({}, blocks=1, invalid=(0,), workloads=ONE)
    text = github.summary(none) + "".join(row.sentence for row in none.judged)
    assert "+0.0 %" not in text
    candidates = [row for row in none.cases if not row.is_control]
    assert all("ratio" not in row.numbers for row in candidates)
    assert 'ratio{a="pinned"' not in exports.openmetrics(candidates)
    table = page.page(none, {}).partition('<table class="numbers">')[2]
    assert all("+0.0 %" not in line for line in table.split("<tr>") if "0 <small>+1" in line)


def test_numbers_of_a_summary_are_rounded(moved: BenchReport) -> None:
    loads = Conditions(load=0.7912345), Conditions(load=0.0123456)
    busy = [
        replace(one, conditions=loads[one.place])
        if isinstance(one, Trial) and (one.session, one.block) == ("candidate", 3)
        else one
        for one in synthetic_bench.run_lines({}, workloads=ONE)
    ]
    text = github.summary(BenchReport.of(busy)) + github.summary(moved)
    assert "1 × load: 0.01 to 0.79, accepted: others under half the cores" in text
    numbers = re.findall(r"\d+\.\d+(?:e[-+]\d+)?", text)
    assert numbers
    assert all(len(re.sub(r"^0\.0*|\.|e.*", "", number)) <= 4 for number in numbers)


def test_one_run_has_no_history_and_one_kind_of_machine_no_map(alone: str) -> None:
    assert not re.findall(r'<section id="(history|heat)"', alone)
    assert 'href="#history"' not in alone


def test_a_change_has_one_sign_in_every_table_and_chart(moved: BenchReport, alone: str) -> None:
    [row] = [row for row in moved.judged if row.case == f"{BS1}/output_throughput"]
    assert row.evidence.ratio > 1.07
    expected = pytest.approx(row.evidence.ratio - 1)
    label = f"candidate: {BS1}"
    [forest] = [p for p in plots.forest(moved.judged).panels if p.title == label]
    [cell] = [
        cell
        for table in forest.chart.to_dict()["datasets"].values()
        for cell in table
        if str(cell.get("metric", "")).startswith("output_throughput")
    ]
    assert cell["change"] == expected
    assert cell["delta1"] < cell["delta0"] < 0 < cell["low"] < cell["change"] < cell["high"]
    series = two_nights(moved)
    [entry, _] = series[row.case, "cpu"].entries
    assert entry.change == expected
    shown = f"{100 * (row.evidence.ratio - 1):+.1f} %"
    assert f"| {shown} |" in github.summary(moved)
    assert f'<td class="number">{shown}</td>' in alone
    changes = [
        cell["change"]
        for panel in history_plots.heat_map(series).panels
        for cell in next(iter(panel.chart.to_dict()["datasets"].values()))
        if (panel.title, cell["metric"]) == (BS1, "output_throughput")
    ]
    assert changes == [shown, shown]


def test_an_outcome_has_one_colour() -> None:
    worse, better = (
        charts.VERDICT_COLOURS[r] for r in (BenchVerdict.REGRESSED, BenchVerdict.IMPROVED)
    )
    assert {"slower": worse, "faster": better} == request_plots.WAYS
    assert (plots.AGAINST["worse"], plots.AGAINST["better"]) == (worse, better)
    arms = {colour for colour, _ in charts.ARMS.values()}
    assert not arms & {*charts.VERDICT_COLOURS.values()}
    assert (
        len({*charts.VERDICT_COLOURS.values()})
        == len({*charts.VERDICT_SHAPES.values()})
        == len(BenchVerdict)
    )


def test_every_figure_has_a_label_and_text_that_can_be_read(followed: str) -> None:
    figures = re.findall(r"<figure([^>]*)>", followed)
    drawn = re.findall(r"<svg([^>]*)>", followed)
    assert len(drawn) == len(figures) > 20
    labels = [re.findall(r'aria-label="([^"]+)"', one) for one in drawn]
    assert all(len(label) == 1 for label in labels)
    assert len({label for [label] in labels}) == len(labels)
    sizes = re.findall(r"font(?:-size)?[:=] ?\"?([\d.]+)px", followed)
    assert min(map(float, sizes)) >= 12
    assert all('style="--natural: ' in one for one in drawn)


def test_no_panel_is_empty_and_what_never_changes_needs_none(
    moved: BenchReport, followed: str
) -> None:
    for figure in ("forest", "waterfall", "evidence", "slopes", "machine", "shift", "history"):
        assert panels(followed, figure)
        for svg in panels(followed, figure):
            assert re.search(r"role-mark[^>]*>(<g[^>]*>)?<(path|line|rect)", svg), figure
    [trials] = [request_plots.conditions(moved.trials)]
    drawn = request_plots.conditions_plot(trials)
    assert [panel.title for panel in drawn.panels] == ["GPU, °C"]
    assert drawn.notes == ("host load / cores: 0.1 in every trial.",)


def test_what_ends_as_it_began_may_have_changed_between() -> None:
    rows = [{"fact": fact, "value": value} for value in (60.0, 61.5, 60.0) for fact in ("°C", "k")]
    level = [row | {"value": 7.0} if row["fact"] == "k" else row for row in rows]
    drawn, notes = charts.split(level, "fact", "value")
    assert list(drawn) == ["°C"], "a fact that changed in the middle of a run is drawn"
    assert notes == ("k: 7 in every trial.",)


def test_ticks_of_a_percent_axis_are_few_and_inside() -> None:
    for domain in ((-0.4, 0.6), (-0.02, 0.03), (0.0, 0.004), (-3.0, 0.1)):
        axis = charts.percent_axis("x", domain)["axis"].to_dict()
        ticks = axis["values"]
        assert 2 <= len(ticks) <= charts.MOST_TICKS + 1
        assert domain[0] <= min(ticks) <= max(ticks) <= domain[1]
        assert axis["format"] == ("+.1%" if domain[1] == 0.004 else "+.0%")


@pytest.mark.parametrize(
    ("end", "labels"),
    [
        (0.056, ["-5.0%", "-2.5%", "+0.0%", "+2.5%", "+5.0%"]),
        (0.0011, ["-0.10%", "-0.05%", "+0.00%", "+0.05%", "+0.10%"]),
        (0.25, ["-20%", "-10%", "+0%", "+10%", "+20%"]),
    ],
)
def test_a_tick_stands_where_its_label_says(end: float, labels: list[str]) -> None:
    axis = charts.percent_axis("x", (-end, end))["axis"].to_dict()
    assert [f"{tick:{axis['format']}}" for tick in axis["values"]] == labels


def test_page_is_one_offline_document_with_every_plot(moved: BenchReport, followed: str) -> None:
    text = followed
    names = ["forest", "waterfall", "evidence", "slopes", "machine", "shift", "history", "heat"]
    assert re.findall(r'<section id="(\w+)"', text) == [*names, "numbers"]
    assert "<script" not in text
    assert not re.findall(r'(?:src|href)="(?!#)', text)
    assert set(re.findall(r"https?://[\w./]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert text.count('<th scope="row">') == len(moved.cases)


def test_page_escapes_what_servers_are_called(moved: BenchReport) -> None:
    [first, *_] = moved.run.findings
    named = replace(first.session, a=replace(first.session.a, name="<b>&"))
    run = replace(moved.run, findings=(replace(first, session=named),))
    text = page.page(BenchReport(run, ()), {})
    assert "&lt;b&gt;&amp;" in text
    assert "<b>&" not in text


@pytest.mark.parametrize(
    ("effects", "code"), [pytest.param({}, 0, id="green"), pytest.param(MOVED, 1, id="red")]
)
def test_command_writes_everything_and_ends_with_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], effects: dict[str, float], code: int
) -> None:
    bench, out = tmp_path / "bench.jsonl", tmp_path / "deep" / "out"
    for line in synthetic_bench.run_lines(effects, workloads=ONE):
        append(bench, line)
    assert command.main([str(bench), "--out", str(out)]) == code
    text = capsys.readouterr().out
    assert text == (out / "summary.md").read_text()
    assert sorted(path.name for path in out.iterdir()) == [
        "bench.html",
        "bench.json",
        "bench.openmetrics.txt",
        "bench.pytorch.json",
        "bench.xml",
        "history.jsonl",
        "summary.md",
    ]


def unreadable(path: Path) -> None:
    path.write_text("{}\n")


def without_a_plan(path: Path) -> None:
    path.write_text("")


@pytest.mark.parametrize("spoil", [unreadable, without_a_plan, Path.mkdir])
def test_records_that_say_nothing_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], None]
) -> None:
    bench = tmp_path / "bench.jsonl"
    spoil(bench)
    assert command.main([str(bench), "--out", str(tmp_path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("bench: ")
