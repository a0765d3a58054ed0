"""Why numbers are wrong: positions that keys were rotated for, or keys that queries read."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from harness.core.case import Case, Execution, Inputs, KVDtype
from harness.differential.dense import dense_rows
from harness.differential.forward import ForwardResult, decoys, run_forward
from harness.differential.judge import stored
from harness.differential.traced_inputs import (
    DECOY,
    FIRST_TRACED,
    PADDING,
    UNOWNED,
    by_distance_from_the_end,
    capacity,
    make_trial_inputs,
    tokens_read,
    with_tracers,
)
from harness.subjects import Subject
from harness.upstream.forward_batch_info import DraftOutput

PASSES = 8
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
    """What one query read in one layer, over all passes.

    Args:
        keys: (request, position).
        elsewhere: what else, in words.
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
    """One line: what the cache tells, or else what the case tells when it runs once more."""
    return rotation(result) or keys_read(case, subject, execution, device)


def rotation(result: ForwardResult) -> str:
    """The first request whose new keys were rotated for other positions; empty if none was."""
    pool_state, output = result.pool_state, result.output
    case, requests = pool_state.case, pool_state.inputs.batches[0]
    for i, slots in enumerate(requests.new_slots):
        tokens = requests.new_tokens[i]
        if isinstance(output, DraftOutput):
            tokens = output.draft_tokens[i, :-1].cpu()
        keys = stored(pool_state, 0, torch.tensor(slots))[0].cpu().double().flatten(1)
        if case.kv_dtype is KVDtype.FP8:
            keys *= case.k_scale
        positions = torch.arange(case.prefix_lens[i], case.total_lens[i])
        errors = []
        for shift in SHIFTS:
            due = dense_rows(
                pool_state.inputs.weights, case, tokens, positions + shift, queries=0
            ).k[0]
            errors.append(float((keys - due.flatten(1)).norm() / due.norm()))
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

    The case runs again with watched inputs, as often as its keys need to be watched all; of very
    long cases the last ones are.
    """
    case = replace(case, inputs=Inputs.TRACED)
    others = decoys(case) if execution is Execution.GRAPH else ()
    inputs = make_trial_inputs(case, *others)
    keys, room = by_distance_from_the_end(case), capacity(case)
    passes = [keys[i : i + room] for i in range(0, min(len(keys), PASSES * room), room)]
    reads = [[KeysRead() for _ in range(case.num_layers)] for _ in range(case.num_tokens)]
    for traced in passes:
        result = run_forward(subject, with_tracers(inputs, traced), execution, device)
        _add(reads, result)
    return _told(case, reads, {key for traced in passes for key in traced})


def _add(reads: list[list[KeysRead]], result: ForwardResult) -> None:
    inputs = result.pool_state.inputs
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


def _told(case: Case, reads: list[list[KeysRead]], traced: set[tuple[int, int]]) -> str:
    queries = [(i, j) for i, count in enumerate(case.q_lens) for j in range(count)]
    wrong = []
    for (i, j), layers in zip(queries, reads, strict=True):
        position = case.prefix_lens[i] + j
        for layer, read in enumerate(layers):
            windowed = case.window_left >= 0 and layer % 2
            first = max(0, position - case.window_left) if windowed else 0
            due = {(i, t) for t in range(first, position + 1)} & traced
            if faults := _faults(read, i, due, first, position):
                own = _spans(t for request, t in read.keys if request == i)
                wrong.append(
                    f"query {j} of request {i} (position {position}, layer {layer}) read keys "
                    f"{own}, expected {_spans(t for _, t in due)}: {', '.join(faults)}"
                )
    if not wrong:
        return "every query read the keys that it should: a value, weight, scale or row is wrong"
    more = f" ({len(wrong) - 1} more like it)" if len(wrong) > 1 else ""
    return wrong[0] + more


def _faults(
    read: KeysRead, request: int, due: set[tuple[int, int]], first: int, position: int
) -> list[str]:
    own = {t for i, t in read.keys if i == request}
    counts = {
        "of the future": sum(t > position for t in own),
        "left of the window": sum(t < first for t in own),
        "missed": len(due - read.keys),
    }
    faults = [f"{n} {'key' if n == 1 else 'keys'} {what}" for what, n in counts.items() if n]
    foreign = sorted({i for i, _ in read.keys} - {request})
    faults += [f"keys {_spans(t for i, t in read.keys if i == j)} of request {j}" for j in foreign]
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
