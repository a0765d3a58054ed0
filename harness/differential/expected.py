"""Expected results of a case: the oracle's, and those of a plain dense implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from harness.core.case import Case, Execution, KVDtype, Mode
from harness.core.numerics import PLAIN, Numerics
from harness.differential.dense import Cast, DenseRows, cast_by_layer, dense_rows, uncast
from harness.differential.input_types import ProbeWeights, TrialInputs
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


class DenseProblem(NamedTuple):
    """What the oracle is asked; equal to a problem of the very same tensors.

    A tuple asks first whether its elements are the same; a dataclass no longer does in Python 3.13.

    Args:
        case, weights, history, new_tokens, hidden_in: as in ``TrialInputs`` and ``BatchInputs``.
        fed_tokens: per request, what a multi-step draft fed itself; None elsewhere.
        rounds_query: whether the query is rounded to FP8 in the plain implementation,
        asks_rounded: and in the oracle, too.
        rounds_weights: whether the plain implementation rounds softmax weights to FP8.
        attends_new_keys: whether new keys and values are not those of an FP8 cache.
        device: that computes.
    """

    case: Case
    weights: ProbeWeights
    history: tuple[torch.Tensor, ...]
    new_tokens: tuple[torch.Tensor, ...]
    hidden_in: torch.Tensor | None
    fed_tokens: tuple[tuple[int, ...], ...] | None
    rounds_query: bool
    asks_rounded: bool
    rounds_weights: bool
    attends_new_keys: bool
    device: torch.device


def expect(
    inputs: TrialInputs,
    *,
    fed_tokens: torch.Tensor | None = None,
    numerics: Numerics = PLAIN,
    execution: Execution = Execution.EAGER,
    device: torch.device | str = "cpu",
) -> Expected:
    """Expected results of the tested batch, from its dense problem alone.

    Trials of a row that ask the same share the answer; nobody writes to it.

    Args:
        inputs: weights and requests.
        fed_tokens: [bs, num_steps - 1] int64, tokens that a multi-step draft really fed itself, so
            that one near-tie does not change everything after it; its choices are judged apart.
        numerics: of the kernel; the oracle is asked for what remains after its roundings.
        execution: of the forward.
        device: that computes, in float64 everywhere; the results are on the host.
    """
    return _expected(_problem(inputs, fed_tokens, numerics, execution, torch.device(device)))


def expect_exactly(inputs: TrialInputs, *, fed_tokens: torch.Tensor | None = None) -> Answer:
    """The oracle's answer of ``expect``, alone: of a kernel that rounds nothing but its cache.

    Args:
        inputs: weights and requests.
        fed_tokens: as of ``expect``.
    """
    problem = _problem(inputs, fed_tokens, PLAIN, Execution.EAGER, torch.device("cpu"))
    rows = [_rows(problem, i) for i in range(problem.case.bs)]
    return _answer(problem, rows, attend, torch.float64)


def _problem(
    inputs: TrialInputs,
    fed_tokens: torch.Tensor | None,
    numerics: Numerics,
    execution: Execution,
    device: torch.device,
) -> DenseProblem:
    case, batch, numerics = inputs.case, inputs.tested, numerics.of(inputs.case)
    rounds_query = case.mode in numerics.rounds_query
    return DenseProblem(
        case=case,
        weights=inputs.weights,
        history=batch.history,
        new_tokens=batch.new_tokens,
        hidden_in=batch.hidden_in,
        fed_tokens=None if fed_tokens is None else tuple(map(tuple, fed_tokens.tolist())),
        rounds_query=rounds_query,
        asks_rounded=rounds_query and case.mode not in numerics.scales_query,
        rounds_weights=case.mode in numerics.rounds_weights,
        attends_new_keys=(case.mode, execution) in numerics.attends_new_keys,
        device=device,
    )


# Kernels over an FP8 cache round in two ways; otherwise every trial of a row asks the same.
@lru_cache(maxsize=2)
def _expected(problem: DenseProblem) -> Expected:
    problem = problem._replace(weights=problem.weights.to(problem.device))
    case = problem.case
    plain = rounded = [_rows(problem, i) for i in range(case.bs)]
    if problem.rounds_query:
        rounded = [replace(rows, q=quantize_dequantize(rows.q, 1.0)) for rows in plain]
    asked = rounded if problem.asks_rounded else plain
    new = [_tail(rows, n) for rows, n in zip(plain, case.q_lens, strict=True)]
    new = new or [_tail(_rows_of_nothing(problem), 0)]
    if problem.attends_new_keys:
        exact = [_exact_rows(problem, i) for i in range(case.bs)]
        rounded, asked = (
            [_with_tail(*of_request) for of_request in zip(rows, exact, case.q_lens, strict=True)]
            for rows in (rounded, asked)
        )
    dtype = getattr(torch, case.dtype)
    weights_dtype = torch.float8_e4m3fn if problem.rounds_weights else dtype
    attend_plainly = partial(low_precision_attend, dtype=dtype, weights_dtype=weights_dtype)
    oracle = _answer(problem, asked, attend, torch.float64)
    reference = _answer(problem, rounded, attend_plainly, dtype)
    unrounded = oracle if asked is plain else _answer(problem, plain, attend, torch.float64)
    return Expected(
        oracle=oracle,
        reference=reference,
        unrounded=unrounded,
        keys=torch.cat([k for k, _ in new], 1).double().cpu(),
        values=torch.cat([v for _, v in new], 1).double().cpu(),
    )


def _rows_of_nothing(problem: DenseProblem) -> DenseRows:
    nothing = torch.empty(0, dtype=torch.int64, device=problem.device)
    return dense_rows(problem.weights, problem.case, nothing, nothing, queries=0)


def _rows(problem: DenseProblem, i: int) -> DenseRows:
    """The rows of a request as the cache gives them back."""
    return _exact_rows(problem, i, _from_cache if problem.case.kv_dtype is KVDtype.FP8 else uncast)


def _from_cache(rows: torch.Tensor, scales: Sequence[float]) -> torch.Tensor:
    """Rows [L, n, …] after a round trip through an FP8 cache with a scale a layer, float64."""
    return cast_by_layer(rows, scales, torch.float64, quantize_dequantize)


def _exact_rows(problem: DenseProblem, i: int, cast: Cast = uncast) -> DenseRows:
    """The rows of a request before anything is cast to FP8, or with a ``cast`` of the cache's."""
    new, fed = problem.new_tokens[i], problem.fed_tokens
    if fed is not None:
        new = torch.tensor(fed[i], dtype=torch.int64)
    tokens = torch.cat((problem.history[i], new)).to(problem.device)
    positions = torch.arange(len(tokens), device=tokens.device)
    queries = problem.case.q_lens[i]
    return dense_rows(problem.weights, problem.case, tokens, positions, queries, cast)


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
    problem: DenseProblem, requests: list[DenseRows], attention: Attend, dtype: torch.dtype
) -> Answer:
    case, weights = problem.case, problem.weights
    hidden = [weights.lm_head.new_empty(0, weights.hidden_size, dtype=dtype)]
    for rows in requests:
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
    states = _with_incoming(torch.cat(hidden), problem, dtype)
    head = weights.lm_head.double() if dtype == torch.float64 else weights.lm_head
    logits = states.to(head.dtype) @ head
    return Answer(hidden_states=states.cpu(), logits=logits.cpu())


def _with_incoming(
    attended: torch.Tensor, problem: DenseProblem, dtype: torch.dtype
) -> torch.Tensor:
    """Add half the hidden state before each query token; a multi-step draft feeds its own on."""
    if problem.hidden_in is None:
        return attended
    incoming = problem.hidden_in.to(attended.device, dtype)
    if problem.case.mode is not Mode.MULTI_STEP_DRAFT:
        return attended + incoming * 0.5
    chained = []
    for step in attended.unflatten(0, (problem.case.bs, -1)).unbind(1):
        incoming = step + incoming * 0.5
        chained.append(incoming)
    return torch.stack(chained, 1).flatten(0, 1)
