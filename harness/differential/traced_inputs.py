"""Traced inputs: attention outputs name the keys that were read.

Queries are zero, so every key weighs the same, and a token's value is non-zero in one column of
its own: a column is zero exactly where no key of that token was read. Every traced position has
its own token; slots nobody owns, the padding page, and the decoys have one each.

Weighted ones have scores of -0 … -7 times the logarithm of 2: softmax weights are powers of two,
which FP8 rounds no further, and values grow as the weights shrink, so that every column is alike.
An FP8 kernel's answer is then nearly exact, and 1 % of a scale moves it by several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from harness.core.case import Case, Family, Inputs, KVDtype, Mode
from harness.differential.input_types import BatchInputs, ProbeWeights, TrialInputs
from harness.differential.key_tracers import TracerReading, make_tracer, read_tracer
from harness.differential.probe_model import rotate

# Tokens; the first has no column.
SILENT, DRAFTED, DECOY, UNOWNED, PADDING, FIRST_TRACED = range(6)
LEVELS = 8
"""Different softmax weights of weighted inputs: 1, 1/2, 1/4, …"""


def by_distance_from_the_end(case: Case) -> list[tuple[int, int]]:
    """Every (request, position) that a forward may read, the last of each request first."""
    lens = case.total_lens
    if case.mode is Mode.MULTI_STEP_DRAFT:
        # Tokens after the first are the draft's own choice.
        lens = tuple(prefix + 1 for prefix in case.prefix_lens)
    keys = [(i, t) for i, total in enumerate(lens) for t in range(total)]
    return sorted(keys, key=lambda key: (lens[key[0]] - key[1], key[0]))


def capacity(case: Case) -> int:
    """Positions that one forward can trace."""
    return _columns(case) - FIRST_TRACED + 1


def with_tracers(inputs: TrialInputs, keys: list[tuple[int, int]]) -> TrialInputs:
    """The inputs with their layouts and lengths, tracing these (request, position)."""
    tokens = {key: FIRST_TRACED + i for i, key in enumerate(keys)}
    return replace(
        inputs,
        weights=_weights(inputs.case, inputs.weights, keys),
        tested=_retokenized(inputs.tested, tokens),
        decoys=tuple(_retokenized(decoy, None) for decoy in inputs.decoys),
        traced=tuple(keys),
    )


def tokens_read(inputs: TrialInputs, hidden_states: torch.Tensor) -> list[list[TracerReading]]:
    """Tokens that each query read in each layer.

    Args:
        inputs: traced ones.
        hidden_states: [T, L * heads * value dim]; of a multi-step draft, less what each step was
            fed.
    """
    case = inputs.case
    kv_heads, dim = _value_shape(case)
    tokens = range(DRAFTED, 1 + _columns(case))
    rows = hidden_states.cpu().unflatten(1, (case.num_layers, -1, dim))
    return [[read_tracer(layer, tokens, kv_heads) for layer in row] for row in rows]


def tracer_row(inputs: TrialInputs, buffer: str, token: int) -> torch.Tensor:
    """The row of a cache buffer that reads as ``token``: float32, shaped like a slot."""
    case, weights = inputs.case, inputs.weights
    if case.family is Family.MLA:
        return (
            torch.cat((weights.k[0, token, 0], torch.zeros(case.qk_rope_head_dim))) / case.k_scale
        )
    assert weights.v is not None
    is_key = buffer.rpartition(".")[2].startswith("k")
    return torch.ones_like(weights.k[0, token]) if is_key else weights.v[0, token] / case.v_scale


def _value_shape(case: Case) -> tuple[int, int]:
    if case.family is Family.MLA:
        return 1, case.kv_lora_rank
    return case.num_kv_heads, case.head_dim


def _columns(case: Case) -> int:
    kv_heads, dim = _value_shape(case)
    return kv_heads * dim


def _weights(case: Case, drawn: ProbeWeights, keys: Sequence[tuple[int, int]]) -> ProbeWeights:
    mla = case.family is Family.MLA
    kv_heads, dim = _value_shape(case)
    columns = _columns(case)
    shape = {"heads": case.num_q_heads, "kv_heads": kv_heads, "dim": dim, "v_dim": dim}
    tokens = range(DRAFTED, 1 + columns)
    tracer = make_tracer(tokens, total=1 + columns, q_len=1 + columns, **shape)
    # In an FP8 cache a column holds the same power of two whatever the scale.
    is_fp8 = case.kv_dtype is KVDtype.FP8
    scales = case.kv_scales if is_fp8 else ((1.0, 1.0),) * case.num_layers
    v = torch.stack([tracer.v * (k_scale if mla else v_scale) for k_scale, v_scale in scales])
    rotated = case.qk_rope_head_dim if mla else dim
    q, k = (torch.zeros(1 + columns, n, rotated) for n in (case.num_q_heads, kv_heads))
    if case.inputs is Inputs.WEIGHTED:
        v *= 2.0 ** (_levels(columns) - LEVELS + 1)[:, None, None]
        query, key = _scored(columns, rotated, [position for _, position in keys])
        q += query
        k += key * scales[0][0]

    def layers(table: torch.Tensor) -> torch.Tensor:
        return table.expand(case.num_layers, *table.shape).clone()

    # Whatever a draft read, its choice is the same.
    lm_head = torch.zeros(drawn.hidden_size, 1 + columns)
    lm_head[:, DRAFTED] = drawn.hidden_size**-0.5
    return ProbeWeights(
        q=layers(tracer.q if mla else q),
        k=v if mla else layers(k),
        v=None if mla else v,
        q_rope=layers(q) if mla else None,
        k_rope=layers(k) if mla else None,
        sinks=None if drawn.sinks is None else torch.zeros_like(drawn.sinks),
        lm_head=lm_head,
        scaling=drawn.scaling,
    )


def _levels(columns: int) -> torch.Tensor:
    """[1 + columns] float32, of every token: its weight is 2 ** -level."""
    token = torch.arange(1 + columns)
    return torch.where(token < FIRST_TRACED, 0, token % LEVELS).float()


def _scored(columns: int, dim: int, positions: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key of every token, [1 + columns, 1, dim]: their product is minus the key's level.

    A traced token has one position, so that its rotation is undone beforehand. The query and the
    key of any other are zero.
    """
    traced = torch.arange(1 + columns)[:, None] >= FIRST_TRACED
    # One element of every pair that a rotation turns: of half of the pairs the first.
    half = dim // 2
    used = torch.zeros(dim)
    used[: half // 2] = used[half + half // 2 :] = 1.0
    query = used * traced
    key = query * -_levels(columns)[:, None] / half
    at = torch.zeros(1 + columns, dtype=torch.int64)
    at[FIRST_TRACED : FIRST_TRACED + len(positions)] = torch.tensor(positions)
    return rotate(query[:, None], -at), rotate(key[:, None], -at)


def _retokenized(batch: BatchInputs, tokens: dict[tuple[int, int], int] | None) -> BatchInputs:
    """The batch with the token of every position; a decoy's (``tokens`` is None) is always one."""
    case = batch.case

    def named(i: int, start: int, stop: int) -> torch.Tensor:
        if tokens is None:
            return torch.full((stop - start,), DECOY)
        return torch.tensor([tokens.get((i, t), SILENT) for t in range(start, stop)]).long()

    ends = zip(case.prefix_lens, case.total_lens, strict=True)
    history, new_tokens = [], []
    for i, (prefix, total) in enumerate(ends):
        history.append(named(i, 0, prefix))
        new_tokens.append(named(i, prefix, total))
    hidden = batch.hidden_in
    return replace(
        batch,
        history=tuple(history),
        new_tokens=tuple(new_tokens),
        hidden_in=None if hidden is None else torch.zeros_like(hidden),
    )
