"""A creep of a case becomes an alarm, a step a suspicion, and an epoch starts both anew."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ci.bench import change_point, history, history_plots
from ci.bench.bench_report import BenchReport, image
from ci.bench.history import Entry
from fixtures.fakes import synthetic_bench
from fixtures.fakes.sample_records import ENVIRONMENT
from harness.bench.stats.bench_verdict import BenchVerdict
from harness.errors import UsageError

USUAL = Entry(
    night="2026-01-01T02:00:00+00:00",
    sku="NVIDIA B200",
    case="bs8/tpot",
    pin="sglang 0.5.14",
    image="driver 580",
    commit="abc",
    verdict=BenchVerdict.OK,
    cost=0.0,
    low=-0.01,
    high=None,
    e=1.0,
    blocks=9,
    higher_is_better=False,
)


def night(number: int, **facts: object) -> Entry:
    started = f"2026-{1 + number // 28:02d}-{1 + number % 28:02d}T02:00:00+00:00"
    return replace(USUAL, night=started, **facts)  # type: ignore[arg-type]


def by_e(*es: float) -> list[Entry]:
    return [night(number, e=e) for number, e in enumerate(es)]


def test_detector_by_hand() -> None:
    # (0 + 1) · 2 = 2, (2 + 1) · 0.5 = 1.5, (1.5 + 1) · 4 = 10.
    assert history.detector(by_e(2.0, 0.5, 4.0)) == [2.0, 1.5, 10.0]


@pytest.mark.parametrize("changed", [{"pin": "sglang 0.5.15"}, {"image": "driver 590"}])
def test_an_epoch_starts_the_detector_anew(changed: dict[str, str]) -> None:
    nights = by_e(2.0, 3.0, 4.0, 5.0)
    nights[2:] = [replace(entry, **changed) for entry in nights[2:]]  # type: ignore[arg-type]
    found = history.series(nights)
    assert found.evidence == (2.0, 9.0, 4.0, 25.0)
    assert found.epochs == [0, 2]


def test_an_invalid_night_is_no_evidence() -> None:
    nights = by_e(2.0, 1000.0, 3.0)
    nights[1] = replace(nights[1], verdict=BenchVerdict.INVALID)
    assert history.detector(nights) == [2.0, 2.0, 9.0]


def test_alarm_is_at_365_and_noted_with_its_first_night() -> None:
    found = history.series(by_e(1.0, 182.49, 1.0, 1.0))
    assert found.evidence == pytest.approx((1.0, 364.98, 365.98, 366.98))
    assert found.alarms == [2, 3]
    notes = history.notes({("bs8/tpot", "NVIDIA B200"): found})
    assert notes == [
        "alarm: bs8/tpot @ NVIDIA B200 creeps, confirmed since 2026-01-03T02:00:00+00:00"
    ]


def test_an_alarm_that_later_nights_refute_is_not_told() -> None:
    # (0 + 1) · 400 = 400, (400 + 1) · 0.5 = 200.5.
    found = history.series(by_e(400.0, 0.5))
    assert found.evidence == (400.0, 200.5)
    told = "an alarm is told as long as the detector stands at 365 or more, not ever after"
    assert history.notes({("bs8/tpot", "NVIDIA B200"): found}) == [], told


def test_an_alarm_is_dated_in_its_own_epoch() -> None:
    nights = by_e(400.0, 1.0, 1.0, 400.0, 1.0)
    nights[2:] = [replace(entry, pin="sglang 0.5.15") for entry in nights[2:]]
    found = history.series(nights)
    assert found.alarms == [0, 1, 3, 4]
    [note] = history.notes({("bs8/tpot", "NVIDIA B200"): found})
    assert note.endswith(f"since {nights[3].night}")


def test_false_alarms_are_rarer_than_one_in_365_nights() -> None:
    # Fair bets: e is 0.15 or 1.85, as after the one block of a night.
    random = np.random.default_rng(3)
    e_values = random.choice([0.15, 1.85], size=(300, 120))
    level = np.zeros(300)
    alarmed = np.zeros(300, dtype=bool)
    for place in range(120):
        level = (level + 1.0) * e_values[:, place]
        alarmed |= level >= history.ALARM
    assert 0 < alarmed.mean() <= 120 / 365
    one = history.detector(by_e(*e_values[0]))
    expected = 0.0
    for e in e_values[0]:
        expected = (expected + 1.0) * e
    assert one[-1] == pytest.approx(expected)


def costs(values: list[float]) -> list[Entry]:
    return [night(number, cost=cost) for number, cost in enumerate(values)]


def noisy(length: int, step_at: int, step: float, seed: int = 5) -> list[Entry]:
    random = np.random.default_rng(seed)
    drawn = random.normal(0.0, 0.003, length)
    drawn[step_at:] += step
    return costs(drawn.tolist())


@pytest.mark.parametrize("step_at", [4, 20, 37])
@pytest.mark.parametrize("step", [0.02, -0.02])
def test_a_step_is_suspected_at_its_first_night(step_at: int, step: float) -> None:
    nights = noisy(40, step_at, step)
    change = history.suspicion(nights)
    assert change is not None
    assert change.night == nights[step_at].night
    assert change.size == pytest.approx(step, abs=0.004)
    assert change.p <= change_point.SUSPICION


def test_a_step_of_a_long_epoch_is_dated_in_it() -> None:
    nights = noisy(61, 45, 0.02)
    change = history.suspicion(nights)
    assert change is not None
    assert change.night == nights[45].night


def test_quiet_nights_a_spike_and_a_small_step_are_not_suspected() -> None:
    assert sum(history.suspicion(noisy(40, 40, 0.0, seed)) is not None for seed in range(40)) == 0
    spike = noisy(40, 40, 0.0)
    spike[17] = replace(spike[17], cost=0.2)
    assert history.suspicion(spike) is None
    assert history.suspicion(noisy(40, 20, 0.006)) is None
    assert history.suspicion(costs([0.0] * 40)) is None


def test_too_few_or_invalid_nights_are_not_asked() -> None:
    step = costs([0.0] * 4 + [0.05] * 3)
    assert history.suspicion(step) is None
    assert history.suspicion(noisy(8, 8, 0.0)) is None
    broken = [
        replace(n, verdict=BenchVerdict.INVALID) if n.cost > 0.01 else n
        for n in noisy(40, 20, 0.05)
    ]
    assert history.suspicion(broken) is None


def test_a_step_between_epochs_is_no_change() -> None:
    nights = noisy(40, 20, 0.05)
    moved = [replace(n, image="driver 590") if place >= 20 else n for place, n in enumerate(nights)]
    assert history.series(nights).change is not None
    assert history.series(moved).change is None


def test_best_split_by_hand() -> None:
    # Split at 2: means 0 and 3, so |0 - 3| / sqrt(1/2 + 1/3) = 3.286; at 3: 1 and 3 give 2.191.
    place, gap = change_point.best_split(np.array([[0.0, 0.0, 3.0, 3.0, 3.0]]))
    assert (place[0], gap[0]) == (2, pytest.approx(3 / math.sqrt(5 / 6)))


def test_a_night_counts_once_and_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "history.jsonl"
    entries = [night(1), night(2, low=None, sku="NVIDIA\u2028H200\x85"), night(2)]
    assert history.read(path) == []
    assert history.append(path, entries) == entries
    try:
        history.read(path)
    except UsageError as error:
        pytest.fail(f"a night is one line, though its sku has a separator, U+2028: {error}")
    new = [night(1, sku="NVIDIA H200"), night(3)]
    said = "two kinds of machine whose nights start in the same second both enter the history"
    assert history.append(path, [night(1, cost=9.0), *new]) == [*entries, *new], said
    assert history.read(path) == [*entries, *new]
    assert "Infinity" not in path.read_text()


def test_a_night_after_a_line_without_an_end_is_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(night(1).to_json())
    history.append(path, [night(2)])
    try:
        found = history.read(path)
    except UsageError as error:
        pytest.fail(f"a history whose last line has no end can be added to: {error}")
    assert found == [night(1), night(2)]


def test_series_are_told_apart_by_case_and_machine_and_sorted_by_night() -> None:
    other = [night(n, sku="NVIDIA H200") for n in (3, 1)]
    found = history.all_series([night(2), *other, night(1)])
    assert list(found) == [("bs8/tpot", "NVIDIA B200"), ("bs8/tpot", "NVIDIA H200")]
    assert [e.night[8:10] for e in found["bs8/tpot", "NVIDIA H200"].entries] == ["02", "04"]


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("{}", "night = "),
        ("[]", "line = "),
        ("no", "line = 'no' is not accepted; accepted: Invalid JSON"),
        (json.dumps({"format": 1, "verdict": "ok"}), "format = '1' is not accepted"),
    ],
)
def test_a_line_that_is_no_night_is_named(tmp_path: Path, line: str, field: str) -> None:
    path = tmp_path / "history.jsonl"
    history.append(path, [night(1)])
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UsageError, match=rf"history\.jsonl:2: {re.escape(field)}"):
        history.read(path)


def test_a_benchmark_leaves_its_candidates_alone() -> None:
    one = BenchReport.of(
        synthetic_bench.run_lines({"tpot": 0.05}, workloads=synthetic_bench.WORKLOADS[1:])
    )
    entries = {entry.case: entry for entry in one.entries()}
    assert set(entries) == {f"bs8-in64-out32/{metric}" for metric in synthetic_bench.LEVELS}
    slower = entries["bs8-in64-out32/tpot"]
    assert slower.cost == pytest.approx(0.05, abs=0.003)
    assert slower.low is not None
    assert slower.low < slower.cost
    assert slower.e >= 100
    faster = BenchReport.of(synthetic_bench.run_lines({"tpot": -0.05}))
    said = "a night that improves is no evidence for the alarm of a regression"
    assert all(e.e < 1 for e in faster.entries() if e.case.endswith("/tpot")), said
    assert (slower.pin, slower.night) == ("pinned (sglang 0.5.14)", synthetic_bench.STARTED)
    assert entries["bs8-in64-out32/ttft"].low is None  # five blocks bound nothing


def test_a_map_of_many_kinds_of_machine_has_room_for_each() -> None:
    nights = [night(1, sku=f"GPU {number}") for number in range(5)]
    [panel] = history_plots.heat_map(history.all_series(nights)).panels
    said = "five columns of 110 px, of which two fit beside the names on a panel of 284 px"
    assert panel.chart.to_dict()["width"] == 284 + 3 * 110, said


def test_image_is_the_software_of_both_arms() -> None:
    gpu = replace(ENVIRONMENT, driver="580.1", cuda="13.0", commit="abc")
    assert image(gpu) == "platform Linux, driver 580.1, cuda 13.0, torch 2.13.0"


def test_plot_marks_the_first_alarm_of_every_epoch() -> None:
    nights = by_e(1.0, 400.0, 1.0, 1.0, 400.0, 1.0)
    nights[3:] = [replace(entry, pin="sglang 0.5.15") for entry in nights[3:]]
    [panel] = history_plots.history({("bs8/tpot", "NVIDIA B200"): history.series(nights)}).panels
    tables = panel.chart.to_dict()["datasets"].values()
    alarms = [row["at"] for rows in tables for row in rows if row.get("mark") == "alarm"]
    assert alarms == [nights[1].night, nights[4].night], "what is noted as an alarm is marked"


def test_plot_marks_epochs_changes_and_alarms() -> None:
    step = [
        replace(n, e=9.0 if place >= 24 else 0.5) for place, n in enumerate(noisy(32, 24, 0.03))
    ]
    found = {
        ("bs8/tpot", "NVIDIA B200"): history.series(
            [replace(n, pin="older") if place < 8 else n for place, n in enumerate(step)]
        )
    }
    [panel] = history_plots.history(found).panels
    tables = [*panel.chart.to_dict()["datasets"].values()]
    marks = [row for rows in tables for row in rows if "mark" in row]
    assert [(mark["mark"], mark["at"]) for mark in marks] == [
        ("epoch", step[8].night),
        ("suspected change", step[24].night),
        ("alarm", step[26].night),
    ]
    [nights] = [rows for rows in tables if "night" in rows[0]]
    said = "the line of an epoch begins with its first night, and joins no other"
    assert [row["epoch"] for row in nights] == [1] * 8 + [2] * 24, said
    [panel] = history_plots.heat_map(found).panels
    [cells] = panel.chart.to_dict()["datasets"].values()
    assert panel.title == "bs8"
    assert [(row["metric"], row["sku"]) for row in cells] == [("tpot", "NVIDIA B200")]


def test_a_map_shows_the_last_night_and_has_a_key_for_it() -> None:
    verdicts = (BenchVerdict.OK, BenchVerdict.INCONCLUSIVE, BenchVerdict.REGRESSED)
    nights = [night(n, verdict=one, cost=0.01 * n) for n, one in enumerate(verdicts)]
    drawn = history_plots.heat_map({("bs8/tpot", "NVIDIA B200"): history.series(nights[::-1])})
    assert [key.name for key in drawn.keys] == ["regressed"], "a map has keys of what it shows"
    [[cell]] = drawn.panels[0].chart.to_dict()["datasets"].values()
    assert (cell["verdict"], cell["change"]) == ("regressed", "+2.0 %")


@pytest.mark.parametrize("higher_is_better", [False, True])
def test_plot_shows_change_and_interval_in_the_metrics_own_direction(
    higher_is_better: bool,
) -> None:
    facts = {"cost": 0.03, "low": -0.01, "high": 0.05, "higher_is_better": higher_is_better}
    one = history.series([night(0, **facts), night(1, **(facts | {"high": None}))])
    [panel] = history_plots.history({("bs8/output_throughput", "NVIDIA B200"): one}).panels
    [[first, second]] = panel.chart.to_dict()["datasets"].values()
    sign = -1 if higher_is_better else 1
    told = [first[end] for end in ("change", "low", "high")]
    due = [math.exp(sign * cost) - 1 for cost in (0.03, -0.01, 0.05)]
    assert told == pytest.approx(due), "a cost of 3 % is 3 % less of what is better if higher"
    assert second["high"] is None, "a bound that was not shown is not drawn"
