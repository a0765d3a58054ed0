"""FlashMLA of sglang-kernel: MLA on Hopper, pages of 64 latents of 512 + 64."""

from __future__ import annotations

from functools import partial
from typing import Unpack

import torch

from harness.core.capability import FLASH_MLA
from harness.kernels.checked import CheckedKernel, Uniform, finished
from harness.kernels.packages import cuda_device, load
from harness.kernels.ragged import mla_context_by_decode


class FlashMLA(CheckedKernel):
    """Decode, causal multi-query and, by padding to it, ragged queries on one kernel.

    The tile schedule follows from the lengths. It is computed on the device by each call, so that
    a recorded call schedules anew at each replay.

    Args:
        device: the CUDA device.

    Raises:
        UsageError: sglang-kernel is missing, or the device is not of its architecture.
    """

    def __init__(self, device: torch.device | str) -> None:
        ragged = partial(mla_context_by_decode, self._mla_decode, FLASH_MLA.max_q_len)
        super().__init__(FLASH_MLA, {"mla_decode": self._mla_decode, "mla_context": ragged})
        cuda_device(device, FLASH_MLA)
        self._kernel = load("sgl_kernel.flash_mla", "flash_mla")

    def _mla_decode(
        self, q: torch.Tensor, kv_cache: torch.Tensor, kv_lora_rank: int, **call: Unpack[Uniform]
    ) -> torch.Tensor:
        q_len, seq_lens = call["q_len_per_req"], call["seq_lens"]
        schedule, splits = self._kernel.get_mla_metadata(seq_lens, q_len * q.shape[1], 1)
        out, _ = self._kernel.flash_mla_with_kvcache(
            q.unflatten(0, (-1, q_len)),
            kv_cache.unsqueeze(2),
            call["block_tables"],
            seq_lens,
            kv_lora_rank,
            schedule,
            splits,
            softmax_scale=call["bmm1_scale"],
            causal=True,
        )
        return finished(out.flatten(0, 1), call["bmm2_scale"], call["out_dtype"])
