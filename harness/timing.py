"""Three clocks, arms interleaved in one run, and medians with intervals that assume no shape.

The *host* clock times a call while the device idles: what the host spends, whatever it launches.
The *device span* lies between two events around a call; a call ahead of it keeps the device busy
while the host launches. *Graph replay* is the span of a graph that holds a region many times over,
divided: what the device spends, without the host. Times are in microseconds.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from harness.errors import UsageError, rejected

Region = Callable[[], object]
Clock = Callable[[Region], float]
"""Microseconds that a region takes."""
Arm = Callable[[], float]
"""One sample, in microseconds."""


def host_clock(idle: Region, now: Callable[[], int] = time.perf_counter_ns) -> Clock:
    """Times the call alone.

    Args:
        idle: waits until the device has nothing to do; not part of a sample.
        now: nanoseconds.
    """

    def clock(region: Region) -> float:
        idle()
        start = now()
        region()
        return (now() - start) / 1e3

    return clock


def finished_clock(idle: Region, now: Callable[[], int] = time.perf_counter_ns) -> Clock:
    """Times a call until the device has finished it; arguments as of ``host_clock``."""
    clock = host_clock(idle, now)

    def to_the_end(region: Region) -> float:
        def run() -> None:
            region()
            idle()

        return clock(run)

    return to_the_end


def span_clock(device: torch.device | str) -> Clock:
    """Times what the device does between two events around the second of two calls."""
    stream = torch.cuda.current_stream(device)

    def clock(region: Region) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        region()
        start.record(stream)
        region()
        end.record(stream)
        end.synchronize()
        return 1e3 * float(start.elapsed_time(end))

    return clock


def arm(clock: Clock, region: Region, times: int = 1) -> Arm:
    """Samples of ``region``, which does the same work ``times`` over."""
    if times < 1:
        raise UsageError(rejected("times", times, ">= 1"))
    return lambda: clock(region) / times


def interleave(
    arms: Mapping[str, Arm], *, blocks: int, warm_up: int, seed: int
) -> dict[str, tuple[float, ...]]:
    """Samples of every arm, one a block; the order within a block is drawn.

    Args:
        arms: by name.
        blocks: samples of each arm.
        warm_up: blocks that run before and are dropped.
        seed: of the order.

    Raises:
        UsageError: ``blocks`` or ``warm_up`` is out of range.
    """
    for field, value, least in (("blocks", blocks, 1), ("warm_up", warm_up, 0)):
        if value < least:
            raise UsageError(rejected(field, value, f">= {least}"))
    order, draw = list(arms), random.Random(seed)
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for block in range(-warm_up, blocks):
        draw.shuffle(order)
        for name in order:
            sample = arms[name]()
            if block >= 0:
                samples[name].append(sample)
    return {name: tuple(taken) for name, taken in samples.items()}


@dataclass(frozen=True)
class Estimate:
    """A value and an interval that covers it; ``low`` and ``high`` are 0 and inf if unbounded."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


def median(samples: Sequence[float], confidence: float = 0.95) -> Estimate:
    """The median of positive samples, and order statistics that cover it.

    The number of samples below the true median is binomial, whatever they are distributed like;
    the interval leaves out as many samples on either side as that allows. Where even all samples
    do not cover it with this confidence, it is unbounded.

    Raises:
        UsageError: no sample, a sample that is not positive and finite, or a confidence outside
            (0, 1).
    """
    if not samples or not all(0 < sample < math.inf for sample in samples):
        raise UsageError(rejected("samples", samples, "some, positive and finite"))
    if not 0 < confidence < 1:
        raise UsageError(rejected("confidence", confidence, "between 0 and 1"))
    ordered, count = sorted(samples), len(samples)
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    allowed, missed, outside = (1 - confidence) / 2 * 2**count, 0, -1
    while missed + math.comb(count, outside + 1) <= allowed:
        outside += 1
        missed += math.comb(count, outside)
    if outside < 0:
        return Estimate(middle, 0.0, math.inf)
    return Estimate(middle, ordered[outside], ordered[count - 1 - outside])


def ratio(
    samples: Sequence[float], reference: Sequence[float], confidence: float = 0.95
) -> Estimate:
    """Median over median.

    The interval holds wherever both medians lie in theirs, each at half the error allowed.
    """
    each = (1 + confidence) / 2
    above, below = median(samples, each), median(reference, each)
    high = above.high / below.low if below.low else math.inf
    return Estimate(above.value / below.value, above.low / below.high, high)
