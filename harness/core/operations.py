"""Operations that a forward of ours dispatches on a CPU, by a formula in its case's own numbers.

Whatever a batch's lengths, requests, pages and heads are, the host asks for the same operations:
a count that differs is work that some batches have and others have not.
"""

from __future__ import annotations

from harness.core.capability import Capability
from harness.core.case import Case, Execution, Family, KVDtype, Mode
from harness.core.conventions import Conventions

EAGER = Execution.EAGER
EMULATED = frozenset({"flash_mla", "trtllm_gen", "xqa"})
"""Kernels whose stand-ins' own operations ``forward_operations`` knows."""


def planned_operations(
    case: Case, conventions: Conventions, capability: Capability, execution: Execution
) -> int:
    """Operations of a plan: dispatched in an eager one, recorded in a graph, views left out there.

    Raises:
        ValueError: nobody counted what such a backend does.
    """
    if conventions.more is None:
        raise ValueError("conventions.more = None has no formula")
    if not case.bs:
        return 0
    draft, windowed = case.mode is Mode.MULTI_STEP_DRAFT, case.window_left >= 0
    ragged = case.mode is Mode.DRAFT_EXTEND
    pads_queries = ragged and case.family is Family.MLA
    masked = capability.needs_packed_mask and case.mode in (
        Mode.TARGET_VERIFY,
        Mode.DRAFT_EXTEND_V2,
    )
    if execution is EAGER:
        # Seven tensors of metadata, their slices, and the operations that a graph records.
        each = 34 + 14 * windowed + 2 * draft
        # For one request broadcasting the packed mask copies nothing.
        once = 26 * pads_queries + (12 - (case.bs == 1)) * masked
    else:
        # Seven lengths and locations of each draft step; one table for all of them.
        each = 7 + 2 * windowed
        once = 7 + 7 * windowed - ragged + 20 * pads_queries
    more_once, more_each = conventions.more.of_plan(execution)
    return _forwards(case) * (each + more_each) + once + more_once


def forward_operations(
    case: Case, conventions: Conventions, capability: Capability, execution: Execution, tokens: int
) -> int:
    """Operations of the probe model's forward, its attention and our stand-in of the kernel.

    Args:
        case: what runs.
        conventions: of its backend.
        capability: of the kernel, one of ``EMULATED``.
        execution: whether views count.
        tokens: query tokens of one forward; a graph's padded ones included, since an eager kernel
            sees the real ones alone.

    Raises:
        ValueError: nobody counted what such a backend does.
    """
    if conventions.more is None:
        raise ValueError("conventions.more = None has no formula")
    mla, draft = case.family is Family.MLA, case.mode is Mode.MULTI_STEP_DRAFT
    adds_hidden = case.mode in (Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2)
    pads_queries = mla and case.mode is Mode.DRAFT_EXTEND
    is_single = (case.bs * max(case.q_lens) if pads_queries else tokens) == 1
    is_fp8 = case.kv_dtype is KVDtype.FP8
    casts_query = is_fp8 and capability.casts_query_to_kv_dtype and not mla
    if execution is EAGER:
        each = 58 + 5 * mla + 5 * draft + 2 * adds_hidden + 6 * pads_queries
        each += 2 * (case.padded_rows > 0)
        each += 2 * is_single  # of the kernel's query, which is copied then
        once = 5 * draft
    else:
        each = 31 + 4 * draft + 2 * adds_hidden + 6 * pads_queries
        # One row of a fused projection is contiguous and not copied; nor is a query that is cast.
        each -= 2 * (tokens == 1 and not mla and not casts_query)
        once = 3 * draft + 5 * (case.mode is Mode.DRAFT_EXTEND)  # its top-1 of the last row
        once += conventions.more.outputs
    if is_fp8:
        # Keys and values are scaled and cast; a query, too, where the kernel wants it in FP8.
        each += case.num_layers * (11 if casts_query else 8)
        each += case.num_layers * (is_single and casts_query and execution is EAGER)
    return _forwards(case) * each + once


def host_operations(case: Case, conventions: Conventions) -> int:
    """Operations of planning before a replay: views of each draft step's locations, and no more.

    Raises:
        ValueError: nobody counted what such a backend does.
    """
    if conventions.more is None:
        raise ValueError("conventions.more = None has no formula")
    return 2 * _forwards(case) * (case.mode is Mode.MULTI_STEP_DRAFT) + conventions.more.on_host


def _forwards(case: Case) -> int:
    return case.num_steps - 1 if case.mode is Mode.MULTI_STEP_DRAFT else 1
