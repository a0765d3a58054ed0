"""Expected results of a case: the oracle's, and those of a plain dense implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from harness.core.case import Case, Execution, Family, KVDtype, Mode
from harness.core.numerics import PLAIN, Numerics
from harness.differential.dense import DenseRows, dense_rows
from harness.differential.input_types import BatchInputs, TrialInputs
from harness.oracle import attend, low_precision_attend, quantize_dequantize

Attend = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Answer:
    """T query tokens, request after request; a multi-step draft has num_steps - 1 per request.

    Args:
        hidden_states: [T, hidden].
        logits: [T, V].
    """

    hidden_states: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True)
class Expected:
    """Expected outputs, and expected cache rows of the new tokens.

    Args:
        oracle: float64.
        reference: the same at the case's dtype; its error is the measure of the budget.
        unrounded: the oracle's, were nothing rounded but the cache: what goldens keep.
        keys: [L, T, kv heads, qk dim] float64, contents of the cache after dequantization.
        values: [L, T, kv heads, value dim] float64.
    """

    oracle: Answer
    reference: Answer
    unrounded: Answer
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def rounding(self) -> Answer:
        """What the plain implementation is off from the oracle of the unrounded problem."""
        plain, exact = self.reference, self.unrounded
        return Answer(
            hidden_states=plain.hidden_states.double() - exact.hidden_states,
            logits=plain.logits.double() - exact.logits,
        )


def expect(
    inputs: TrialInputs,
    *,
    fed_tokens: torch.Tensor | None = None,
    numerics: Numerics = PLAIN,
    execution: Execution = Execution.EAGER,
    device: torch.device | str = "cpu",
) -> Expected:
    """Expected results of the tested batch, from its dense problem alone.

    Args:
        inputs: weights and requests.
        fed_tokens: [bs, num_steps - 1] int64, tokens that a multi-step draft really fed itself, so
            that one near-tie does not change everything after it; its choices are judged apart.
        numerics: of the kernel; the oracle is asked for what remains after its roundings.
        execution: of the forward.
        device: that computes, in float64 everywhere; the results are on the host.
    """
    inputs = replace(inputs, weights=inputs.weights.to(device))
    case = inputs.case
    plain = rounded = [_problem(inputs, i, fed_tokens) for i in range(case.bs)]
    if case.mode in numerics.rounds_query and case.kv_dtype is KVDtype.FP8:
        rounded = [replace(rows, q=quantize_dequantize(rows.q, 1.0)) for rows in plain]
    problems = plain if case.mode in numerics.scales_query else rounded
    new = [_tail(rows, n) for rows, n in zip(plain, case.q_lens, strict=True)]
    if (case.mode, execution) in numerics.attends_new_keys:
        exact = [_exact_rows(inputs, i) for i in range(case.bs)]
        rounded = problems = [
            _with_tail(rows, own, n)
            for rows, own, n in zip(problems, exact, case.q_lens, strict=True)
        ]
    dtype = getattr(torch, case.dtype)
    rounds_weights = case.mode in numerics.rounds_weights and case.kv_dtype is KVDtype.FP8
    weights_dtype = torch.float8_e4m3fn if rounds_weights else dtype
    attend_plainly = partial(low_precision_attend, dtype=dtype, weights_dtype=weights_dtype)
    oracle = _answer(inputs, problems, attend, torch.float64)
    reference = _answer(inputs, rounded, attend_plainly, dtype)
    unrounded = oracle if problems is plain else _answer(inputs, plain, attend, torch.float64)
    empty = [_tail(_problem_of_nothing(inputs, case), 0)]
    return Expected(
        oracle=oracle,
        reference=reference,
        unrounded=unrounded,
        keys=torch.cat([k for k, _ in new or empty], 1).cpu(),
        values=torch.cat([v for _, v in new or empty], 1).cpu(),
    )


def _problem_of_nothing(inputs: TrialInputs, case: Case) -> DenseRows:
    nothing = torch.empty(0, dtype=torch.int64, device=inputs.weights.k.device)
    return dense_rows(inputs.weights, case, nothing, nothing, queries=0)


def _problem(inputs: TrialInputs, i: int, fed_tokens: torch.Tensor | None) -> DenseRows:
    case = inputs.case
    rows = _exact_rows(inputs, i, fed_tokens)
    if case.kv_dtype is not KVDtype.FP8:
        return rows
    # The latent of MLA is key and value at once, so it has the key's scale.
    v_scale = case.k_scale if case.family is Family.MLA else case.v_scale
    return DenseRows(
        q=rows.q,
        k=quantize_dequantize(rows.k, case.k_scale),
        v=quantize_dequantize(rows.v, v_scale),
    )


def _exact_rows(inputs: TrialInputs, i: int, fed_tokens: torch.Tensor | None = None) -> DenseRows:
    """The rows of a request before anything is cast to FP8."""
    case, batch = inputs.case, inputs.tested
    new = batch.new_tokens[i] if fed_tokens is None else fed_tokens[i].cpu()
    tokens = torch.cat((batch.history[i], new)).to(inputs.weights.k.device)
    positions = torch.arange(len(tokens), device=tokens.device)
    return dense_rows(inputs.weights, case, tokens, positions, queries=case.q_lens[i])


def _with_tail(rows: DenseRows, own: DenseRows, n: int) -> DenseRows:
    """The rows with the last n keys and values of ``own``."""
    start = rows.k.shape[1] - n
    k, v = (
        torch.cat((old[:, :start], new[:, start:]), 1)
        for old, new in ((rows.k, own.k), (rows.v, own.v))
    )
    return DenseRows(q=rows.q, k=k, v=v)


def _tail(rows: DenseRows, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    start = rows.k.shape[1] - n
    return rows.k[:, start:], rows.v[:, start:]


def _window(case: Case, layer: int) -> int:
    """Layers alternate between full and windowed."""
    return case.window_left if layer % 2 else -1


def _answer(
    inputs: TrialInputs, problems: list[DenseRows], attention: Attend, dtype: torch.dtype
) -> Answer:
    case, weights = inputs.case, inputs.weights
    hidden = [weights.lm_head.new_empty(0, weights.hidden_size, dtype=dtype)]
    for rows in problems:
        outputs = [
            attention(
                rows.q[layer],
                rows.k[layer],
                rows.v[layer],
                prefix_len=rows.k.shape[1] - rows.q.shape[1],
                scale=weights.scaling,
                window_left=_window(case, layer),
                sinks=None if weights.sinks is None else weights.sinks[layer],
            ).flatten(1)
            for layer in range(case.num_layers)
        ]
        hidden.append(torch.cat(outputs, -1))
    states = _with_incoming(torch.cat(hidden), inputs.tested, dtype)
    head = weights.lm_head.double() if dtype == torch.float64 else weights.lm_head
    logits = states.to(head.dtype) @ head
    return Answer(hidden_states=states.cpu(), logits=logits.cpu())


def _with_incoming(attended: torch.Tensor, batch: BatchInputs, dtype: torch.dtype) -> torch.Tensor:
    """Add half the hidden state before each query token; a multi-step draft feeds its own on."""
    if batch.hidden_in is None:
        return attended
    incoming = batch.hidden_in.to(attended.device, dtype)
    if batch.case.mode is not Mode.MULTI_STEP_DRAFT:
        return attended + incoming * 0.5
    chained = []
    for step in attended.unflatten(0, (batch.case.bs, -1)).unbind(1):
        incoming = step + incoming * 0.5
        chained.append(incoming)
    return torch.stack(chained, 1).flatten(0, 1)
