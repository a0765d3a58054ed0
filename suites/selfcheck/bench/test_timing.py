"""Times, intervals and verdicts follow from the samples alone, by numbers worked by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate

import pytest
import torch

from fixtures.latency.latency import judged
from fixtures.latency.timing import (
    Estimate,
    arm,
    finished_clock,
    host_clock,
    interleave,
    median,
    ratio,
    span_clock,
)
from fixtures.tables.latency import ATTENTION, LIMITS, LONG, OURS, PEER, POINTS, WAITS, Limit
from harness.errors import UsageError


def ticks(*nanoseconds: int) -> Callable[[], int]:
    return iter(nanoseconds).__next__


def test_the_host_clock_waits_first_and_times_the_call_alone() -> None:
    seen: list[str] = []
    clock = host_clock(lambda: seen.append("idle"), ticks(1_000, 8_500))
    assert clock(lambda: seen.append("call")) == 7.5
    assert seen == ["idle", "call"]


def test_the_finished_clock_waits_after_the_call_too() -> None:
    seen: list[str] = []
    clock = finished_clock(lambda: seen.append("idle"), ticks(0, 2_000))
    assert clock(lambda: seen.append("call")) == 2.0
    assert seen == ["idle", "call", "idle"]


def test_the_span_lies_around_the_second_of_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            seen.append(f"event on {stream}")

        def synchronize(self) -> None:
            seen.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return 0.25 if end is not self else 0.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"{device}'s stream")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append("idle"))
    assert span_clock("cuda:1")(lambda: seen.append("call")) == 250.0
    event = "event on cuda:1's stream"
    assert seen == ["idle", "call", event, "call", event, "wait"]


def test_an_arm_divides_by_the_copies_it_runs() -> None:
    assert arm(host_clock(list, ticks(0, 100_000)), list, times=50)() == 2.0
    with pytest.raises(UsageError, match="times = 0"):
        arm(host_clock(list), list, times=0)


def test_arms_alternate_in_a_drawn_order_and_warm_up_is_dropped() -> None:
    order: list[str] = []

    def named(name: str, start: float) -> Callable[[], float]:
        values = accumulate(iter(int, 1), lambda a, _: a + 1, initial=start)

        def sample() -> float:
            order.append(name)
            return next(values)

        return sample

    arms = {"a": named("a", 100), "b": named("b", 200), "c": named("c", 300)}
    samples = interleave(arms, blocks=20, warm_up=2, seed=5)
    assert samples["a"] == tuple(range(102, 122))
    assert samples["c"] == tuple(range(302, 322))
    blocks = [tuple(order[i : i + 3]) for i in range(0, 66, 3)]
    assert {tuple(sorted(block)) for block in blocks} == {("a", "b", "c")}
    assert len(set(blocks)) == 6
    first, order[:] = list(order), []
    interleave(arms, blocks=20, warm_up=2, seed=5)
    assert order == first


@pytest.mark.parametrize(("field", "value"), [("blocks", 0), ("warm_up", -1)])
def test_interleaving_refuses_numbers_out_of_range(field: str, value: int) -> None:
    with pytest.raises(UsageError, match=f"{field} = {value}"):
        interleave({}, **{"blocks": 1, "warm_up": 0, "seed": 0} | {field: value})


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [
        # P(Bin(n, 1/2) <= k) <= 0.025: n = 5 has no k, n = 6 has 0, n = 9 has 1, n = 40 has 13.
        (5, 0.0, math.inf),
        (6, 1.0, 6.0),
        (9, 2.0, 8.0),
        (40, 14.0, 27.0),
    ],
)
def test_intervals_leave_out_as_many_samples_as_the_binomial_allows(
    count: int, low: float, high: float
) -> None:
    shuffled = [float(1 + (7 * i) % count) for i in range(count)]
    assert sorted(shuffled) == [float(i) for i in range(1, count + 1)]
    assert median(shuffled) == Estimate((count + 1) / 2, low, high)


@pytest.mark.parametrize("samples", [[], [1.0, 0.0], [1.0, math.nan], [math.inf]])
def test_medians_refuse_what_is_no_time(samples: list[float]) -> None:
    with pytest.raises(UsageError, match="samples"):
        median(samples)
    with pytest.raises(UsageError, match=r"confidence = 1\.0"):
        median([1.0], 1.0)


def test_a_ratio_pairs_the_worst_ends_of_both_intervals() -> None:
    # At 97.5 % each, n = 9: P(Bin <= 1) = 0.0195 > 0.0125, so only the extremes are left: k = 0.
    assert ratio([float(i) for i in range(1, 10)], [10.0 * i for i in range(1, 10)]) == Estimate(
        0.1, 1 / 90, 0.9
    )
    assert ratio([1.0] * 3, [1.0] * 3) == Estimate(1.0, 0.0, math.inf)


def steady(value: float) -> tuple[float, ...]:
    return tuple(value * (1 + 0.001 * (i % 5)) for i in range(60))


@pytest.mark.parametrize(
    ("ours", "within"), [(6.0, True), (6.30, True), (6.36, False), (7.0, False)]
)
def test_a_limit_binds_the_upper_end(ours: float, within: bool) -> None:
    limit = Limit(LONG, OURS, PEER, 0.20)
    found, line = judged(limit, {OURS: steady(ours), PEER: steady(31.7)})
    assert (found.high <= limit.factor) is within
    assert f"{OURS} " in line
    assert f"{PEER} " in line
    assert f"{'within' if within else 'beyond'} 0.2" in line


def test_few_samples_are_no_proof() -> None:
    limit = Limit(LONG, OURS, PEER, 0.20)
    found, line = judged(limit, {OURS: (1.0,), PEER: (100.0,)})
    assert found == Estimate(0.01, 0.0, math.inf)
    assert "beyond" in line


def test_every_row_of_the_tables_can_be_told_apart() -> None:
    for rows in (POINTS, LIMITS, ATTENTION, WAITS):
        assert len({row.id for row in rows}) == len(rows)
    assert {limit.point for limit in LIMITS} == set(POINTS)
    assert [limit.factor for limit in LIMITS] == [2.0, 0.4, 0.4, 0.4, 0.2, 0.4]
