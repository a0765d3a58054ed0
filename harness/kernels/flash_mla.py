"""FlashMLA of sglang-kernel: MLA on Hopper, pages of 64 latents of 512 + 64."""

from __future__ import annotations

from functools import partial

import torch

from harness.core.capability import FLASH_MLA
from harness.kernels.checked import CheckedKernel, scale_and_cast
from harness.kernels.interface import DecodeCall
from harness.kernels.packages import cuda_device, load
from harness.kernels.paged_kv import is_readable
from harness.kernels.ragged import context_by_decode


class FlashMLA(CheckedKernel):
    """Decode, causal multi-query and, by padding to it, ragged queries on one kernel.

    The tile schedule follows from the lengths. It is computed on the device, by the first call of a
    forward for its other layers. What a graph records is never left to a call before its capture,
    so that a replay schedules anew.

    Args:
        device: the CUDA device.

    Raises:
        UsageError: sglang-kernel is missing, or the device is not of its architecture.
    """

    def __init__(self, device: torch.device | str) -> None:
        ragged = partial(context_by_decode, self._mla_decode, FLASH_MLA.max_q_len)
        super().__init__(FLASH_MLA, {"mla_decode": self._mla_decode, "mla_context": ragged})
        cuda_device(device, FLASH_MLA)
        self._kernel = load("sgl_kernel.flash_mla", "flash_mla")
        self._scheduled: tuple[object, bool] | None = None
        self._schedule: tuple[torch.Tensor, torch.Tensor] | None = None

    def _mla_decode(self, call: DecodeCall) -> torch.Tensor:
        q, q_len = call.q, call.q_len_per_req
        schedule, splits = self._schedule_of(call)
        out, _ = self._kernel.flash_mla_with_kvcache(
            q.unflatten(0, (-1, q_len)),
            call.caches[0].unsqueeze(2),
            call.block_tables,
            call.seq_lens,
            call.kv_lora_rank,
            schedule,
            splits,
            softmax_scale=call.bmm1_scale,
            causal=True,
        )
        return scale_and_cast(out.flatten(0, 1), call.bmm2_scale, call.out_dtype)

    def _schedule_of(self, call: DecodeCall) -> tuple[torch.Tensor, torch.Tensor]:
        asked = call.forward, is_readable(call.seq_lens)
        if self._schedule is None or call.forward is None or asked != self._scheduled:
            rows = call.q_len_per_req * call.q.shape[1]
            self._schedule = self._kernel.get_mla_metadata(call.seq_lens, rows, 1)
            self._scheduled = asked
        return self._schedule
