"""FlashInfer's XQA: MHA and GQA decode on Hopper and SM120; its paged prefill for context."""

from __future__ import annotations

import torch

from harness.core.capability import XQA
from harness.kernels.checked import CheckedKernel, scale_and_cast
from harness.kernels.flashinfer_prefill import PagedPrefill
from harness.kernels.interface import DecodeCall
from harness.kernels.packages import cuda_device, load
from harness.kernels.shape_checks import FP8
from harness.kernels.workspace import workspace
from harness.kernels.xqa_source import compile_corrected


class FlashInferXQA(CheckedKernel):
    """XQA takes pages as [page_size, kv_heads, head_dim], a bf16 or fp16 query and a packed mask.

    Over an FP8 cache on Hopper the kernel rounds the query and the softmax weights to FP8 itself.

    Args:
        device: the CUDA device.

    Raises:
        UsageError: flashinfer is missing, or the device is not of XQA's architectures.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = cuda_device(device, XQA)
        self._decoding = load("flashinfer.decode", XQA.name)
        compile_corrected()
        self._workspace = workspace("xqa", self._device)
        context = PagedPrefill(self._device)
        super().__init__(XQA, {"decode": self._decode, "context": context})

    def _decode(self, call: DecodeCall) -> torch.Tensor:
        # The kernel scales values of an FP8 cache alone, but always divides by their scale.
        scale = call.bmm2_scale if call.caches[0].dtype == FP8 else 1.0
        out: torch.Tensor = self._decoding.xqa_batch_decode_with_kv_cache(
            call.q,
            call.caches,
            self._workspace.buffer,
            call.block_tables,
            call.seq_lens,
            call.max_seq_len,
            bmm1_scale=float(call.bmm1_scale),
            bmm2_scale=float(scale),
            window_left=call.window_left,
            sinks=call.sinks,
            kv_layout="NHD",
            q_len_per_req=call.q_len_per_req,
            mask=call.packed_mask,
        )
        return scale_and_cast(out.view(call.q.shape), call.bmm2_scale / scale, call.out_dtype)
