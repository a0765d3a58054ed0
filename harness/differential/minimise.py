"""Shrinks a red trial: the smallest case that still fails in the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from harness.core.case import Case, Dtype, Inputs, KVDtype, Layout, Mode
from harness.core.record import Record
from harness.errors import UsageError

PAGE_SIZES = (16, 32, 64)


def cause(record: Record) -> tuple[str, str]:
    """The verdict and the first line's text without numbers: equal for one fault in two sizes."""
    first = record.message.partition(";")[0]
    return str(record.verdict), re.sub(
        r"-?\d[\d.e+-]*", "N", re.sub(r"\[[^\]]*\d[^\]]*\]", "[N]", first)
    )


def minimise(
    case: Case, run: Callable[[Case], Record], told: Callable[[Case], None] = lambda case: None
) -> tuple[Case, Record]:
    """The smallest case with the cause of ``case``, and its record.

    Each round tries every single reduction, the largest first, and keeps the first that is red for
    the same cause; it ends with a case of which none is.

    Args:
        case: red.
        run: one trial.
        told: called with every case that is kept.

    Raises:
        UsageError: the case is not red.
    """
    record = run(case)
    if not record.verdict.is_red:
        raise UsageError(f"{case.id} is {record.verdict}: only a red trial can be made smaller")
    wanted = cause(record)
    found = True
    while found:
        found = False
        for candidate in reductions(case):
            shrunk = run(candidate)
            if shrunk.verdict.is_red and cause(shrunk) == wanted:
                case, record, found = candidate, shrunk, True
                told(case)
                break
    return case, record


def reductions(case: Case) -> Iterator[Case]:
    """Every case that is one step smaller; what makes no case is left out."""
    for changes in _changes(case):
        if all(getattr(case, name) == value for name, value in changes.items()):
            continue
        try:
            yield replace(case, **changes)
        except UsageError:
            continue


def _changes(case: Case) -> Iterator[dict[str, Any]]:
    for i in range(case.bs if case.bs > 1 else 0):
        yield _without_request(case, i)
    yield {"inputs": Inputs.RANDOM}
    yield {"window_left": -1}
    yield {"sinks": False}
    yield {"padded_rows": 0, "pads_before_plan": False}
    yield {"kv_dtype": KVDtype.AUTO, "k_scale": 1.0, "v_scale": 1.0}
    yield {"dtype": Dtype.BF16}
    yield {"layout": Layout.CONTIGUOUS}
    yield {"num_q_heads": case.num_kv_heads}
    yield {"num_q_heads": case.num_q_heads // case.num_kv_heads, "num_kv_heads": 1}
    if case.bs:
        # Prefill has no graph, and may have more requests than any is captured for.
        own = min((bs for bs in case.capture_bs if bs >= case.bs), default=case.bs)
        yield {"capture_bs": (own,)}
        yield {"capture_bs": (case.bs,)}
    yield from ({"page_size": size} for size in PAGE_SIZES if size < case.page_size)
    yield from _widths(case)
    yield from _lengths(case)
    longest = max(case.total_lens, default=1)
    yield from (
        {"max_context_len": n}
        for n in (longest, case.max_context_len // 2)
        if 0 < n < case.max_context_len
    )


def _without_request(case: Case, i: int) -> dict[str, Any]:
    given = {name: getattr(case, name) for name in ("prefix_lens", "extend_lens", "accept_lens")}
    return {name: (*values[:i], *values[i + 1 :]) for name, values in given.items()}


def _widths(case: Case) -> Iterator[dict[str, Any]]:
    if case.mode is Mode.MULTI_STEP_DRAFT:
        yield from ({"num_steps": n} for n in (2, case.num_steps - 1) if 2 <= n < case.num_steps)
        return
    for width in (1, 2, case.num_draft_tokens - 1):
        if 1 <= width < case.num_draft_tokens:
            capped = tuple(min(n, width) for n in case.accept_lens)
            yield {"num_draft_tokens": width, "accept_lens": capped}


def _lengths(case: Case) -> Iterator[dict[str, Any]]:
    """Shorter lengths, one request at a time: none, one, a half, a page less, one less."""
    for name, least in (("prefix_lens", 0), ("extend_lens", 1), ("accept_lens", 1)):
        given: tuple[int, ...] = getattr(case, name)
        for i, length in enumerate(given):
            for shorter in (least, 1, length // 2, length - case.page_size, length - 1):
                if least <= shorter < length:
                    yield {name: (*given[:i], shorter, *given[i + 1 :])}
