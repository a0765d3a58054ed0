"""What a forward asks of the device beside its answer: waits, kernel entries, operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness.core.case import Execution, Mode
from harness.core.operations import (
    EMULATED,
    forward_operations,
    host_operations,
    planned_operations,
)
from harness.differential.invariants import check_operations
from harness.differential.rig import Rig
from harness.graphs.effects import Watched, watched
from harness.graphs.runner import GraphRunner
from harness.graphs.tape import Tape

ONE_TOKEN = (Mode.DECODE, Mode.MULTI_STEP_DRAFT)
"""Modes whose forwards have one query token per request."""


def calls(rig: Rig) -> list[str]:
    """Entries of the kernel that were called so far; a backend of sglang's has another kernel."""
    return list(getattr(rig.kernel, "calls", ()))


@contextmanager
def watching(rig: Rig) -> Iterator[Watched]:
    """What a forward asks of the device inside the ``with``; nothing on a GPU.

    There the host waits for real, and what ``torch`` tells of it costs more than the trial.
    """
    conventions = rig.subject.conventions
    unwatched = conventions.waits and conventions.more is None
    if unwatched or rig.pool_state.device.type != "cpu":
        yield Watched()
        return
    mirror = rig.batch.seq_lens_cpu
    with watched([] if mirror is None else [mirror]) as seen:
        yield seen
    if conventions.waits:
        seen.waits.clear()


def _is_counted(rig: Rig) -> bool:
    return rig.subject.conventions.more is not None and rig.pool_state.device.type == "cpu"


def check_eager(rig: Rig, planning: Watched, running: Watched, tokens: int) -> list[str]:
    """Operations of a plan, and of a forward over so many real tokens."""
    if not _is_counted(rig):
        return []
    of = rig.case, rig.subject.conventions, rig.subject.capability, Execution.EAGER
    lines = check_operations("the plan", planning.operations, planned_operations(*of))
    if rig.subject.kernel in EMULATED and rig.case.bs:
        due = forward_operations(*of, tokens)
        lines += check_operations("the forward", running.operations, due)
    return lines


def check_replayed(rig: Rig, runner: GraphRunner[Any, Any], writes: int) -> list[str]:
    """Operations that the batch's graph has, and those that its backend has before a replay."""
    if not _is_counted(rig):
        return []
    case, conventions, capability = rig.case, rig.subject.conventions, rig.subject.capability
    lines, batch, bucket = list[str](), rig.batch, runner.bucket(rig.case.bs)
    with watching(rig) as copying:
        runner.inputs.copy(batch, runner.extent(batch), filled_after_draft=False)
    with watching(rig) as preparing:
        runner.prepare(batch)
    on_host = preparing.operations - copying.operations
    due = host_operations(case, conventions)
    lines += check_operations("planning before a replay", on_host, due)
    graph = runner.graphs[bucket]
    if isinstance(graph, Tape) and rig.subject.kernel in EMULATED:
        of = case, conventions, capability, Execution.GRAPH
        tokens = bucket * (1 if case.mode in ONE_TOKEN else case.num_draft_tokens)
        due = planned_operations(*of) + forward_operations(*of, tokens)
        lines += check_operations("the graph", graph.operations.total() - writes, due)
    return lines
