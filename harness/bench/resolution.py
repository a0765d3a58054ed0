"""What sessions find: recorded launches of equal arms, drawn into sessions with known effects.

A launch keeps its trials, in their order. A session is drawn on one host, its launches without
replacement until all were drawn, their arms at random; arm B's times are then multiplied. Recorded
pairs are broken up, so that a drift of the machine between two blocks counts as noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.bench.recorded_launches import HostLaunches, RecordedLaunches
from harness.bench.stats.bench_verdict import BenchVerdict
from harness.bench.stats.design import Design
from harness.bench.stats.e_process import Array, scales
from harness.bench.stats.estimates import centre
from harness.bench.stats.margin import Bounds
from harness.bench.stats.stopping import VERDICT_CODES, decide, scaled_paths
from harness.errors import UsageError, rejected

SESSIONS_OF_EACH = 100
"""Sessions of each replicate of the bootstrap."""
INTERVAL = (2.5, 97.5)
"""Its percentiles."""
REGRESSED, IMPROVED = map(VERDICT_CODES.index, (BenchVerdict.REGRESSED, BenchVerdict.IMPROVED))

Whole = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The sessions that are drawn.

    Args:
        effects: shares by which arm B is slower, 0.01 is one percent.
        design: of their blocks.
        bounds: of every workload.
        seconds: of a session at most, starts included.
        sessions: how many.
        replicates: of the bootstrap.
        seed: draws them.
    """

    effects: Sequence[float]
    design: Design
    bounds: Sequence[Bounds]
    seconds: float
    sessions: int
    replicates: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class ShareFound:
    """How often an effect was found.

    Args:
        workload: its id.
        effect: 0 for equal arms, which are blamed where anything is found.
        share: of the drawn sessions.
        low, high: 95 % interval, of a bootstrap by launch and, of several hosts, by host.
        blocks, minutes: of a session, the mean; minutes of all its workloads.
    """

    workload: str
    effect: float
    share: float
    low: float
    high: float
    blocks: float
    minutes: float


def shares_found(recorded: RecordedLaunches, asked: Asked) -> list[ShareFound]:
    """How often each effect is found in sessions that are drawn from recorded launches.

    Raises:
        UsageError: the design has more trials a launch than were recorded.
    """
    each = len(asked.design.orders[0]) // asked.design.launches
    known = len(recorded.plan.design.orders[0]) // recorded.plan.design.launches
    if each > known:
        name = asked.design.name.lower()
        raise UsageError(rejected("design", name, f"one of at most {known} trials a launch"))
    random = np.random.default_rng(asked.seed)
    hosts = list(recorded.hosts.values())
    whole = [[np.arange(len(row.logs)) for row in host.workloads] for host in hosts]
    found, blocks, minutes = _sessions(
        recorded, asked, random, list(zip(hosts, whole, strict=True)), asked.sessions
    )
    replicates = np.array(
        [
            _sessions(recorded, asked, random, _resampled(random, hosts), SESSIONS_OF_EACH)[0].mean(
                axis=-1
            )
            for _ in range(asked.replicates)
        ]
    )
    low, high = np.percentile(replicates, INTERVAL, axis=0)
    return [
        ShareFound(
            workload=case.workload,
            effect=effect,
            share=float(found[e, w].mean()),
            low=float(low[e, w]),
            high=float(high[e, w]),
            blocks=float(blocks[e, w].mean()),
            minutes=float(minutes[e].mean()),
        )
        for w, case in enumerate(recorded.cases)
        for e, effect in enumerate(asked.effects)
    ]


Pools = list[tuple[HostLaunches, list[Whole]]]
"""Hosts, and the launches of each workload that are drawn from."""


def _resampled(random: np.random.Generator, hosts: Sequence[HostLaunches]) -> Pools:
    """As many hosts, and of each as many launches, with replacement; of one host launches alone."""
    drawn = [hosts[n] for n in random.integers(len(hosts), size=len(hosts))]
    return [
        (host, [random.integers(len(row.logs), size=len(row.logs)) for row in host.workloads])
        for host in drawn
    ]


def _sessions(
    recorded: RecordedLaunches,
    asked: Asked,
    random: np.random.Generator,
    pools: Pools,
    sessions: int,
) -> tuple[NDArray[np.bool_], Whole, Array]:
    """Whether the effect was found and the blocks used, [effects, workloads, sessions]; minutes.

    Minutes are those of all workloads, [effects, sessions].
    """
    parts = [
        _of_one_host(recorded, asked, random, host, pool, math.ceil(sessions / len(pools)))
        for host, pool in pools
    ]
    found, blocks, minutes = (np.concatenate(part, axis=-1) for part in zip(*parts, strict=True))
    return found, blocks, minutes


def _of_one_host(
    recorded: RecordedLaunches,
    asked: Asked,
    random: np.random.Generator,
    host: HostLaunches,
    pool: Sequence[Whole],
    sessions: int,
) -> tuple[NDArray[np.bool_], Whole, Array]:
    noise, seconds, scale = [], [], []
    for case, bounds, row, launches in zip(
        recorded.cases, asked.bounds, host.workloads, pool, strict=True
    ):
        drawn = draw_launches(random, launches, (sessions, bounds.n_max), asked.design)
        noise.append(block_effects(row.logs, drawn, asked.design))
        each = len(asked.design.orders[0]) // asked.design.launches
        seconds.append(row.seconds[:, :each].sum(axis=1)[drawn].sum(axis=(2, 3)))
        scale.append(scales(noise[-1], case.calibrated))  # an effect leaves it as it is
    start_s = host.start_s * asked.design.launches / recorded.plan.design.launches
    outcomes = []
    for effect in asked.effects:
        codes, used = zip(
            *(
                decide(
                    scaled_paths(one + math.log1p(effect), bounds, its_scale), recorded.thresholds
                )
                for one, bounds, its_scale in zip(noise, asked.bounds, scale, strict=True)
            ),
            strict=True,
        )
        outcomes.append(_in_time(np.array(codes), np.array(used), seconds, start_s, asked, effect))
    found, blocks, minutes = (np.array(part) for part in zip(*outcomes, strict=True))
    return found, blocks, minutes


def draw_launches(
    random: np.random.Generator, pool: Whole, shape: tuple[int, int], design: Design
) -> Whole:
    """Launches of every block's arms, [sessions, blocks, 2, launches of an arm].

    Within a session none comes twice before all have come. In a pool that holds one twice, no arm
    meets itself.
    """
    sessions, blocks = shape
    cycle = len(pool) // design.launches
    cycles = 1 + math.ceil(2 * blocks / cycle)  # of more than enough, for those left out
    orders = random.permuted(np.broadcast_to(pool, (sessions * cycles, len(pool))), axis=1)
    pairs = orders[:, : cycle * design.launches].reshape(sessions, -1, 2, design.launches // 2)
    alike = (pairs[:, :, 0, :, None] == pairs[:, :, 1, None, :]).any(axis=(2, 3))
    kept = np.argsort(alike, axis=1, kind="stable")[:, :blocks]
    return np.take_along_axis(pairs, kept[:, :, None, None], axis=1)


def block_effects(logs: Array, drawn: Whole, design: Design) -> Array:
    """Effects of blocks of these launches, [sessions, blocks].

    In every design two neighbours are an arm's n-th trial and the other arm's.

    Args:
        logs: [launches, trials].
        drawn: from ``draw_launches``.
        design: of the blocks.
    """
    each = len(design.orders[0]) // design.launches
    trials = logs[:, :each][drawn]
    trials = trials.reshape(*drawn.shape[:3], -1)
    return centre(trials[:, :, 1] - trials[:, :, 0])


def _in_time(
    codes: Whole,
    used: Whole,
    seconds: Sequence[Array],
    start_s: float,
    asked: Asked,
    effect: float,
) -> tuple[NDArray[np.bool_], Whole, Array]:
    """The outcome where no block begins that ends too late; a decided workload is not measured."""
    longest = max(part.shape[1] for part in seconds)
    spent = np.zeros((codes.shape[1], longest))
    is_open = np.zeros(spent.shape, dtype=bool)
    for blocks, part in zip(used, seconds, strict=True):
        mine = np.arange(part.shape[1]) < blocks[:, None]
        spent[:, : part.shape[1]] += part * mine
        is_open[:, : part.shape[1]] |= mine
    clock = np.cumsum(spent + start_s * is_open, axis=1)
    allowed = (clock <= asked.seconds).sum(axis=1)
    blocks_used = np.minimum(used, allowed)
    last = blocks_used.max(axis=0)
    ended = np.take_along_axis(clock, np.maximum(last - 1, 0)[:, None], axis=1)[:, 0] * (last > 0)
    sought = [
        code for code, is_sought in ((REGRESSED, effect >= 0), (IMPROVED, effect <= 0)) if is_sought
    ]
    return np.isin(codes, sought) & (used <= allowed), blocks_used, ended / 60
