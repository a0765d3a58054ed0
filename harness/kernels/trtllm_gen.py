"""FlashInfer's trtllm-gen kernels: both families on Blackwell. Unverified on hardware.

Written against the signatures of flashinfer 0.6.12 and checked against them in a test, but never
run: no such GPU was at hand.
"""

from __future__ import annotations

from functools import partial

import torch

from harness.core.capability import TRTLLM_GEN_MHA, TRTLLM_GEN_MLA
from harness.core.case import Family
from harness.kernels.checked import CheckedKernel, KernelFunction
from harness.kernels.interface import ContextCall, DecodeCall
from harness.kernels.packages import cuda_device, load
from harness.kernels.ragged import context_by_decode, zero_padding
from harness.kernels.workspace import workspace

CAPABILITY_OF = {Family.MHA: TRTLLM_GEN_MHA, Family.MLA: TRTLLM_GEN_MLA}
QK_NOPE_HEAD_DIMS = {512: 128, 256: 64}
"""kv_lora_rank -> the head size before absorption, which the MLA entry still asks for."""


class TRTLLMGen(CheckedKernel):
    """Decode, multi-query and context kernels, which are causal by themselves.

    The decode kernels share a workspace whose semaphores the context kernel is not handed. MLA has
    no kernel for ragged absorbed queries: its context runs on the decode kernel.

    Args:
        family: MHA or MLA.
        device: the CUDA device.

    Raises:
        UsageError: flashinfer is missing, or the device is not of these kernels' architectures.
    """

    def __init__(self, family: Family, device: torch.device | str) -> None:
        capability = CAPABILITY_OF[family]
        place = cuda_device(device, capability)
        self._decoding = load("flashinfer.decode", capability.name)
        self._prefill = load("flashinfer.prefill", capability.name)
        self._mla = load("flashinfer.mla", capability.name)
        self._workspace = workspace(capability.name, place)
        ragged: KernelFunction = partial(context_by_decode, self._mla_decode, capability.max_q_len)
        super().__init__(
            capability,
            {
                "decode": self._decode,
                "context": self._context,
                "mla_decode": self._mla_decode,
                "mla_context": ragged,
            },
        )

    def _decode(self, call: DecodeCall) -> torch.Tensor:
        out: torch.Tensor = self._decoding.trtllm_batch_decode_with_kv_cache(
            call.q,
            call.caches,
            self._workspace.buffer,
            call.block_tables,
            call.seq_lens,
            call.max_seq_len,
            bmm1_scale=call.bmm1_scale,
            bmm2_scale=call.bmm2_scale,
            window_left=call.window_left,
            out_dtype=call.out_dtype,
            sinks=call.sinks,
            kv_layout="NHD",
            backend="trtllm-gen",
            q_len_per_req=call.q_len_per_req,
            mask=call.packed_mask,
        )
        return out

    def _context(self, call: ContextCall) -> torch.Tensor:
        out = self._prefill.trtllm_batch_context_with_kv_cache(
            call.q,
            call.caches,
            self._workspace.scratch,
            call.block_tables,
            call.seq_lens,
            call.max_q_len,
            call.max_seq_len,
            call.bmm1_scale,
            call.bmm2_scale,
            call.batch_size,
            call.cu_seqlens_q,
            call.cu_seqlens_k,
            window_left=call.window_left,
            out_dtype=call.out_dtype,
            kv_layout="NHD",
            sinks=call.sinks,
        )
        return zero_padding(out, call.cu_seqlens_q)

    def _mla_decode(self, call: DecodeCall) -> torch.Tensor:
        (kv_cache,), rank = call.caches, call.kv_lora_rank
        out: torch.Tensor = self._mla.trtllm_batch_decode_with_kv_cache_mla(
            call.q.unflatten(0, (-1, call.q_len_per_req)),
            kv_cache,
            self._workspace.buffer,
            QK_NOPE_HEAD_DIMS[rank],
            rank,
            kv_cache.shape[-1] - rank,
            call.block_tables,
            call.seq_lens,
            call.max_seq_len,
            bmm1_scale=call.bmm1_scale,
            bmm2_scale=call.bmm2_scale,
            backend="trtllm-gen",
        )
        return out.flatten(0, 1)
