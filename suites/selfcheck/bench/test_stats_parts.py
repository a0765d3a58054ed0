"""Counts, conditions and the decomposition of TPOT agree with hand and formula."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from harness.bench.stats.bench_verdict import BenchVerdict
from harness.bench.stats.decomposition import decompose
from harness.bench.stats.sequential_test import Evidence
from harness.bench.stats.validity import (
    VALIDITY_CHECKS,
    Conditions,
    changed_counts,
    reasons,
    unknown_conditions,
)
from harness.errors import UsageError

GOOD = Conditions(
    foreign_processes=0, throttled=(), capped=0.0, mhz=1980.0, celsius=60.0, machine="580/on",
    pcie_full=True, load=0.1, failed=0, output_tokens=512, cached_tokens=0,
    flushed=True, correct=True,
)  # fmt: skip
BAD = {
    "foreign_processes": 1, "throttled": ("thermal",), "capped": 0.02, "mhz": 1950.0,
    "celsius": 68.5, "machine": "580/off", "pcie_full": False, "load": 0.5,
    "failed": 1, "output_tokens": 511, "cached_tokens": 16, "flushed": False,
    "correct": False,
}  # fmt: skip


def evidence(ratio: float, verdict: BenchVerdict) -> Evidence:
    return Evidence(
        metric="m", verdict=verdict, over=True, blocks=8, dropped=0,
        ratio=ratio, low=ratio, high=ratio, path=(),
    )  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_each_broken_condition_is_named_whichever_trial_has_it(name):
    bad = replace(GOOD, **{name: BAD[name]})
    found = reasons([GOOD, bad])
    told = f"a block of a trial with {name} = {BAD[name]} is dropped for that alone"
    assert [why.startswith(f"{name}: ") for why in found] == [True], f"{told}, not for {found}"
    swapped = reasons([bad, GOOD])
    assert swapped == found, f"{told}, whichever trial has it: {swapped}"
    partly = reasons([GOOD, replace(GOOD, **{name: None})])
    told = f"a block of trials of which some have no {name} is dropped"
    assert partly == (f"{name}: asked of some trials only",), f"{told}, not for {partly}"


@pytest.mark.parametrize(
    ("trials", "said"),
    [
        ([{"load": 0.01 + n / 40} for n in range(32)], "load: 0.01 to 0.79, accepted: others"),
        ([{"load": 0.7912345}] * 2, "load: 0.79, accepted: others under half the cores"),
        (
            [{"throttled": ()}, {"throttled": ("thermal", "power")}],
            "throttled: none, thermal power",
        ),
        ([{"flushed": False}], "flushed: False, accepted: a proven flush"),
    ],
)
def test_a_reason_is_short_however_many_trials_there_are(trials, said):
    found = reasons([replace(GOOD, **trial) for trial in trials])
    assert len(found) == 1, f"{trials} has one reason: {found}"
    assert found[0].startswith(said)
    assert len(found[0]) < 90


def test_good_conditions_and_those_nobody_asked():
    assert reasons([GOOD, replace(GOOD, mhz=1970.0, celsius=67.0)]) == ()
    assert reasons([replace(GOOD, capped=0.5)] * 2) == ()
    under_the_cap = [replace(GOOD, capped=0.6, mhz=mhz) for mhz in (1875.0, 1980.0)]
    assert reasons(under_the_cap) == (), "under a power cap clocks that differ drop no block"
    (found,) = reasons([replace(GOOD, mhz=1875.0), under_the_cap[1]])
    assert found.startswith("capped: ")
    assert reasons([GOOD, replace(GOOD, celsius=GOOD.celsius + 8.0)]) == ()
    assert unknown_conditions([GOOD, GOOD]) == reasons([Conditions()]) == ()
    assert (
        set(unknown_conditions([Conditions()]))
        == set(BAD)
        == {name for name, _, _ in VALIDITY_CHECKS}
    )


def test_counts_are_red_either_way():
    assert changed_counts({"kernels": 3, "syncs": 0}, {"kernels": 3, "syncs": 0}) == {}
    found = changed_counts({"kernels": 3, "nodes": 9}, {"kernels": 2, "syncs": 0})
    assert found == {"kernels": (3, 2), "nodes": (9, None), "syncs": (None, 0)}
    for bad in (-1, 1.0, True, None):
        with pytest.raises(UsageError, match="obtained kernels = "):
            changed_counts({}, {"kernels": bad})


def test_tpot_is_step_time_over_accept_length():
    regressed, ok = BenchVerdict.REGRESSED, BenchVerdict.OK
    found = decompose(evidence(1.25, regressed), evidence(1.0, ok), evidence(0.8, regressed))
    assert (found.step, found.accept) == (0.0, pytest.approx(math.log(1.25)))
    assert found.rest == pytest.approx(0.0)
    assert found.cause == "the accept length (drafts) regressed"
    host = decompose(evidence(1.1, regressed), evidence(1.0, ok), evidence(1.0, ok))
    assert host.rest == pytest.approx(math.log(1.1))
    assert host.cause.endswith("the scheduler or the host")
    assert decompose(*[evidence(1.0, ok)] * 3).cause == ""
