"""What a subject makes of a case: one forward, eager or replayed among other batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from harness.attention.paged_backend import PagedBackend
from harness.core.case import Case, Execution, Mode
from harness.differential.forward_batches import make_batch, pad_batch
from harness.differential.inputs import BatchInputs, TrialInputs
from harness.differential.invariants import check_frozen, check_padding, frozen
from harness.differential.pool_state import PoolState, make_pool_state
from harness.differential.rig import Rig, build, build_runner
from harness.graphs.runner import GraphRunner
from harness.subjects import Subject
from harness.upstream.forward_batch_info import DraftOutput, ForwardBatch, LogitsProcessorOutput
from harness.upstream.memory_pool import SWAKVPool

ForwardOutput = LogitsProcessorOutput | DraftOutput


@dataclass(frozen=True)
class ForwardResult:
    """What came out, before anybody judged it.

    Args:
        pool_state: the pools, after the forward.
        before: copies of the cache buffers, from just before the forward.
        output: the real rows.
        plans: metadata of every planned forward; several in a multi-step draft.
        bucket: rows that were planned, padded ones included.
        violations: what the execution itself found broken.
    """

    pool_state: PoolState
    before: dict[str, torch.Tensor]
    output: ForwardOutput
    plans: tuple[Any, ...]
    bucket: int
    violations: tuple[str, ...] = ()


def run_forward(
    subject: Subject, inputs: TrialInputs, execution: Execution, device: torch.device | str = "cpu"
) -> ForwardResult:
    """Run the first batch of a world; its other batches are replayed before and after it."""
    unread = subject.numerics(device).unread(inputs.batches[0].case)
    pool_state = make_pool_state(inputs, device, unread)
    rig = build(subject, pool_state)
    with torch.no_grad():
        run = _replayed if execution is Execution.GRAPH else _eager
        return run(subject, pool_state, rig)


def decoys(case: Case) -> tuple[Case, ...]:
    """Batches that leave stale state behind in the case's own bucket and in a larger one."""
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


def batch_of(pool_state: PoolState, rig: Rig, requests: BatchInputs) -> ForwardBatch:
    """The batch, with host lengths only for a backend that asks for them."""
    return make_batch(pool_state, requests, host_lengths=rig.backend.needs_cpu_seq_lens)


def plans(rig: Rig) -> tuple[Any, ...]:
    """The metadata of every backend that was planned."""
    if isinstance(rig.backend, PagedBackend):
        return (rig.backend.forward_metadata,)
    return tuple(backend.forward_metadata for backend in rig.backend.attn_backends)


def copies(pool_state: PoolState) -> dict[str, torch.Tensor]:
    """Copies of every cache buffer, by name."""
    return {name: buffer.clone() for name, buffer in pool_state.buffers().items()}


def _eager(subject: Subject, pool_state: PoolState, rig: Rig) -> ForwardResult:
    case, requests = pool_state.case, pool_state.inputs.batches[0]
    before = copies(pool_state)
    batch = planned = batch_of(pool_state, rig, requests)
    if case.padded_rows:
        width = 1 if case.mode is Mode.MULTI_STEP_DRAFT else max(case.q_lens)
        batch = pad_batch(batch, case.padded_rows, width)
    if case.pads_before_plan:
        planned = planned.with_changes(batch_size=batch.batch_size)
    rig.backend.init_forward_metadata(planned)
    _remap(pool_state)
    output = rig.forward(batch)
    rows = case.bs if case.mode is Mode.MULTI_STEP_DRAFT else case.num_tokens
    violations = [
        f"{name}: row {rows + i} of DP padding is not finite [padding]"
        for name, tensor in _tensors(output).items()
        for i in (~tensor[rows:].flatten(1).isfinite().all(1)).nonzero().flatten().tolist()[:1]
    ]
    return ForwardResult(
        pool_state, before, _cut(output, rows), plans(rig), case.bs, tuple(violations)
    )


def _remap(pool_state: PoolState) -> None:
    """Map SWA slots anew, as a scheduler that runs ahead may once a forward is planned."""
    if isinstance(pool := pool_state.token_to_kv_pool, SWAKVPool):
        mapping = pool.full_to_swa_index_mapping
        mapping.copy_(mapping.flip(0))


def _replayed(subject: Subject, pool_state: PoolState, rig: Rig) -> ForwardResult:
    requests, *others = pool_state.inputs.batches
    capture_bs = tuple(batch.case.bs for batch in others)
    runner = build_runner(subject, pool_state, rig, capture_bs)
    runner.capture()
    for other in others:
        runner.replay(batch_of(pool_state, rig, other))
    # The last batch of the company shares the case's bucket, so its plan is the one to keep.
    kept = [frozen(plan) for plan in plans(rig)]
    before = copies(pool_state)
    batch = batch_of(pool_state, rig, requests)
    output = runner.replay(batch)
    violations = padding(runner, batch)
    for plan, old in zip(plans(rig), kept, strict=True):
        violations += check_frozen(old, frozen(plan))
    planned = tuple(snapshot(plan) for plan in plans(rig))
    after = {name: buffer.clone() for name, buffer in pool_state.buffers().items()}
    held = {name: tensor.clone() for name, tensor in _tensors(output).items()}
    runner.replay(batch_of(pool_state, rig, others[-1]))
    for name, tensor in _tensors(output).items():
        # A NaN is judged by the numbers; here it would hide the cause behind a change that is none.
        if not torch.allclose(tensor, held[name], rtol=0, atol=0, equal_nan=True):
            violations.append(f"{name} of a replay changed in the next one [lifetime]")
    for name, buffer in pool_state.buffers().items():
        buffer.copy_(after[name])
    return ForwardResult(pool_state, before, output, planned, min(capture_bs), tuple(violations))


def snapshot(plan: Any) -> Any:
    """A plan whose tensors no later replay changes."""
    tensors = {
        name: value.clone() for name, value in vars(plan).items() if isinstance(value, torch.Tensor)
    }
    return replace(plan, **tensors)


def padding(runner: GraphRunner[Any, Any], batch: ForwardBatch) -> list[str]:
    """Padded elements of static inputs that do not hold their pad, one line a buffer."""
    padded = runner.padding(batch)
    return check_padding(padded, runner.pads, dict.fromkeys(padded, 0))


def _tensors(output: ForwardOutput) -> dict[str, torch.Tensor]:
    return {k: v for k, v in vars(output).items() if isinstance(v, torch.Tensor)}


def _cut(output: ForwardOutput, rows: int) -> ForwardOutput:
    cut: dict[str, Any] = {name: tensor[:rows] for name, tensor in _tensors(output).items()}
    return replace(output, **cut)
