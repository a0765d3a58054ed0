"""Watched keys: a world whose attention outputs name the keys that were read.

Queries are zero, so every key weighs the same, and a token's value is loud in one column of its
own: a column is zero exactly where no key of that token was read. Every watched position has its
own token; slots nobody owns, the padding page, and batches that ran before have one each.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from harness.core.case import Case, Family, Inputs, KVDtype, Mode
from harness.differential.inputs import BatchInputs, ProbeWeights, TrialInputs
from harness.differential.inputs import make_trial_inputs as make_random_inputs
from harness.differential.key_tracers import TracerReading, read_watch, watch

# Tokens; the first has no column.
SILENT, DRAFTED, DECOY, UNOWNED, PADDING, FIRST_TRACED = range(6)


def make_trial_inputs(*cases: Case) -> TrialInputs:
    """A world of one geometry; the first case's inputs decide of what kind."""
    inputs = make_random_inputs(*cases)
    if cases[0].inputs is Inputs.TRACED and cases[0].bs:
        return with_tracers(inputs, by_distance_from_the_end(cases[0])[: capacity(cases[0])])
    return inputs


def by_distance_from_the_end(case: Case) -> list[tuple[int, int]]:
    """Every (request, position) that a forward may read, the last of each request first."""
    lens = case.total_lens
    if case.mode is Mode.MULTI_STEP_DRAFT:
        # What is drafted after the first token is the draft's own choice.
        lens = tuple(prefix + 1 for prefix in case.prefix_lens)
    keys = [(i, t) for i, total in enumerate(lens) for t in range(total)]
    return sorted(keys, key=lambda key: (lens[key[0]] - key[1], key[0]))


def capacity(case: Case) -> int:
    """Positions that one world can watch."""
    return _columns(case) - FIRST_TRACED + 1


def with_tracers(inputs: TrialInputs, keys: list[tuple[int, int]]) -> TrialInputs:
    """The world with its layouts and lengths, watching these (request, position)."""
    first = inputs.batches[0]
    tokens = {key: FIRST_TRACED + i for i, key in enumerate(keys)}
    return replace(
        inputs,
        weights=_weights(first.case, inputs.weights),
        batches=(_told(first, tokens), *(_told(other, None) for other in inputs.batches[1:])),
        traced=tuple(keys),
    )


def tokens_read(inputs: TrialInputs, hidden_states: torch.Tensor) -> list[list[TracerReading]]:
    """What each query read in each layer, as tokens: ``hidden_states`` [T, L * heads * value dim].

    A multi-step draft's are taken after what it fed on is subtracted.
    """
    case = inputs.batches[0].case
    kv_heads, dim = _value_shape(case)
    tokens = range(DRAFTED, 1 + _columns(case))
    rows = hidden_states.cpu().unflatten(1, (case.num_layers, -1, dim))
    return [[read_watch(layer, tokens, kv_heads) for layer in row] for row in rows]


def tracer_row(inputs: TrialInputs, buffer: str, token: int) -> torch.Tensor:
    """What a slot of a cache buffer holds to show as ``token``: float32, shaped like the slot."""
    case, weights = inputs.batches[0].case, inputs.weights
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


def _weights(case: Case, drawn: ProbeWeights) -> ProbeWeights:
    mla = case.family is Family.MLA
    kv_heads, dim = _value_shape(case)
    columns = _columns(case)
    shape = {"heads": case.num_q_heads, "kv_heads": kv_heads, "dim": dim, "v_dim": dim}
    every = range(DRAFTED, 1 + columns)
    probe = watch(every, total=1 + columns, q_len=1 + columns, latent=mla, **shape)
    # In an FP8 cache a column holds the same power of two whatever the scale.
    scale = 1.0
    if case.kv_dtype is KVDtype.FP8:
        scale = case.k_scale if mla else case.v_scale
    k, v = probe.k * scale, probe.v * scale

    def layers(table: torch.Tensor) -> torch.Tensor:
        return table.expand(case.num_layers, *table.shape).clone()

    # Whatever a draft read, its choice is the same.
    lm_head = torch.zeros(drawn.hidden_size, 1 + columns)
    lm_head[:, DRAFTED] = drawn.hidden_size**-0.5
    rope = torch.zeros(1 + columns, case.num_q_heads, case.qk_rope_head_dim)
    return ProbeWeights(
        q=layers(probe.q),
        k=layers(k),
        v=None if mla else layers(v),
        q_rope=layers(rope) if mla else None,
        k_rope=layers(rope[:, :1]) if mla else None,
        sinks=None if drawn.sinks is None else torch.zeros_like(drawn.sinks),
        lm_head=lm_head,
        scaling=drawn.scaling,
    )


def _told(requests: BatchInputs, tokens: dict[tuple[int, int], int] | None) -> BatchInputs:
    """The requests with every token renamed; ``tokens`` of None are those of another batch."""
    case = requests.case

    def named(i: int, start: int, stop: int) -> torch.Tensor:
        if tokens is None:
            return torch.full((stop - start,), DECOY)
        return torch.tensor([tokens.get((i, t), SILENT) for t in range(start, stop)]).long()

    ends = zip(case.prefix_lens, case.total_lens, strict=True)
    history, new_tokens = [], []
    for i, (prefix, total) in enumerate(ends):
        history.append(named(i, 0, prefix))
        new_tokens.append(named(i, prefix, total))
    hidden = requests.hidden_in
    return replace(
        requests,
        history=tuple(history),
        new_tokens=tuple(new_tokens),
        hidden_in=None if hidden is None else torch.zeros_like(hidden),
    )
