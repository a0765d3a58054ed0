"""A terminal shows bars and a table that is redrawn, a log one line per round of blocks."""

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from harness.bench.console import ConsoleView, table
from harness.bench.wording import percent
from suites.selfcheck.bench.test_bench_analysis import judged, records


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_bars_and_a_table(tmp_path, terminal):
    session, trial = records(tmp_path / "bench.jsonl", blocks=2)
    text = io.StringIO()
    with ConsoleView([session], Console(file=text, force_terminal=terminal, width=80)) as view:
        view.trial_done(trial)
        view.blocks_done([judged(tmp_path / "bench.jsonl")])
    shown = text.getvalue()
    if terminal:
        assert "(inconclusive)" in shown
        assert "1/32" in shown
        assert "block 1 A smoke-bs2-in32-out32" in shown or "block 1 B smoke-bs2-in32" in shown
        assert "…" not in shown
    else:
        assert shown == "2 blocks, 1 of 1 cases undecided\n"


def test_every_workload_has_a_title_of_its_own_over_its_rows(tmp_path):
    records(tmp_path / "bench.jsonl", blocks=2)
    one = judged(tmp_path / "bench.jsonl")
    other = replace(one, workload=replace(one.workload, id="another"))
    text = io.StringIO()
    Console(file=text, width=80).print(table([one, other]))
    titles = [line.strip() for line in text.getvalue().splitlines() if line.startswith("s, ")]
    assert titles == ["s, smoke-bs2-in32-out32", "s, another"], "rows stand under their workload"


def test_a_bar_is_as_long_as_the_case_of_most_blocks(tmp_path):
    session, trial = records(tmp_path / "bench.jsonl", blocks=1)
    few = replace(session.cases[0], bounds=replace(session.cases[0].bounds, n_max=3))
    text = io.StringIO()
    both = replace(session, cases=(few, *session.cases))
    with ConsoleView([both], Console(file=text, force_terminal=True, width=80)) as view:
        view.trial_done(trial)
    assert "1/32" in text.getvalue()


def test_a_bar_counts_the_trials_of_every_workload(tmp_path):
    session, trial = records(tmp_path / "bench.jsonl", blocks=1)
    others = [replace(session.workloads[0], id=name) for name in ("second", "third")]
    text = io.StringIO()
    three = replace(session, workloads=(*session.workloads, *others))
    with ConsoleView([three], Console(file=text, force_terminal=True, width=80)) as view:
        view.trial_done(trial)
    assert "1/96" in text.getvalue(), "16 blocks of 2 trials, 3 workloads"


def test_a_log_says_once_why_blocks_were_dropped(tmp_path):
    session, _ = records(tmp_path / "bench.jsonl", blocks=3, lost=(1,))
    text = io.StringIO()
    with ConsoleView([session], Console(file=text, force_terminal=False, width=200)) as view:
        for _ in range(2):
            view.blocks_done([judged(tmp_path / "bench.jsonl")])
    why = "s smoke-bs2-in32-out32: 1 of 3 blocks dropped: 1 × NotReady: it ended with 137\n"
    round_ = "2 blocks, 1 of 1 cases undecided\n"
    assert text.getvalue() == round_ + why + round_


def test_a_log_tells_once_that_further_blocks_were_dropped(tmp_path):
    session, _ = records(tmp_path / "one", blocks=3, lost=(1,))
    records(tmp_path / "two", blocks=4, lost=(1, 2))
    text = io.StringIO()
    with ConsoleView([session], Console(file=text, force_terminal=False, width=200)) as view:
        for name in ("one", "two", "two"):
            view.blocks_done([judged(tmp_path / name)])
    told = [line.partition(": ")[2][:24] for line in text.getvalue().splitlines() if "×" in line]
    said = "a line that a later round repeats is told once, the second of a workload too"
    assert told == ["1 of 3 blocks dropped: 1", "2 of 4 blocks dropped: 2"], said


def test_a_log_counts_the_blocks_of_the_case_that_has_most(tmp_path):
    texts = io.StringIO()
    found = []
    for blocks in (2, 5, 3):
        session, _ = records(tmp_path / str(blocks), blocks=blocks)
        found.append(judged(tmp_path / str(blocks)))
    with ConsoleView([session], Console(file=texts, force_terminal=False, width=200)) as view:
        view.blocks_done(found)
    assert texts.getvalue() == "5 blocks, 3 of 3 cases undecided\n"


@pytest.mark.parametrize(
    ("shown", "ratio"),
    [
        ("+3.1 %", 1.031),
        ("-5.0 %", 0.95),
        ("…", math.inf),
        ("…", 0.0),
        ("–", None),
        ("–", math.nan),
    ],
)
def test_percent(shown, ratio):
    assert percent(ratio) == shown
