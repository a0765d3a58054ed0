"""``python3 -m harness.bench.stats.simulation``: error rates and power on simulated machines.

Every trial of a session is log noise of its launch (1 %), of its repeats (0.6 %, median of three),
a drift (0.2 % per launch) and spikes (one in 25, 10 % on average), unless the row says otherwise.
The adversarial rows have margin 0, a look after each of 40 blocks and a second place that is 2 %
slower. The rows of a shared host compare the designs on the same minutes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from harness.bench.stats.bench_verdict import BenchVerdict
from harness.bench.stats.design import Design, neighbours
from harness.bench.stats.e_process import Array
from harness.bench.stats.estimates import centre
from harness.bench.stats.margin import Bounds
from harness.bench.stats.stopping import VERDICT_CODES, Thresholds, decide, paths
from harness.core.argument_types import CommandLine, count

Noise = Callable[[np.random.Generator, tuple[int, ...]], Array]
NO_MARGIN = Bounds(delta0=0.0, delta1=0.03, n_max=40)
KERNEL = Bounds(delta0=math.log1p(0.005), delta1=math.log1p(0.03), n_max=16)
SERVER = Bounds(delta0=math.log1p(0.01), delta1=math.log1p(0.03), n_max=16)
SECOND_PLACE = 0.02
DRIFT = 0.002
PASSES, PASS_SIGMA, PASS_CORRELATION = 32, 0.1, 0.7
"""Of a block on a shared host: log noise of a pass of a third of a second, autocorrelated."""
SESSIONS_AT_ONCE = 2000
"""Sessions at a time, so that memory stays small."""


def ordinary(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Launch and repeat noise with spikes."""
    sigma = math.hypot(0.01, 0.006 * 1.25 / math.sqrt(3))
    spikes = (random.random(shape) < 0.04) * random.exponential(0.1, shape)
    return random.normal(0.0, sigma, shape) + spikes


def lognormal(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Skewed: a lognormal excess of 3 % in the median."""
    return np.asarray(0.03 * random.lognormal(0.0, 1.0, shape))


def half_cauchy(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """No mean: a half-Cauchy excess of 1 % in the median."""
    return np.abs(0.01 * random.standard_cauchy(shape))


def bimodal(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Two clocks 4 % apart, the lower in one trial of three."""
    return 0.04 * (random.random(shape) < 1 / 3) + random.normal(0.0, 0.003, shape)


def shared_host(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Fast and slow for seconds: a trial is the mean of its part of a block's passes."""
    *blocks, places = shape
    passes = random.normal(0.0, PASS_SIGMA, (*blocks, PASSES))
    fresh = math.sqrt(1.0 - PASS_CORRELATION**2)
    for n in range(1, PASSES):
        passes[..., n] = PASS_CORRELATION * passes[..., n - 1] + fresh * passes[..., n]
    return np.asarray(passes.reshape(*shape, PASSES // places).mean(axis=-1))


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A row of the simulation: noise, true effect, design and margin."""

    name: str
    noise: Noise
    design: Design
    bounds: Bounds
    slowdown: float = 0.0
    second_place: float = 0.0
    reject_null: float = 100.0


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of the sessions by verdict, and the mean number of blocks."""

    by_verdict: dict[BenchVerdict, float]
    blocks: float


def _scenarios() -> tuple[Scenario, ...]:
    pairs, quads = Design.PAIRS, Design.QUADS
    adversarial = [
        Scenario(name=f"A/A, {noise.__name__}, margin 0", noise=noise, design=pairs,
              bounds=NO_MARGIN, second_place=SECOND_PLACE)
        for noise in (lognormal, half_cauchy, bimodal, ordinary)
    ]  # fmt: skip
    plain = [
        Scenario(name=f"{slowdown:.0%} slower, {what}", noise=ordinary, design=design,
              bounds=bounds, slowdown=slowdown)
        for what, design, bounds in (
            ("pairs, delta0 0.5 %", pairs, KERNEL),
            ("quads, delta0 0.5 %", quads, KERNEL),
            ("pairs, delta0 1 %", pairs, SERVER),
            ("quads, delta0 1 %", quads, SERVER),
        )
        for slowdown in (0.0, 0.01, 0.02, 0.03, 0.05, 0.10)
    ]  # fmt: skip
    shared = [
        Scenario(name=f"{slowdown:.0%} slower, shared host, {design.name.lower()}",
              noise=shared_host, design=design, bounds=KERNEL, slowdown=slowdown)
        for design in Design
        for slowdown in (0.0, 0.05)
    ]  # fmt: skip
    return (*adversarial, *plain, *shared)


SCENARIOS = {scene.name: scene for scene in _scenarios()}


def effects(
    scene: Scenario, sessions: int, random: np.random.Generator, *, randomised: bool = True
) -> Array:
    """Effects of sessions of ``n_max`` blocks, [sessions, n_max], drawn trial by trial.

    Args:
        scene: its row.
        sessions: how many.
        random: source of noise and of the orders.
        randomised: whether the order is drawn; otherwise always the design's first.
    """
    places = len(scene.design.orders[0])
    shape = (sessions, scene.bounds.n_max, places)
    launches = np.arange(shape[1] * places).reshape(shape[1:])
    logs = scene.noise(random, shape) + DRIFT * launches
    logs[..., 1::2] += scene.second_place
    flips = random.choice([-1.0, 1.0], size=shape[:2]) if randomised else np.ones(shape[:2])
    seen = centre(neighbours(logs, scene.design.orders[0])) * flips
    return np.asarray(seen + math.log1p(scene.slowdown))


def simulate(scene: Scenario, sessions: int, seed: int = 1, *, randomised: bool = True) -> Shares:
    """Verdicts of ``sessions`` simulated sessions, decided exactly as those of measured ones."""
    random = np.random.default_rng(seed)
    counts = np.zeros(len(VERDICT_CODES))
    blocks = 0
    for start in range(0, sessions, SESSIONS_AT_ONCE):
        drawn = effects(
            scene, min(SESSIONS_AT_ONCE, sessions - start), random, randomised=randomised
        )
        codes, used = decide(paths(drawn, scene.bounds), Thresholds(reject_null=scene.reject_null))
        counts += np.bincount(codes, minlength=len(VERDICT_CODES))
        blocks += int(used.sum())
    shares = dict(zip(VERDICT_CODES, (counts / sessions).tolist(), strict=True))
    return Shares(by_verdict=shares, blocks=blocks / sessions)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, one row per scenario, in percent of sessions."""
    parser = CommandLine(prog="python -m harness.bench.stats.simulation", description=__doc__)
    parser.add_argument("--sessions", type=count, default=10_000, metavar="N", help="per row")
    parser.add_argument("--seed", type=int, default=1, help="of the noise and the orders")
    chosen = parser.parse_args(argv)
    print(
        f"{'scene':36}" + "".join(f"{verdict:>14}" for verdict in VERDICT_CODES) + f"{'blocks':>8}"
    )
    for name, scene in SCENARIOS.items():
        found = simulate(scene, chosen.sessions, chosen.seed)
        cells = "".join(f"{100 * found.by_verdict[verdict]:14.2f}" for verdict in VERDICT_CODES)
        print(f"{name:36}{cells}{found.blocks:8.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
