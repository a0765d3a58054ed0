"""One workload on one launch: warm up, then flush and measure, as often as asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import requests

from harness.bench.arms import Arm
from harness.bench.load_generator import Prompt, WorkloadRun, drive
from harness.bench.machine_monitor import MachineMonitor
from harness.bench.metrics import metrics
from harness.bench.server_pool import Server
from harness.bench.session_records import Sample, Trial, Workload
from harness.bench.stats.validity import Conditions
from harness.errors import SpecgateError, brief
from harness.server.client.flush import Flushed, flush
from harness.server.client.sglang import Client

MOST_SLEEP_S = 0.1
"""A planted sleep behind a warm-up that was disturbed must not stall the night."""


@dataclass(frozen=True, kw_only=True)
class TrialSlot:
    """Where a trial sits in the design: see ``Trial``."""

    session: str
    block: int
    place: int
    arm: str


@dataclass(frozen=True, kw_only=True)
class NumberedTrials:
    """Makes trials.

    Args:
        prompts: of a workload.
        warm_ups: of every workload on every server, before it is first measured there.
        passes: of every trial; every pass is behind a flush of its own.
        watch: a probe of this machine, for a server.
        connect, empty: client and flush of a URL.
        check: raises ``ContractError`` where a server answers wrongly, asked before every warm-up;
            None where nobody knows what is right.
    """

    prompts: Callable[[Workload], Sequence[Prompt]]
    warm_ups: int
    passes: int
    watch: Callable[[Server], MachineMonitor] = lambda _: MachineMonitor()
    connect: Callable[[str], Client] = Client
    empty: Callable[[str], Flushed] = flush
    check: Callable[[Arm, Client, Workload], None] | None = None
    warm: dict[tuple[str, str], float] = field(default_factory=dict, repr=False)
    """Milliseconds a step by (URL, workload), of what has been warmed up."""

    def run(self, slot: TrialSlot, arm: Arm, server: Server, workload: Workload) -> Trial:
        """Measure; whatever the server does wrong makes the trial invalid and is its reason."""
        started, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
        measured = _Measured()
        try:
            server.wait_ready()
            self._measure(measured, arm, server, workload)
        except (SpecgateError, requests.RequestException) as error:
            measured.wrong.append(brief(error))
        return Trial(
            **vars(slot),
            workload=workload.id,
            **measured.fields(workload),
            started=started,
            seconds=time.monotonic() - clock,
        )

    def _measure(self, measured: _Measured, arm: Arm, server: Server, workload: Workload) -> None:
        prompts = self.prompts(workload)

        def send() -> WorkloadRun:
            return drive(lambda: self.connect(server.url), workload, prompts)

        where = (server.url, workload.id)
        if where not in self.warm:
            if self.check:
                self.check(arm, self.connect(server.url), workload)
            passes = [send() for _ in range(self.warm_ups)]
            self.warm[where] = metrics(passes[1:] or passes).get("step_time", 0.0)
        with (
            self._slowed(measured, arm, server, self.warm[where]),
            self.watch(server) as probe,
        ):
            for _ in range(self.passes):
                measured.flushes.append(self.empty(server.url))
                measured.passes.append(send())
        measured.machine = probe.facts()
        measured.correct = True if self.check else None

    @contextmanager
    def _slowed(
        self, measured: _Measured, arm: Arm, server: Server, step_ms: float
    ) -> Iterator[None]:
        """Plant the arm's slowdown in a server that does not slow itself, and take it out again."""
        if not arm.slowdown or arm.slows_itself:
            yield
            return
        measured.sleep_s = min(arm.slowdown * step_ms / 1e3, MOST_SLEEP_S)
        client = self.connect(server.url)
        client.slow_down(measured.sleep_s)
        try:
            yield
        finally:
            client.slow_down(None)


@dataclass
class _Measured:
    """A trial in the making."""

    passes: list[WorkloadRun] = field(default_factory=list)
    flushes: list[Flushed] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    sleep_s: float = 0.0
    correct: bool | None = None

    def fields(self, workload: Workload) -> dict[str, Any]:
        """Of ``Trial``, as far as measuring gives them."""
        samples = tuple(sample for one in self.passes for sample in one.samples)
        failures = tuple(line for one in self.passes for line in one.failures)
        cached = sum(sample.cached_tokens for sample in samples)
        conditions = Conditions(
            **self.machine,
            failed=len(failures),
            output_tokens=sum(sample.completion_tokens for sample in samples),
            cached_tokens=cached,
            # The pass behind a flush is its proof: the same prompts were cached before it.
            flushed=bool(self.flushes) and not cached,
            correct=self.correct,
        )
        return {
            "metrics": {} if self.wrong else metrics(self.passes),
            "samples": samples,
            "conditions": conditions,
            "mhz": conditions.mhz,
            "flush_tries": sum(flushed.tries for flushed in self.flushes),
            "flush_seconds": sum(flushed.seconds for flushed in self.flushes),
            "invalid": (*self.wrong, *failures[:3]),
            "slept_s": self.sleep_s,
            "counts": {} if self.wrong or failures else _counts(workload, samples),
        }


def _counts(workload: Workload, samples: Sequence[Sample]) -> dict[str, int]:
    """What one request at a time makes exact; beside others, batches differ by who came when."""
    if workload.batch_size > 1:
        return {}
    return {
        "completion_tokens": sum(sample.completion_tokens for sample in samples),
        "spec_verify_ct": sum(sample.spec_verify_ct for sample in samples),
    }
