"""Counts, conditions, the split of TPOT and the bootstrap say what hand and formula say."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from harness.errors import UsageError
from harness.evidence.bootstrap import bca, ratio_of_accept_lengths, ratio_of_medians
from harness.evidence.conditions import CHECKS, Conditions, reasons, unasked
from harness.evidence.counts import changes
from harness.evidence.decomposition import decompose
from harness.evidence.judge import Evidence
from harness.evidence.ruling import Ruling

GOOD = Conditions(
    foreign_processes=0, throttled=(), capped=0.0, mhz=1980.0, celsius=60.0, machine="580/on",
    pcie_full=True, load=0.1, as_pinned=True, failed=0, output_tokens=512, cached_tokens=0,
    flushed=True, foreign_kernels=(), correct=True,
)  # fmt: skip
BAD = {
    "foreign_processes": 1, "throttled": ("thermal",), "capped": 0.02, "mhz": 1950.0,
    "celsius": 68.5, "machine": "580/off", "pcie_full": False, "load": 0.5, "as_pinned": False,
    "failed": 1, "output_tokens": 511, "cached_tokens": 16, "flushed": False,
    "foreign_kernels": ("memcpy",), "correct": False,
}  # fmt: skip


def evidence(ratio: float, ruling: Ruling) -> Evidence:
    return Evidence(
        metric="m", ruling=ruling, over=True, blocks=8, dropped=0,
        ratio=ratio, low=ratio, high=ratio, path=(),
    )  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_each_broken_condition_is_named_whichever_trial_has_it(name):
    bad = replace(GOOD, **{name: BAD[name]})
    (found,) = reasons([GOOD, bad])
    assert found.startswith(f"{name}: ")
    assert reasons([bad, GOOD]) == (found,)
    partly = replace(GOOD, **{name: None})
    assert reasons([GOOD, partly]) == (f"{name}: asked of some trials only",)


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
    (found,) = reasons([replace(GOOD, **trial) for trial in trials])
    assert found.startswith(said)
    assert len(found) < 90


def test_good_conditions_and_those_nobody_asked():
    assert reasons([GOOD, replace(GOOD, mhz=1970.0, celsius=67.0)]) == ()
    assert reasons([replace(GOOD, capped=0.5)] * 2) == ()
    assert unasked([GOOD, GOOD]) == reasons([Conditions()]) == ()
    assert set(unasked([Conditions()])) == set(BAD) == {name for name, _, _ in CHECKS}


def test_counts_are_red_either_way():
    assert changes({"kernels": 3, "syncs": 0}, {"kernels": 3, "syncs": 0}) == {}
    found = changes({"kernels": 3, "nodes": 9}, {"kernels": 2, "syncs": 0})
    assert found == {"kernels": (3, 2), "nodes": (9, None), "syncs": (None, 0)}
    for bad in (-1, 1.0, True, None):
        with pytest.raises(UsageError, match="obtained kernels = "):
            changes({}, {"kernels": bad})


def test_tpot_is_step_time_over_accept_length():
    regressed, ok = Ruling.REGRESSED, Ruling.OK
    found = decompose(evidence(1.25, regressed), evidence(1.0, ok), evidence(0.8, regressed))
    assert (found.step, found.accept) == (0.0, pytest.approx(math.log(1.25)))
    assert found.rest == pytest.approx(0.0)
    assert found.cause == "the accept length (drafts) regressed"
    host = decompose(evidence(1.1, regressed), evidence(1.0, ok), evidence(1.0, ok))
    assert host.rest == pytest.approx(math.log(1.1))
    assert host.cause.endswith("the scheduler or the host")
    assert decompose(*[evidence(1.0, ok)] * 3).cause == ""


def test_bootstrap_of_constants_and_of_a_known_spread():
    assert bca(ratio_of_medians, [2.0] * 5, [3.0] * 5) == pytest.approx((1.5, 1.5))
    a = [1.0 + 0.01 * (i % 5) for i in range(40)]
    b = [1.1 * x for x in reversed(a)]
    low, high = bca(ratio_of_medians, a, b)
    assert 1.05 < low <= 1.1 <= high < 1.15
    tokens, verifies = [30.0, 40.0, 20.0], [10.0, 10.0, 10.0]
    assert bca(ratio_of_accept_lengths, tokens, verifies, tokens, verifies) == (1.0, 1.0)
    for columns in (([1.0], [1.0]), ([1.0, 2.0], [1.0]), ([1.0, math.nan], [1.0, 2.0])):
        with pytest.raises(UsageError, match="columns"):
            bca(ratio_of_medians, *columns)
