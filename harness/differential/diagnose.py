"""Diagnosis of wrong numbers: keys rotated for other positions, or wrong keys read."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from harness.core.case import Case, Execution, Inputs, KVDtype
from harness.differential.dense import dense_rows
from harness.differential.forward import ForwardResult, decoys, run_forward
from harness.differential.inputs import make_trial_inputs
from harness.differential.traced_inputs import (
    DECOY,
    FIRST_TRACED,
    PADDING,
    UNOWNED,
    by_distance_from_the_end,
    capacity,
    tokens_read,
    with_tracers,
)
from harness.subjects import Subject
from harness.upstream.forward_batch_info import DraftOutput

MAX_PASSES = 8
SHIFTS = (0, -1, 1, -2, 2)
# Relative error that an FP8 cache stays below, and that the next position's rotation exceeds.
ROTATED = 0.05
ELSEWHERE = {
    PADDING: "the padding page",
    UNOWNED: "slots that hold nothing yet",
    DECOY: "keys of another batch",
}


@dataclass
class KeysRead:
    """Keys that one query read in one layer, over all passes.

    Args:
        keys: (request, position).
        elsewhere: whatever else it read, in words.
    """

    keys: set[tuple[int, int]] = field(default_factory=set)
    elsewhere: set[str] = field(default_factory=set)


def explain(
    case: Case,
    subject: Subject,
    execution: Execution,
    device: torch.device | str,
    result: ForwardResult,
) -> str:
    """One line on the keys in the cache, or else on the keys that a second, traced run reads."""
    return rotation(result) or keys_read(case, subject, execution, device)


def rotation(result: ForwardResult) -> str:
    """The first request whose new keys were rotated for other positions; empty if none was."""
    pool_state, output = result.pool_state, result.output
    case, batch = result.inputs.case, result.inputs.tested
    for i, slots in enumerate(batch.new_slots):
        tokens = batch.new_tokens[i]
        if isinstance(output, DraftOutput):
            tokens = output.draft_tokens[i, :-1].cpu()
        keys = pool_state.rows(0, torch.tensor(slots))[0].cpu().double().flatten(1)
        if case.kv_dtype is KVDtype.FP8:
            keys *= case.k_scale
        positions = torch.arange(case.prefix_lens[i], case.total_lens[i])
        errors = []
        for shift in SHIFTS:
            rows = dense_rows(result.inputs.weights, case, tokens, positions + shift, queries=0)
            rotated = rows.k[0].double().flatten(1)
            errors.append(float((keys - rotated).norm() / rotated.norm()))
        nearest = min(range(len(SHIFTS)), key=errors.__getitem__)
        if nearest and errors[nearest] < ROTATED < errors[0]:
            shift = SHIFTS[nearest]
            size = "large" if shift > 0 else "small"
            return f"keys of request {i} were rotated for positions {abs(shift)} too {size}"
    return ""


def keys_read(
    case: Case, subject: Subject, execution: Execution, device: torch.device | str = "cpu"
) -> str:
    """One line on the first query that read other keys than it should, or that none did.

    The case runs again with traced inputs, as often as it takes to trace all its keys; of very
    long cases the last ones are traced.
    """
    case = replace(case, inputs=Inputs.TRACED)
    inputs = make_trial_inputs(case, *(decoys(case) if execution is Execution.GRAPH else ()))
    keys, room = by_distance_from_the_end(case), capacity(case)
    passes = [keys[i : i + room] for i in range(0, min(len(keys), MAX_PASSES * room), room)]
    reads = [[KeysRead() for _ in range(case.num_layers)] for _ in range(case.num_tokens)]
    for traced in passes:
        result = run_forward(subject, with_tracers(inputs, traced), execution, device)
        _add(reads, result)
    return _summary(case, reads, {key for traced in passes for key in traced})


def _add(reads: list[list[KeysRead]], result: ForwardResult) -> None:
    inputs = result.inputs
    states = result.output.hidden_states
    if isinstance(result.output, DraftOutput):
        # Each step's state holds half of the one before.
        states = states.clone()
        states[:, 1:] -= result.output.hidden_states[:, :-1] * 0.5
        states = states.flatten(0, 1)
    for row, readings in zip(reads, tokens_read(inputs, states), strict=True):
        for read, reading in zip(row, readings, strict=True):
            if math.isnan(reading.keys):
                read.elsewhere.add("something that is not finite")
                continue
            for token in reading.positions:
                if token in ELSEWHERE:
                    read.elsewhere.add(ELSEWHERE[token])
                elif token >= FIRST_TRACED:
                    read.keys.add(inputs.traced[token - FIRST_TRACED])


def _summary(case: Case, reads: list[list[KeysRead]], traced: set[tuple[int, int]]) -> str:
    queries = [(i, j) for i, count in enumerate(case.q_lens) for j in range(count)]
    wrong = []
    for (i, j), layers in zip(queries, reads, strict=True):
        position = case.prefix_lens[i] + j
        for layer, read in enumerate(layers):
            windowed = case.window_left >= 0 and layer % 2
            first = max(0, position - case.window_left) if windowed else 0
            expected = {(i, t) for t in range(first, position + 1)} & traced
            if faults := _faults(read, i, expected, first, position):
                own = _spans(t for request, t in read.keys if request == i)
                wrong.append(
                    f"query {j} of request {i} (position {position}, layer {layer}) read keys "
                    f"{own}, expected {_spans(t for _, t in expected)}: {', '.join(faults)}"
                )
    if not wrong:
        return "every query read the keys that it should: a value, weight, scale or row is wrong"
    more = f" ({len(wrong) - 1} more like it)" if len(wrong) > 1 else ""
    return wrong[0] + more


def _faults(
    read: KeysRead, request: int, expected: set[tuple[int, int]], first: int, position: int
) -> list[str]:
    own = {t for i, t in read.keys if i == request}
    counts = {
        "of the future": sum(t > position for t in own),
        "left of the window": sum(t < first for t in own),
        "missed": len(expected - read.keys),
    }
    faults = [f"{n} {'key' if n == 1 else 'keys'} {what}" for what, n in counts.items() if n]
    others = sorted({i for i, _ in read.keys} - {request})
    faults += [f"keys {_spans(t for i, t in read.keys if i == j)} of request {j}" for j in others]
    return faults + sorted(read.elsewhere)


def _spans(positions: Iterable[int]) -> str:
    """Sorted numbers with runs folded: 0..31, 40."""
    runs: list[list[int]] = []
    for position in sorted(positions):
        if runs and position == runs[-1][1] + 1:
            runs[-1][1] = position
        else:
            runs.append([position, position])
    return ", ".join(f"{a}..{b}" if b > a else str(a) for a, b in runs) or "none"
