"""Records of a benchmark: the plan of every session, then every trial; the rest is derived.

A session compares two arms on some cases. Its plan is written before its first trial and never
changes: the seed of the orders, the margins and the thresholds are fixed before the first trial.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from harness.bench.stats.design import Design
from harness.bench.stats.margin import Bounds, Margin
from harness.bench.stats.stopping import Thresholds
from harness.bench.stats.validity import Conditions
from harness.core.record import Environment


class Role(StrEnum):
    """The purpose of a session."""

    CANDIDATE = "candidate"
    """Arm B is the candidate."""
    SAME = "A/A"
    """Arm B is arm A again: it must be neither REGRESSED nor IMPROVED."""
    INJECTED = "injected"
    """Arm B is arm A with a known slowdown: it must be REGRESSED."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The requests of one pass.

    Args:
        id: such as "bs8-in512-out64".
        batch_size: requests in flight at a time.
        input_len, output_len: tokens per request.
        requests: per pass; a multiple of batch_size. batch_size requests sent together are a
            one-batch workload; more make a closed loop.
        bench_serving: arguments of ``sglang.bench_serving``, which sends the requests then; only
            it knows the numbers, which are 0. None where this project sends them.
    """

    id: str
    batch_size: int
    input_len: int
    output_len: int
    requests: int
    bench_serving: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class ArmFacts:
    """One side of a comparison, as it was started.

    Args:
        name: for people, such as "fa3" or "sglang 0.5.14".
        command: argv of its server, empty where one was attached to.
        versions: packages that matter, such as {"sglang": "0.5.14"}.
        slowdown: share of a step's time that is added to every step.
    """

    name: str
    command: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    slowdown: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CasePlan:
    """The plan of one metric of one workload.

    Args:
        workload: its id.
        metric: name of a row of the margins table.
        bounds: log margins and the most valid blocks, from the rehearsal.
        calibrated: scale of A/A effects, log units.
        unit, higher_is_better: of the metric, from its row.
    """

    workload: str
    metric: str
    bounds: Bounds
    calibrated: float
    unit: str = ""
    higher_is_better: bool = False

    @property
    def margin(self) -> Margin:
        """Name, unit and direction of the metric."""
        return Margin(metric=self.metric, unit=self.unit, higher_is_better=self.higher_is_better)


@dataclass(frozen=True, kw_only=True)
class Session:
    """The plan of a session.

    Args:
        id: unique in a file, such as "candidate".
        role: its purpose.
        a, b: the arms; A is the reference.
        seed, design: of the randomised orders.
        thresholds: of the family.
        workloads: in the order of measurement.
        warm_ups, passes: see ``TrialMaker``.
        cases: the metrics of each workload that get a verdict.
        started: ISO 8601, UTC.
        environment: the machine.
        kind, format: of the line that records it.
    """

    id: str
    role: Role
    a: ArmFacts
    b: ArmFacts
    seed: str
    design: Design
    thresholds: Thresholds
    workloads: tuple[Workload, ...]
    warm_ups: int
    passes: int
    cases: tuple[CasePlan, ...]
    started: str
    environment: Environment
    kind: Literal["session"] = "session"
    format: Literal[3] = 3


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One request, timed by its client.

    Args:
        ttft_ms: from sending to the first chunk.
        latency_ms: from sending to the last chunk.
        chunk_gaps_ms: between chunks; a chunk holds the tokens that one step accepted.
        completion_tokens, spec_verify_ct, cached_tokens: from ``meta_info``; verify count 0
            without speculation. ``sglang.bench_serving`` tells neither the verify count, 0 then,
            nor the cached tokens, None then.
    """

    ttft_ms: float
    latency_ms: float
    chunk_gaps_ms: tuple[float, ...]
    completion_tokens: int
    spec_verify_ct: int
    cached_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One workload on one launch of one arm.

    Args:
        session, block, place, arm: position in the design: block from 0, place from 0 in the
            block's order, arm "A" or "B".
        workload: its id.
        metrics: one number each, in the unit of its margin; empty where the trial failed.
        samples: every measured request.
        conditions: of the machine and the server during the trial.
        flush_tries, flush_seconds: of the flushes before the measured passes.
        invalid: reasons that alone make the trial invalid, such as a failed request.
        started: ISO 8601, UTC.
        seconds: from launch to the last answer.
        counts: of the measured passes, where the server reports any; they have no noise.
        launch: of the server, by a name that no other launch of its session has; sessions may share
            one. Empty in older records.
        slept_s: injected into every step of a server that does not slow itself.
        slept_on: who sleeps for as long: the server's host, before every forward, or its GPU.
        kind, format: of the line that records it.
    """

    session: str
    block: int
    place: int
    arm: str
    workload: str
    metrics: dict[str, float]
    samples: tuple[Sample, ...]
    conditions: Conditions
    flush_tries: int
    flush_seconds: float
    invalid: tuple[str, ...]
    started: str
    seconds: float
    counts: dict[str, int] = field(default_factory=dict)
    slept_s: float = 0.0
    launch: str = ""
    slept_on: Literal["", "host", "gpu"] = ""
    kind: Literal["trial"] = "trial"
    format: Literal[3] = 3


Line = Session | Trial
