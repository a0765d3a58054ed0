"""Comparison of a forward with the oracle: numbers, choices, metadata, every slot of the cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from harness.core.case import Case, Execution, Family, Mode
from harness.core.conventions import OURS, Conventions
from harness.core.numerics import Numerics
from harness.core.record import Verdict
from harness.core.tolerance import Budget, budget, tie_margin
from harness.differential.compare import Comparison, compare
from harness.differential.expected import Answer, Expected, expect
from harness.differential.forward import ForwardResult
from harness.differential.golden import Golden, judge_by_golden
from harness.differential.input_types import BatchInputs
from harness.differential.invariants import check_metadata, check_writes
from harness.differential.invariants.memory import check_semaphores
from harness.differential.pool_state import PoolState
from harness.kernels.workspace import Workspace
from harness.upstream.forward_batch_info import DraftOutput, LogitsProcessorOutput

# The graph takes a float32 softmax of logits that it also hands out. Against float64 it was off by
# at most 8e-8 over 124 rows of each dtype; logits rounded to float16 first move it by up to 9e-5.
TOPK_P_ERROR = 1e-6
# An answer of another shape or dtype, or without numbers, cannot be compared with a golden.
COMPARABLE = {Verdict.PASSED, Verdict.WRONG_NUMBERS}


def judge(
    result: ForwardResult,
    execution: Execution,
    numerics: Numerics,
    workspaces: Sequence[Workspace],
    conventions: Conventions = OURS,
    golden: Golden | None = None,
) -> list[Comparison]:
    """Every comparison of a forward, invariants first: they name the cause. Operations come last.

    Args:
        result: of the subject.
        execution: how it ran.
        numerics: of its kernel.
        workspaces: of its kernel; their semaphores must be clean.
        conventions: of its backend.
        golden: of the row, where one is recorded.
    """
    inputs, case, batch = result.inputs, result.inputs.case, result.inputs.tested
    violations = [*check_semaphores(workspaces), *_violations(result, execution, conventions)]
    comparisons = [_broken(line) for line in violations]
    operations = [_broken(line) for line in result.operations]
    fed = None
    if isinstance(result.output, DraftOutput):
        drafted, due = result.output.draft_tokens, (case.bs, case.num_steps)
        if drafted.shape != due:
            # What it fed itself is not known, and its answer is one to that.
            return [*comparisons, _misshapen("draft_tokens", drafted, due), *operations]
        fed = drafted[:, :-1]
    expected = expect(
        inputs,
        fed_tokens=fed,
        numerics=numerics,
        execution=execution,
        device=result.pool_state.device,
    )
    obtained, factor = _answer(result), numerics.budget(case, execution)
    numbers = list(_numbers(obtained, expected, batch, factor))
    comparisons += numbers
    comparisons += _cache(result.pool_state, expected)
    if isinstance(result.output, DraftOutput):
        tie = tie_margin(case.dtype)
        if case.mode in numerics.of(case).scales_query:
            # Rounds the query so coarsely that two logits within their budgets may change places.
            tie = max(tie, 2 * next(c.allowed for c in comparisons if c.quantity == "logits"))
        comparisons.append(_draft_tokens(result.output, batch, expected, tie))
    elif execution is Execution.GRAPH and case.mode is Mode.DRAFT_EXTEND:
        comparisons.append(_topk(result.output, case, expected))
    if golden is not None and {c.verdict for c in numbers} <= COMPARABLE:
        comparisons += judge_by_golden(
            golden,
            obtained,
            expected.rounding,
            fed,
            _budgets(case, factor),
            _rows(batch),
            oracle_agrees=all(comparison.passed for comparison in numbers),
        )
    return comparisons + operations


def _broken(line: str) -> Comparison:
    return _red("invariant", Verdict.BROKEN_INVARIANT, line)


def _misshapen(quantity: str, obtained: torch.Tensor, due: tuple[int, ...]) -> Comparison:
    message = f"{quantity}: obtained shape {list(obtained.shape)}, expected {list(due)}"
    return _red(quantity, Verdict.WRONG_SHAPE, message)


def _red(quantity: str, verdict: Verdict, message: str) -> Comparison:
    return Comparison(quantity=quantity, verdict=verdict, error=torch.inf, message=message)


def _answer(result: ForwardResult) -> Answer:
    hidden, logits = result.output.hidden_states, result.output.next_token_logits
    if isinstance(result.output, DraftOutput):
        hidden, logits = hidden.flatten(0, 1), logits.flatten(0, 1)
    return Answer(hidden_states=hidden, logits=logits)


def _budgets(case: Case, factor: float) -> dict[str, Budget]:
    names = ("hidden_states", "logits")
    return {name: budget(name, case.dtype, case.kv_dtype).times(factor) for name in names}


def _numbers(
    obtained: Answer, expected: Expected, batch: BatchInputs, factor: float
) -> Iterable[Comparison]:
    for name, allowed in _budgets(batch.case, factor).items():
        own, exact, plain = (
            getattr(answer, name) for answer in (obtained, expected.oracle, expected.reference)
        )
        yield compare(name, own, exact, plain, allowed, _rows(batch))


def _rows(batch: BatchInputs) -> list[str]:
    """Request, position and page of every query token."""
    case, size = batch.case, batch.case.page_size
    return [
        f"request {i}, position {t} (page {batch.pages[i][t // size]})"
        for i in range(case.bs)
        for t in range(case.prefix_lens[i], case.total_lens[i])
    ]


def _cache(pool_state: PoolState, expected: Expected) -> Iterable[Comparison]:
    """Cache rows of the new tokens, dequantized, layer by layer."""
    case, batch = pool_state.case, pool_state.inputs.tested
    slots = torch.tensor([slot for own in batch.new_slots for slot in own], dtype=torch.int64)
    allowed = budget("kv_cache", case.dtype, case.kv_dtype)
    dtype = getattr(torch, case.dtype)
    for layer in range(case.num_layers):
        keys, values = pool_state.rows(layer, slots)
        k_scale, v_scale = case.kv_scales[layer]
        pairs = [("key", keys, expected.keys, k_scale)]
        if values is not None:
            pairs.append(("value", values, expected.values, v_scale))
        for name, obtained, exact, scale in pairs:
            if obtained.element_size() == 1:
                obtained = (obtained.to(torch.float32) * scale).to(dtype)
            yield compare(
                f"kv_cache.{name}{layer}",
                obtained.flatten(1),
                exact[layer].flatten(1),
                exact[layer].to(dtype).flatten(1),
                allowed,
                _rows(batch),
            )


def _violations(result: ForwardResult, execution: Execution, conventions: Conventions) -> list[str]:
    """Broken invariants of the execution, of the written slots, and of the metadata."""
    lines = [*result.violations, *_wrong_writes(result)]
    if result.inputs.case.mode is not Mode.IDLE:
        for step in range(len(result.plans)):
            lines += _wrong_metadata(result, step, execution, conventions)
    return lines


def _wrong_writes(result: ForwardResult) -> list[str]:
    inputs, page_size = result.inputs, result.inputs.case.page_size
    full = {slot for own in inputs.tested.new_slots for slot in own}
    swa = set() if inputs.swa_page_of is None else set(inputs.swa_slots(sorted(full)))
    written = {name: swa if name.startswith("swa.") else full for name in result.before}
    return check_writes(result.before, result.pool_state.buffers(), written, page_size)


def _wrong_metadata(
    result: ForwardResult, step: int, execution: Execution, conventions: Conventions
) -> list[str]:
    inputs, case, bucket = result.inputs, result.inputs.case, result.bucket
    pages = [list(own) for own in inputs.tested.pages]
    mapping = inputs.swa_page_of
    prefix_lens, q_lens = planned_lens(case, step, bucket, execution)
    is_replayed_draft = case.mode is Mode.MULTI_STEP_DRAFT and execution is Execution.GRAPH
    shares_table = conventions.shares_draft_table and is_replayed_draft
    is_ragged = case.mode is Mode.DRAFT_EXTEND
    return check_metadata(
        result.plans[step],
        prefix_lens=prefix_lens,
        q_lens=q_lens,
        pages=pages,
        page_size=case.page_size,
        num_pages=inputs.num_pages,
        swa_pages=None if mapping is None else [[mapping[p] for p in own] for own in pages],
        num_swa_pages=inputs.num_swa_pages,
        table_headroom=len(result.plans) - 1 - step if shares_table else 0,
        packed_q_lens=[*case.q_lens, *[1] * (bucket - case.bs)] if is_ragged else None,
        conventions=conventions,
    )


def planned_lens(
    case: Case, step: int, bucket: int, execution: Execution
) -> tuple[list[int], list[int]]:
    """Keys before the first query and query tokens of every planned row, padded rows included."""
    padded = bucket - case.bs
    prefix, q_lens = list(case.prefix_lens), list(case.q_lens)
    width = case.num_draft_tokens
    match case.mode:
        case Mode.MULTI_STEP_DRAFT:
            return [p + step for p in prefix] + [1 + step] * padded, [1] * bucket
        case Mode.TARGET_VERIFY:
            return prefix + [1] * padded, [width] * bucket
        case Mode.DRAFT_EXTEND_V2:
            return prefix + [0] * padded, [width] * bucket
        case Mode.DRAFT_EXTEND if case.family is Family.MLA:
            longest = width if execution is Execution.GRAPH else max(q_lens)
            return prefix + [0] * padded, [longest] * bucket
        case _:
            return prefix + [0] * padded, q_lens + [1] * padded


def _draft_tokens(
    output: DraftOutput, batch: BatchInputs, expected: Expected, tie: float
) -> Comparison:
    """The first token is the given one; each other is the oracle's choice after the ones before."""
    given = torch.stack([tokens[0] for tokens in batch.new_tokens])
    drafted = output.draft_tokens.cpu()
    if not torch.equal(drafted[:, 0], given):
        message = f"draft_tokens: first tokens {drafted[:, 0].tolist()}, expected {given.tolist()}"
        return _red("draft_tokens", Verdict.WRONG_TOKENS, message)
    return _choices("draft_tokens", drafted[:, 1:].flatten(), expected.oracle.logits, tie, batch)


def _topk(output: LogitsProcessorOutput, case: Case, expected: Expected) -> Comparison:
    """The graph's own top-1 of the last accepted row of every request."""
    if output.topk_index is None or output.topk_p is None:
        return _red("topk", Verdict.WRONG_SHAPE, "topk: none")
    due = (case.bs, 1)
    for name, top in (("topk_index", output.topk_index), ("topk_p", output.topk_p)):
        if top.shape != due:
            return _misshapen(name, top, due)
    last = torch.tensor(case.q_lens).cumsum(0) - 1
    expected_p = output.next_token_logits.cpu()[last].double().softmax(-1).amax(-1)
    worst = float((output.topk_p[:, 0].cpu() - expected_p).abs().max())
    if not worst <= TOPK_P_ERROR:  # nor is NaN
        message = f"topk_p: off by {worst:.2e} from the softmax of the last accepted row"
        return Comparison(
            quantity="topk",
            verdict=Verdict.WRONG_NUMBERS,
            error=worst,
            allowed=TOPK_P_ERROR,
            message=message,
        )
    tie = tie_margin(case.dtype)
    return _choices("topk", output.topk_index[:, 0].cpu(), expected.oracle.logits[last], tie, None)


def _choices(
    quantity: str,
    chosen: torch.Tensor,
    logits: torch.Tensor,
    tie: float,
    batch: BatchInputs | None,
) -> Comparison:
    """A choice is right where it is the oracle's top-1, or is within ``tie`` of it."""
    rms = logits.square().mean(-1).sqrt()
    margin = (logits.amax(-1) - logits.gather(-1, chosen[:, None])[:, 0]) / rms
    row = int(margin.argmax())
    wrong = bool(margin[row] > tie)
    where = f"row {row}" if batch is None else _rows(batch)[row]
    best = int(logits[row].argmax())
    message = f"{quantity}: token {int(chosen[row])} at {where}, expected {best}" if wrong else ""
    return Comparison(
        quantity=quantity,
        verdict=Verdict.WRONG_TOKENS if wrong else Verdict.PASSED,
        error=float(margin[row]),
        allowed=tie,
        where=where,
        message=message,
    )
