"""A phase: one kind of forward, planned and then run, eagerly or by replaying a graph.

The engine uses backends and graph runners through phases alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Generic, Protocol, TypeVar

from harness.engine.draft import multi_step_draft
from harness.engine.models.base import Model
from harness.upstream.base_attn_backend import AttentionBackend, MultiStepDraftBackend
from harness.upstream.forward_batch_info import DraftOutput, ForwardBatch, LogitsProcessorOutput

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
AnyBackend = AttentionBackend | MultiStepDraftBackend


class Phase(Protocol[T_co]):
    """One kind of forward."""

    @property
    def backend(self) -> AnyBackend:
        """The backend that plans it."""
        ...

    def graph_bs(self, batch: ForwardBatch) -> int | None:
        """The captured batch size that this batch would replay, None for an eager forward."""
        ...

    def prepare(self, batch: ForwardBatch) -> None:
        """Plan; input_ids may still be unwritten."""
        ...

    def run(self, batch: ForwardBatch) -> T_co:
        """Compute what was planned last."""
        ...


class Runner(Protocol[T_co]):
    """A captured phase."""

    def can_run(self, batch: ForwardBatch) -> bool:
        """Whether a captured batch size holds this batch, which is not idle."""
        ...

    def bucket(self, bs: int) -> int:
        """The captured batch size for so many requests."""
        ...

    def prepare(self, batch: ForwardBatch) -> None:
        """Copy into the static buffers and plan."""
        ...

    def run(self, batch: ForwardBatch) -> T_co:
        """Copy what was not known at prepare, replay, and return copies."""
        ...


@dataclass(frozen=True)
class EagerPhase(Generic[T]):
    """Plan metadata, then run the model."""

    backend: AnyBackend
    forward: Callable[[ForwardBatch], T]

    def graph_bs(self, batch: ForwardBatch) -> int | None:
        """Never a graph."""
        return None

    def prepare(self, batch: ForwardBatch) -> None:
        """Plan metadata."""
        self.backend.init_forward_metadata(batch)

    def run(self, batch: ForwardBatch) -> T:
        """Run the model."""
        return self.forward(batch)


@dataclass(frozen=True)
class GraphPhase(Generic[T]):
    """Replay where the runner has a graph for the batch, else the eager phase."""

    eager: Phase[T]
    runner: Runner[T]

    @property
    def backend(self) -> AnyBackend:
        """The backend of both."""
        return self.eager.backend

    def graph_bs(self, batch: ForwardBatch) -> int | None:
        """The runner's bucket."""
        return self.runner.bucket(batch.batch_size) if self.runner.can_run(batch) else None

    def prepare(self, batch: ForwardBatch) -> None:
        """Plan with the runner or the eager phase, as run does."""
        self._serving(batch).prepare(batch)

    def run(self, batch: ForwardBatch) -> T:
        """Replay or run."""
        return self._serving(batch).run(batch)

    def _serving(self, batch: ForwardBatch) -> Phase[T] | Runner[T]:
        return self.runner if self.runner.can_run(batch) else self.eager


def model_phase(model: Model, backend: AttentionBackend) -> EagerPhase[LogitsProcessorOutput]:
    """The eager phase of one forward of a model."""

    def forward(batch: ForwardBatch) -> LogitsProcessorOutput:
        planned = batch.with_changes(attn_backend=backend)
        return model.forward(planned.input_ids, planned.positions, planned)

    return EagerPhase(backend, forward)


def draft_phase(model: Model, backend: MultiStepDraftBackend) -> EagerPhase[DraftOutput]:
    """The eager phase of all steps of a multi-step draft."""
    return EagerPhase(backend, multi_step_draft(model, backend))


@dataclass(frozen=True, kw_only=True)
class EaglePhases:
    """The phases of an EAGLE worker.

    Args:
        target_extend: prefill of the target.
        target_verify: verification of a chain.
        draft_prefill: prefill of the draft.
        draft: the multi-step draft; None where num_steps = 1.
        draft_extend: draft extend, v1 or v2.
    """

    target_extend: Phase[LogitsProcessorOutput]
    target_verify: Phase[LogitsProcessorOutput]
    draft_prefill: Phase[LogitsProcessorOutput]
    draft: Phase[DraftOutput] | None
    draft_extend: Phase[LogitsProcessorOutput]

    def backends(self) -> list[AnyBackend]:
        """The backends of all phases."""
        phases = (getattr(self, each.name) for each in fields(self))
        return [phase.backend for phase in phases if phase is not None]


@dataclass(frozen=True, kw_only=True)
class TargetOnlyPhases:
    """The phases of greedy decoding without speculation."""

    extend: Phase[LogitsProcessorOutput]
    decode: Phase[LogitsProcessorOutput]

    def backends(self) -> list[AnyBackend]:
        """The backends of all phases."""
        return [self.extend.backend, self.decode.backend]
