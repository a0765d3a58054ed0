"""What every forward of a worker was handed, noted for suites that recompute it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

import torch

from harness.engine.phases import AnyBackend, EaglePhases, Phase, PlainPhases
from harness.upstream.batch import ForwardBatch

T = TypeVar("T")
P = TypeVar("P", EaglePhases, PlainPhases)


@dataclass(frozen=True)
class Forward:
    """One forward.

    Args:
        phase: the field of the worker's phases.
        batch: what it was handed; tensors are copies on the host.
    """

    phase: str
    batch: ForwardBatch


class Trace(list[Forward]):
    """The forwards of a worker, in order."""

    def of(self, phase: str) -> list[ForwardBatch]:
        """The batches of one phase."""
        return [forward.batch for forward in self if forward.phase == phase]


@dataclass(frozen=True)
class TracedPhase(Generic[T]):
    """A phase that notes every batch it runs."""

    name: str
    phase: Phase[T]
    trace: Trace

    @property
    def backend(self) -> AnyBackend:
        """The traced phase's."""
        return self.phase.backend

    def graph_bs(self, batch: ForwardBatch) -> int | None:
        """The traced phase's."""
        return self.phase.graph_bs(batch)

    def prepare(self, batch: ForwardBatch) -> None:
        """Plan."""
        self.phase.prepare(batch)

    def run(self, batch: ForwardBatch) -> T:
        """Note and run."""
        self.trace.append(Forward(self.name, snapshot(batch)))
        return self.phase.run(batch)


def traced(phases: P, trace: Trace) -> P:
    """The same phases, noting under their field's name every batch they run."""
    found = {each.name: getattr(phases, each.name) for each in fields(phases)}
    wrapped: dict[str, Any] = {
        name: TracedPhase(name, phase, trace) for name, phase in found.items() if phase
    }
    return replace(phases, **wrapped)


def snapshot(batch: ForwardBatch) -> ForwardBatch:
    """A copy whose tensors, the batch's own and its spec_info's, nobody else can change."""
    spec = batch.spec_info and replace(batch.spec_info, **_copies(batch.spec_info))
    return replace(batch, **_copies(batch), spec_info=spec)


def _copies(holder: object) -> dict[str, Any]:
    return {
        name: value.detach().clone().cpu()
        for name, value in vars(holder).items()
        if isinstance(value, torch.Tensor)
    }
