"""The context entry of FlashInfer's paged prefill."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import fields

import torch

from harness.errors import CaptureViolation
from harness.kernels.checked import scale_and_cast
from harness.kernels.flashinfer_plan import KERNEL, Filled, PrefillGeometry, PrefillPlan
from harness.kernels.interface import ContextCall
from harness.kernels.paged_kv import is_readable
from harness.kernels.ragged import padding_rows, request_and_index

KEPT_PLANS = 16
"""Eager plans that are kept; each takes 8 MiB of the device and as much of pinned memory."""


def rounded_width(max_q_len: int) -> int:
    """At least ``max_q_len`` and at most an eighth more, so that like prompts share a plan."""
    step = 1 << max(0, max_q_len.bit_length() - 4)
    return -(-max_q_len // step) * step


class PagedPrefill:
    """The context entry of a kernel.

    Plans that a captured graph reads are kept as long as the kernel, others as long as they are
    among the ``KEPT_PLANS`` last used.

    Args:
        device: with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._captured: dict[PrefillGeometry, PrefillPlan] = {}
        self._plans: OrderedDict[PrefillGeometry, PrefillPlan] = OrderedDict()

    def __call__(self, call: ContextCall) -> torch.Tensor:
        """See ``Kernel.context``.

        Raises:
            CaptureViolation: the geometry is first seen while a CUDA graph is captured.
        """
        q, (k_cache, v_cache) = call.q, call.caches
        geometry = PrefillGeometry(
            batch_size=call.batch_size,
            max_q_len=rounded_width(call.max_q_len),
            table_width=call.block_tables.shape[1],
            page_size=k_cache.shape[1],
            q_heads=q.shape[1],
            kv_heads=k_cache.shape[2],
            head_dim=q.shape[2],
            q_dtype=q.dtype,
            kv_dtype=k_cache.dtype,
            window_left=call.window_left,
            has_sinks=call.sinks is not None,
        )
        plan = self._plan(geometry, q)
        rows, padding = self._filled(plan, call)
        out = plan.run(q, k_cache, v_cache, call.bmm1_scale, call.sinks)[rows]
        out.masked_fill_(padding, 0)
        return scale_and_cast(out, call.bmm2_scale, call.out_dtype)

    def _filled(self, plan: PrefillPlan, call: ContextCall) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each query its row in the plan's output and whether it is padding.

        The plan's index buffers are the call's then.
        """
        if plan.filled is None or not plan.filled.is_of(call.forward, call.block_tables):
            plan.fill(call.cu_seqlens_q, call.seq_lens, call.block_tables)
            request, index = request_and_index(call.cu_seqlens_q, call.q.shape[0])
            last = plan.geometry.rows - 1
            rows = (request * plan.geometry.max_q_len + index).clamp_max(last)
            padding = padding_rows(call.cu_seqlens_q, call.q.shape[0])
            # What is made during a capture is the graph's, and replays fill the plan as well.
            keeps = call.forward is not None and plan.geometry not in self._captured
            plan.filled = Filled(call.forward, call.block_tables, rows, padding) if keeps else None
            return rows, padding
        return plan.filled.rows, plan.filled.padding

    def _plan(self, geometry: PrefillGeometry, q: torch.Tensor) -> PrefillPlan:
        if geometry in self._captured:
            return self._captured[geometry]
        found = self._plans.get(geometry)
        if is_readable(q):
            if found is None:
                found = self._plans[geometry] = PrefillPlan(geometry, self._device)
            self._plans.move_to_end(geometry)
            if len(self._plans) > KEPT_PLANS:
                self._plans.popitem(last=False)
        elif found is None:
            asked = ", ".join(f"{f.name} {getattr(geometry, f.name)}" for f in fields(geometry))
            raise CaptureViolation(f"{KERNEL} is planned during capture, not before: {asked}")
        else:
            self._captured[geometry] = self._plans.pop(geometry)
        return found
