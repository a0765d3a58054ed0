"""One forward of a subject: eager, or a graph replay between replays of decoys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from harness.core.case import Case, Execution, Mode
from harness.differential.forward_batches import pad_batch
from harness.differential.input_types import TrialInputs
from harness.differential.invariants import (
    check_entries,
    check_frozen,
    check_padding,
    check_waits,
    frozen,
)
from harness.differential.pool_state import PoolState, make_pool_state
from harness.differential.rig import ForwardOutput, Rig, build
from harness.differential.scheduler_writes import SchedulerWrites
from harness.differential.watching import calls, check_eager, check_replayed, watching
from harness.graphs.runner import GraphRunner
from harness.subjects import Subject
from harness.upstream.base_attn_backend import SharedReadEnds
from harness.upstream.forward_batch_info import ForwardBatch
from harness.upstream.memory_pool import SWAKVPool


@dataclass(frozen=True)
class ForwardResult:
    """Output of a forward, and the state it left.

    Args:
        pool_state: the pools, after the forward.
        before: copies of the cache buffers, from just before the forward.
        output: the real rows.
        plans: metadata of the forward; of a multi-step draft, one per step.
        bucket: rows that were planned, padded ones included.
        violations: broken invariants that the execution found, one line each.
        operations: where it asked for more or fewer than its formula says, one line each. A
            forward with another defect mostly does, so that they are the last cause to name.
    """

    pool_state: PoolState
    before: dict[str, torch.Tensor]
    output: ForwardOutput
    plans: tuple[Any, ...]
    bucket: int
    violations: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()

    @property
    def inputs(self) -> TrialInputs:
        """Inputs of the trial."""
        return self.pool_state.inputs


def run_forward(
    subject: Subject, inputs: TrialInputs, execution: Execution, device: torch.device | str = "cpu"
) -> ForwardResult:
    """Run the tested batch on new pools; a replay has its decoys replayed before and after it."""
    unread = subject.numerics(device).unread(inputs.case)
    state = make_pool_state(inputs, device, unread)
    rig = build(subject, state, padding=_of_padded_lanes(state, unread))
    with torch.no_grad():
        return _replayed(rig) if execution is Execution.GRAPH else _eager(rig)


def _of_padded_lanes(state: PoolState, unread: float) -> float | None:
    """Queries, keys and values that padded lanes compute; None for those of token 0.

    A draft may choose token 0 for a request, and traced inputs need it. On a GPU nobody has tried
    yet what NaN does.
    """
    drafts = state.case.mode is Mode.MULTI_STEP_DRAFT
    on_gpu = state.device.type != "cpu"
    return None if drafts or state.inputs.traced or on_gpu else unread


def decoys(case: Case) -> tuple[Case, ...]:
    """Cases that leave stale state in a larger bucket and then in the case's own."""
    own = min(bs for bs in case.capture_bs if bs >= case.bs)
    larger = [bs for bs in sorted(case.capture_bs) if bs > own][:1]
    return tuple(_decoy(case, bs) for bs in (*larger, own))


def _decoy(case: Case, bs: int) -> Case:
    longest = min(case.max_context_len - case.num_draft_tokens - case.num_steps, 110)
    return replace(
        case,
        id=f"{case.id}+decoy{bs}",
        prefix_lens=tuple((29 * i + 53) % longest + 1 for i in range(bs)),
        accept_lens=tuple(
            (3 * i + 1) % case.num_draft_tokens + 1 for i in range(bs if case.accept_lens else 0)
        ),
    )


def _eager(rig: Rig) -> ForwardResult:
    case, pool_state = rig.case, rig.pool_state
    before, scheduler = pool_state.copies(), SchedulerWrites(rig, SharedReadEnds.UNKNOWN)
    batch = planned = rig.batch
    if case.padded_rows:
        width = 1 if case.mode is Mode.MULTI_STEP_DRAFT else max(case.q_lens)
        batch = pad_batch(batch, case.padded_rows, width)
    if case.pads_before_plan:
        planned = planned.with_changes(batch_size=batch.batch_size)
    with watching(rig) as planning:
        rig.backend.init_forward_metadata(planned)
    _remap(pool_state)
    if case.mode is Mode.EXTEND:
        scheduler.ends = rig.planners[0].resolve_prefill_shared_read_ends(
            planned, num_qo_tokens=planned.input_ids.shape[0]
        )
        scheduler.after_plan()
    with watching(rig) as running:
        output = rig.forward(batch)
    rows = case.bs if case.mode is Mode.MULTI_STEP_DRAFT else case.num_tokens
    violations = check_waits((*planning.waits, *running.waits)) + scheduler.check()
    violations += check_entries(calls(rig), case, rig.subject.conventions)
    operations = check_eager(rig, planning, running, rows)
    violations += [
        f"{name}: row {rows + i} of DP padding is not finite [padding]"
        for name, tensor in tensors(output).items()
        for i in (~tensor[rows:].flatten(1).isfinite().all(1)).nonzero().flatten().tolist()[:1]
    ]
    real = _real_rows(output, rows)
    return ForwardResult(
        pool_state, before, real, rig.plans, case.bs, tuple(violations), tuple(operations)
    )


def _remap(pool_state: PoolState) -> None:
    """Change the SWA mapping, as a scheduler that runs ahead may after a forward is planned."""
    if isinstance(pool := pool_state.token_to_kv_pool, SWAKVPool):
        mapping = pool.full_to_swa_index_mapping
        mapping.copy_(mapping.flip(0))


def _replayed(rig: Rig) -> ForwardResult:
    pool_state, decoys = rig.pool_state, rig.pool_state.inputs.decoys
    capture_bs = tuple(decoy.case.bs for decoy in decoys)
    scheduler = SchedulerWrites(rig)
    runner = rig.capture(capture_bs, after_metadata=scheduler.after_metadata)
    conventions = rig.subject.conventions
    violations = check_entries(calls(rig), rig.case, conventions, captured=len(decoys))
    for decoy in decoys:
        runner.replay(rig.batch_of(decoy))
    # The last decoy is in the case's bucket, so its plan is the one that must not move.
    numbers = conventions.freezes_host_numbers
    decoy_plans = [frozen(plan, numbers) for plan in rig.plans]
    before = pool_state.copies()
    with watching(rig) as replaying:
        output = scheduler.replay(runner, rig.batch)
    violations += check_waits(replaying.waits)
    violations += check_static_inputs(runner, rig.batch)
    for plan, old in zip(rig.plans, decoy_plans, strict=True):
        violations += check_frozen(old, frozen(plan, numbers))
    plans = tuple(snapshot(plan) for plan in rig.plans)
    after = pool_state.copies()
    output_copies = {name: tensor.clone() for name, tensor in tensors(output).items()}
    runner.replay(rig.batch_of(decoys[-1]))
    for name, tensor in tensors(output).items():
        # A NaN is judged by the numbers; here it would pass for a change.
        if not torch.allclose(tensor, output_copies[name], rtol=0, atol=0, equal_nan=True):
            violations.append(f"{name} of a replay changed in the next one [lifetime]")
    violations += scheduler.check()
    operations = check_replayed(rig, runner, scheduler.recorded_writes)
    pool_state.restore(after)
    return ForwardResult(
        pool_state, before, output, plans, min(capture_bs), tuple(violations), tuple(operations)
    )


def snapshot(plan: Any) -> Any:
    """A plan with copies of its tensors, which no later replay changes."""
    return replace(plan, **{name: tensor.clone() for name, tensor in tensors(plan).items()})


def check_static_inputs(runner: GraphRunner[Any, Any], batch: ForwardBatch) -> list[str]:
    """Padded elements of static inputs that do not hold their pad, one line per buffer."""
    padded = runner.padding(batch)
    return check_padding(padded, runner.pads, dict.fromkeys(padded, 0))


def tensors(fields: Any) -> dict[str, torch.Tensor]:
    """The tensors among the attributes of an object, by name."""
    return {k: v for k, v in vars(fields).items() if isinstance(v, torch.Tensor)}


def _real_rows(output: ForwardOutput, rows: int) -> ForwardOutput:
    real: dict[str, Any] = {name: tensor[:rows] for name, tensor in tensors(output).items()}
    return replace(output, **real)
