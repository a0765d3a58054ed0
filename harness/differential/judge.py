"""Obtained meets expected: numbers, choices, metadata, and every slot of the cache."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from harness.core.case import Case, Execution, Family, Mode
from harness.core.numerics import Numerics
from harness.core.record import Verdict
from harness.core.tolerance import budget, tie_margin
from harness.differential.compare import Comparison, compare
from harness.differential.expected import Expected, expect
from harness.differential.forward import ForwardResult
from harness.differential.inputs import BatchInputs, TrialInputs
from harness.differential.invariants import check_metadata, check_writes
from harness.differential.invariants.memory import check_semaphores
from harness.differential.pool_state import PoolState
from harness.kernels.workspace import shared_workspaces
from harness.upstream.forward_batch_info import DraftOutput, LogitsProcessorOutput
from harness.upstream.memory_pool import MLATokenToKVPool, SWAKVPool

# The graph takes a float32 softmax of logits that it also hands out. Against float64 it was off by
# at most 8e-8 over 124 rows of each dtype; logits rounded to float16 first move it by up to 9e-5.
TOPK_P_ERROR = 1e-6


def judge(result: ForwardResult, execution: Execution, numerics: Numerics) -> list[Comparison]:
    """Every comparison of a performance, invariants first: they name the cause."""
    pool_state = result.pool_state
    inputs, requests, case = pool_state.inputs, pool_state.inputs.batches[0], pool_state.case
    fed = None
    if isinstance(result.output, DraftOutput):
        fed = result.output.draft_tokens[:, :-1]
    expected = expect(inputs, requests, fed_tokens=fed, numerics=numerics)
    found = [_broken(line) for line in _violations(result, execution)]
    found += _numbers(result, requests, expected, numerics.budget_factor)
    found += _cache(pool_state, requests, expected)
    if isinstance(result.output, DraftOutput):
        found.append(_draft_tokens(result.output, requests, expected))
    elif execution is Execution.GRAPH and case.mode is Mode.DRAFT_EXTEND:
        found.append(_topk(result.output, case, expected))
    return found


def _broken(line: str) -> Comparison:
    return Comparison(
        quantity="invariant", verdict=Verdict.BROKEN_INVARIANT, error=torch.inf, message=line
    )


def _numbers(
    result: ForwardResult, requests: BatchInputs, expected: Expected, factor: float
) -> Iterable[Comparison]:
    case, output = requests.case, result.output
    hidden, logits = output.hidden_states, output.next_token_logits
    if isinstance(output, DraftOutput):
        hidden, logits = hidden.flatten(0, 1), logits.flatten(0, 1)
    oracle, reference = expected.oracle, expected.reference
    for name, obtained, due, plain in (
        ("hidden_states", hidden, oracle.hidden_states, reference.hidden_states),
        ("logits", logits, oracle.logits, reference.logits),
    ):
        allowed = budget(name, case.dtype, case.kv_dtype).times(factor)
        yield compare(name, obtained, due, plain, allowed, _rows(requests))


def _rows(requests: BatchInputs) -> list[str]:
    """Request, position and page of every query token."""
    case, size = requests.case, requests.case.page_size
    return [
        f"request {i}, position {t} (page {requests.pages[i][t // size]})"
        for i in range(case.bs)
        for t in range(case.prefix_lens[i], case.total_lens[i])
    ]


def _cache(
    pool_state: PoolState, requests: BatchInputs, expected: Expected
) -> Iterable[Comparison]:
    """What the new tokens left in the cache, dequantised, layer by layer."""
    case = requests.case
    slots = torch.tensor([slot for own in requests.new_slots for slot in own], dtype=torch.int64)
    allowed = budget("kv_cache", case.dtype, case.kv_dtype)
    dtype = getattr(torch, case.dtype)
    for layer in range(case.num_layers):
        keys, values = stored(pool_state, layer, slots)
        pairs = [("key", keys, expected.keys, case.k_scale)]
        if values is not None:
            pairs.append(("value", values, expected.values, case.v_scale))
        for name, obtained, due, scale in pairs:
            if obtained.element_size() == 1:
                obtained = (obtained.to(torch.float32) * scale).to(dtype)
            what = f"kv_cache.{name}{layer}"
            rounded = due[layer].to(dtype)
            yield compare(
                what,
                obtained.flatten(1),
                due[layer].flatten(1),
                rounded.flatten(1),
                allowed,
                _rows(requests),
            )


def stored(
    pool_state: PoolState, layer: int, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys and values of a layer as they lie in the cache, at slots [n] of the full pool."""
    pool = pool_state.token_to_kv_pool
    if isinstance(pool, MLATokenToKVPool):
        return pool.kv_buffer[layer][slots], None
    if isinstance(pool, SWAKVPool):
        part = pool.swa_pool if layer % 2 else pool.full_pool
        where = (
            _swa_slots(pool_state.inputs, slots.tolist(), pool.page_size) if layer % 2 else slots
        )
        index = layer // 2
        return part.k_buffer[index][where], part.v_buffer[index][where]
    return pool.k_buffer[layer][slots], pool.v_buffer[layer][slots]


def _swa_slots(inputs: TrialInputs, slots: list[int], page_size: int) -> list[int]:
    assert inputs.swa_page_of is not None
    return [inputs.swa_page_of[slot // page_size] * page_size + slot % page_size for slot in slots]


def _violations(result: ForwardResult, execution: Execution) -> list[str]:
    pool_state, case = result.pool_state, result.pool_state.case
    requests = pool_state.inputs.batches[0]
    found = [*result.violations, *check_semaphores(shared_workspaces())]
    new = {slot for own in requests.new_slots for slot in own}
    swa = set()
    if pool_state.inputs.swa_page_of is not None:
        swa = set(_swa_slots(pool_state.inputs, sorted(new), case.page_size))
    due = {name: swa if name.startswith("swa.") else new for name in result.before}
    padding = range(case.page_size)
    after = {name: buffer.clone() for name, buffer in pool_state.buffers().items()}
    for name, buffer in after.items():
        buffer[padding] = result.before[name][padding]
    found += check_writes(result.before, after, due, case.page_size)
    if case.mode is Mode.IDLE:
        return found
    pages = [list(own) for own in requests.pages]
    mapping = pool_state.inputs.swa_page_of
    swa_pages = None if mapping is None else [[mapping[p] for p in own] for own in pages]
    for step, plan in enumerate(result.plans):
        prefix_lens, q_lens = planned_lens(case, step, result.bucket, execution)
        is_replayed_draft = case.mode is Mode.MULTI_STEP_DRAFT and execution is Execution.GRAPH
        later_steps = len(result.plans) - 1 - step if is_replayed_draft else 0
        found += check_metadata(
            plan,
            prefix_lens=prefix_lens,
            q_lens=q_lens,
            pages=pages,
            page_size=case.page_size,
            num_pages=pool_state.inputs.num_pages,
            swa_pages=swa_pages,
            num_swa_pages=pool_state.inputs.num_swa_pages,
            table_headroom=later_steps,
            packed_q_lens=[*case.q_lens, *[1] * (result.bucket - case.bs)]
            if case.mode is Mode.DRAFT_EXTEND
            else None,
        )
    return found


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


def _draft_tokens(output: DraftOutput, requests: BatchInputs, expected: Expected) -> Comparison:
    """The first token is the given one; each other is the oracle's choice after the ones before."""
    case, steps = requests.case, requests.case.num_steps - 1
    given = torch.stack([tokens[0] for tokens in requests.new_tokens])
    drafted = output.draft_tokens.cpu()
    if drafted.shape != (case.bs, steps + 1) or not torch.equal(drafted[:, 0], given):
        message = f"draft_tokens: first tokens {drafted[:, 0].tolist()}, expected {given.tolist()}"
        return Comparison(
            quantity="draft_tokens", verdict=Verdict.WRONG_TOKENS, error=torch.inf, message=message
        )
    return _choices(
        "draft_tokens", drafted[:, 1:].flatten(), expected.oracle.logits, case, requests
    )


def _topk(output: LogitsProcessorOutput, case: Case, expected: Expected) -> Comparison:
    """The graph's own top-1 of the last accepted row of every request."""
    if output.topk_index is None or output.topk_p is None:
        return Comparison(
            quantity="topk", verdict=Verdict.WRONG_SHAPE, error=torch.inf, message="topk: none"
        )
    last = torch.tensor(case.q_lens).cumsum(0) - 1
    due = output.next_token_logits.cpu()[last].double().softmax(-1).amax(-1)
    if (worst := float((output.topk_p[:, 0].cpu() - due).abs().max())) > TOPK_P_ERROR:
        message = f"topk_p: off by {worst:.2e} from the softmax of the last accepted row"
        return Comparison(
            quantity="topk",
            verdict=Verdict.WRONG_NUMBERS,
            error=worst,
            allowed=TOPK_P_ERROR,
            message=message,
        )
    return _choices("topk", output.topk_index[:, 0].cpu(), expected.oracle.logits[last], case, None)


def _choices(
    quantity: str,
    chosen: torch.Tensor,
    logits: torch.Tensor,
    case: Case,
    requests: BatchInputs | None,
) -> Comparison:
    """A choice is right where it is the oracle's top-1, or ties with it."""
    tie = tie_margin(case.dtype)
    rms = logits.square().mean(-1).sqrt()
    behind = (logits.amax(-1) - logits.gather(-1, chosen[:, None])[:, 0]) / rms
    row = int(behind.argmax())
    wrong = bool(behind[row] > tie)
    where = f"row {row}" if requests is None else _rows(requests)[row]
    best = int(logits[row].argmax())
    message = f"{quantity}: token {int(chosen[row])} at {where}, expected {best}" if wrong else ""
    return Comparison(
        quantity=quantity,
        verdict=Verdict.WRONG_TOKENS if wrong else Verdict.PASSED,
        error=float(behind[row]),
        allowed=tie,
        where=where,
        message=message,
    )
