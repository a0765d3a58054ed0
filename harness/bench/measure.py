"""A trial: one workload on one launch, warmed up once, then flushed and measured pass by pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import requests

from harness.bench.arms import Arm
from harness.bench.bench_serving import BenchServing
from harness.bench.load_generator import Prompt, WorkloadRun, drive
from harness.bench.machine_monitor import MachineMonitor
from harness.bench.metrics import Phases, metrics, phase_metrics, step_ms
from harness.bench.server_pool import Server
from harness.bench.session_records import Sample, Trial, Workload
from harness.bench.stats.validity import Conditions
from harness.errors import ContractError, SpecgateError, brief
from harness.server.client.flush import Flushed, flush
from harness.server.client.sglang import Client

MOST_INJECTED_SLEEP_S = 0.1
"""A sleep computed from a disturbed warm-up must not stall the run."""
MOST_WARM_UP_TOKENS = 4096
"""Of a prompt: a prefill of 80 K takes half a minute, and steps run the same kernels after it."""


@dataclass(frozen=True, kw_only=True)
class TrialSlot:
    """Position of a trial in the design: see ``Trial``."""

    session: str
    block: int
    place: int
    arm: str
    launch: str = ""


@dataclass(frozen=True, kw_only=True)
class TrialMaker:
    """Measures trials on servers.

    Args:
        prompts: of a workload.
        warm_ups: passes of every workload on every server, before it is first measured there.
        passes: of every trial; each follows a flush of its own.
        monitor: of this machine, for a server.
        connect, empty: client and flush of a URL.
        bench_serving: sends a workload of ``sglang.bench_serving`` to a URL.
        check: raises ``ContractError`` where a server answers wrongly, called before every warm-up;
            None where the right answers are unknown.
    """

    prompts: Callable[[Workload], Sequence[Prompt]]
    warm_ups: int
    passes: int
    monitor: Callable[[Server], MachineMonitor] = lambda _: MachineMonitor()
    connect: Callable[[str], Client] = Client
    empty: Callable[[str], Flushed] = flush
    check: Callable[[Arm, Client, Workload], None] | None = None
    bench_serving: Callable[[str, Workload], WorkloadRun] = field(default_factory=BenchServing)
    warm: dict[tuple[str, str, int | None], float] = field(default_factory=dict, repr=False)
    """Milliseconds per step by (URL, workload, most tokens of a prompt), of those warmed up."""

    def run(self, slot: TrialSlot, arm: Arm, server: Server, workload: Workload) -> Trial:
        """Measure a trial; an error of the server makes it invalid and is its reason."""
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
            **measured.fields(exact=workload.batch_size == 1 or arm.shape is not None),
            started=started,
            seconds=time.monotonic() - clock,
        )

    def _measure(self, measured: _Measured, arm: Arm, server: Server, workload: Workload) -> None:
        def send(most: int | None = None) -> WorkloadRun:
            if workload.bench_serving is not None:
                return self.bench_serving(server.url, workload)
            asked = [prompt[:most] for prompt in self.prompts(workload)]
            return drive(lambda: self.connect(server.url), workload, asked)

        # An injected sleep is a part of the step that it is added to.
        most = None if arm.slowdown else MOST_WARM_UP_TOKENS
        where = (server.url, workload.id, most)
        if where not in self.warm:
            if self.check:
                self.check(arm, self.connect(server.url), workload)
            passes = [send(most) for _ in range(self.warm_ups)]
            self.warm[where] = step_ms(metrics(passes[1:] or passes))
        with (
            self._slowed(measured, arm, server, self.warm[where]),
            self.monitor(server) as monitor,
        ):
            before = self._phases(arm, server)
            for _ in range(self.passes):
                measured.flushes.append(self.empty(server.url))
                measured.passes.append(send())
            measured.phases = phase_metrics(before, self._phases(arm, server))
        measured.machine = monitor.facts()
        measured.correct = True if self.check else None

    def _phases(self, arm: Arm, server: Server) -> Phases:
        found = self.connect(server.url).phases() if arm.tells_phases else {}
        if arm.tells_phases and not found:
            raise ContractError("phases=on, but the server tells none: has it our plugin?")
        return found

    @contextmanager
    def _slowed(
        self, measured: _Measured, arm: Arm, server: Server, step_ms: float
    ) -> Iterator[None]:
        """Inject the arm's slowdown into a server that does not slow itself, for this context."""
        if not arm.slowdown or arm.slows_itself:
            yield
            return
        measured.sleep_s = min(arm.slowdown * step_ms / 1e3, MOST_INJECTED_SLEEP_S)
        client = self.connect(server.url)
        client.slow_down(measured.sleep_s)
        try:
            measured.slept_on = "gpu" if client.delays_gpu() else "host"
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
    phases: dict[str, float] = field(default_factory=dict)
    sleep_s: float = 0.0
    slept_on: str = ""
    correct: bool | None = None

    def fields(self, *, exact: bool) -> dict[str, Any]:
        """Those of ``Trial`` that are measured.

        Args:
            exact: whether its counts have no noise. With one request at a time they have none, nor
                where every verify accepts a fixed number; else batches depend on arrivals.
        """
        samples = tuple(sample for one in self.passes for sample in one.samples)
        failures = tuple(line for one in self.passes for line in one.failures)
        known = [s.cached_tokens for s in samples if s.cached_tokens is not None]
        cached = sum(known) if len(known) == len(samples) else None
        conditions = Conditions(
            **self.machine,
            failed=len(failures),
            output_tokens=sum(sample.completion_tokens for sample in samples),
            cached_tokens=cached,
            # The pass after a flush is its proof: the same prompts were cached before it.
            flushed=None if cached is None else bool(self.flushes) and not cached,
            correct=self.correct,
        )
        return {
            "metrics": {} if self.wrong else self._metrics(),
            "samples": samples,
            "conditions": conditions,
            "flush_tries": sum(flushed.tries for flushed in self.flushes),
            "flush_seconds": sum(flushed.seconds for flushed in self.flushes),
            "invalid": (*self.wrong, *failures[:3]),
            "slept_s": self.sleep_s,
            "slept_on": self.slept_on,
            "counts": _counts(samples) if exact and not self.wrong and not failures else {},
        }

    def _metrics(self) -> dict[str, float]:
        found = metrics(self.passes)
        return found | self.phases if found else {}


def _counts(samples: Sequence[Sample]) -> dict[str, int]:
    return {
        "completion_tokens": sum(sample.completion_tokens for sample in samples),
        "spec_verify_ct": sum(sample.spec_verify_ct for sample in samples),
    }
