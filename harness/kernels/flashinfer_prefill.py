"""The context entry of FlashInfer's paged prefill."""

from __future__ import annotations

from dataclasses import fields

import torch

from harness.errors import CaptureViolation
from harness.kernels.checked import scale_and_cast
from harness.kernels.flashinfer_plan import KERNEL, PrefillGeometry, PrefillPlan
from harness.kernels.interface import ContextCall
from harness.kernels.paged_kv import is_readable
from harness.kernels.ragged import request_and_index, zero_padding


class PagedPrefill:
    """The context entry of a kernel.

    Plans are kept as long as the kernel, because captured graphs read their buffers.

    Args:
        device: with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._plans: dict[PrefillGeometry, PrefillPlan] = {}

    def __call__(self, call: ContextCall) -> torch.Tensor:
        """See ``Kernel.context``.

        Raises:
            CaptureViolation: the geometry is first seen while a CUDA graph is captured.
        """
        q, (k_cache, v_cache) = call.q, call.caches
        geometry = PrefillGeometry(
            batch_size=call.batch_size,
            max_q_len=call.max_q_len,
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
        plan.fill(call.cu_seqlens_q, call.seq_lens, call.block_tables)
        padded = plan.run(q, k_cache, v_cache, call.bmm1_scale, call.sinks)
        request, index = request_and_index(call.cu_seqlens_q, q.shape[0])
        row = (request * geometry.max_q_len + index).clamp_max(geometry.rows - 1)
        out = zero_padding(padded[row], call.cu_seqlens_q)
        return scale_and_cast(out, call.bmm2_scale, call.out_dtype)

    def _plan(self, geometry: PrefillGeometry, q: torch.Tensor) -> PrefillPlan:
        found = self._plans.get(geometry)
        if found is None:
            if not is_readable(q):
                asked = ", ".join(f"{f.name} {getattr(geometry, f.name)}" for f in fields(geometry))
                raise CaptureViolation(f"{KERNEL} is planned during capture, not before: {asked}")
            found = self._plans[geometry] = PrefillPlan(geometry, self._device)
        return found
