"""FlashInfer's entry points that sglang's backends call, served by a strict kernel of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from harness.errors import KernelRefusal, rejected
from harness.kernels.checked import CheckedKernel, KernelFunction
from harness.kernels.interface import ContextCall, DecodeCall
from harness.kernels.reference import TorchPaged
from harness.sglang.stubs.mla_wrapper import BatchMLAPagedAttentionWrapper
from harness.sglang.stubs.ragged import (
    BatchPrefillWithRaggedKVCacheWrapper,
    merge_state,
    trtllm_ragged_attention_deepseek,
)
from harness.sglang.stubs.rope import mla_rope_quantize_fp8
from harness.sglang.stubs.wrappers import (
    DECODE_GROUP_SIZES,
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    fast_decode_plan,
)

MHA_DIM = 4
SEMAPHORE_BYTES = 8 << 20
"""Of XQA, at the start of its workspace: zero before a launch, zero after it."""
SCRATCH_BYTES = 1 << 12
"""What a prefill leaves in its workspace here; on a GPU it is more."""
_serving: list[CheckedKernel] = []


@contextmanager
def served_by(kernel: CheckedKernel) -> Iterator[None]:
    """Inside, every entry point runs on this kernel."""
    _serving.append(kernel)
    try:
        yield
    finally:
        _serving.pop()


def _kernel() -> CheckedKernel:
    if not _serving:
        raise KernelRefusal("FlashInfer was called outside of a forward")
    return _serving[-1]


def _paged(kv_cache: Any, kv_layout: str) -> tuple[torch.Tensor, ...]:
    """Keys and values [pages, page_size, kv_heads, head_dim], from HND or NHD."""
    caches = tuple(kv_cache) if isinstance(kv_cache, tuple | list) else kv_cache.unbind(1)
    if kv_layout == "HND":
        caches = tuple(cache.permute(0, 2, 1, 3) for cache in caches)
    return caches


def _bound(block_tables: torch.Tensor, page_size: int) -> int:
    """The host's bound of lengths: what the table holds.

    The caller's ``max_seq_len`` only spreads the work: XQA takes its bound from the table's width
    (flashinfer/xqa.py), and trtllm-gen rounds otherwise with another one (flashinfer#4647).
    """
    return block_tables.shape[1] * page_size


def _on(kernel: CheckedKernel, bmm1_scale: float | torch.Tensor) -> tuple[CheckedKernel, float]:
    """The kernel for a softmax scale that may be on the device, and the host's part of the scale.

    A scale on the device multiplies the query once every rule of the call has been checked on the
    query as it was given.
    """
    if not isinstance(bmm1_scale, torch.Tensor):
        return kernel, bmm1_scale

    def scaled(function: KernelFunction) -> KernelFunction:
        return lambda call: function(replace(call, q=call.q.float() * bmm1_scale))

    functions = {entry: scaled(function) for entry, function in kernel.kernels.items()}
    return CheckedKernel(kernel.capability, functions), 1.0


def _filled(result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return result if out is None else out.copy_(result.view_as(out))


@contextmanager
def _unseen() -> Iterator[None]:
    """Inside, neither tapes nor observers see what a stand-in does beside the kernel."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _check_semaphores(entry: str, workspace: torch.Tensor) -> None:
    """Refuse what a kernel that shares the workspace has left where XQA counts."""
    with _unseen():
        semaphores = workspace.view(torch.uint8)[:SEMAPHORE_BYTES].view(torch.int64)
        left = semaphores.count_nonzero().item()
    if left:
        told = rejected("workspace_buffer", f"{left} words left by another kernel", "zeros")
        raise KernelRefusal(f"{entry}: {told} [workspace]")


def _leave_scratch(workspace: torch.Tensor) -> None:
    with _unseen():
        workspace.view(torch.uint8)[:SCRATCH_BYTES].fill_(1)


def _refuse(entry: str, **arguments: object) -> None:
    """Refuse every argument that is given: the reference has nothing that serves it."""
    for name, value in arguments.items():
        if value is not None:
            raise KernelRefusal(f"{entry}: {rejected(name, value, 'None')}")


def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: Any,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float = 1.0,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    sinks: torch.Tensor | None = None,
    kv_layout: str = "HND",
    q_len_per_req: int | None = 1,
    mask: torch.Tensor | None = None,
    cum_seq_lens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    kv_cache_sf: object = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Uniform decode over paged MHA keys, XQA's or trtllm-gen's by the kernel's capability."""
    entry = "trtllm_batch_decode_with_kv_cache"
    _refuse(entry, kv_cache_sf=kv_cache_sf, cum_seq_lens_q=cum_seq_lens_q, max_q_len=max_q_len)
    if _kernel().capability.needs_packed_mask:
        _check_semaphores(entry, workspace_buffer)
    caches = _paged(kv_cache, kv_layout)
    kernel, host_scale = _on(_kernel(), bmm1_scale)
    call = DecodeCall(
        q=query,
        caches=caches,
        block_tables=block_tables,
        seq_lens=seq_lens,
        max_seq_len=_bound(block_tables, caches[0].shape[1]),
        bmm1_scale=host_scale,
        bmm2_scale=bmm2_scale,
        out_dtype=out_dtype or (query.dtype if out is None else out.dtype),
        window_left=window_left,
        sinks=sinks,
        q_len_per_req=q_len_per_req or 1,
        packed_mask=mask,
    )
    return _filled(kernel.decode(call), out)


def trtllm_batch_context_with_kv_cache(
    query: torch.Tensor,
    kv_cache: Any,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | torch.Tensor,
    bmm2_scale: float,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    kv_layout: str = "HND",
    sinks: torch.Tensor | None = None,
    kv_cache_sf: object = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    causal: bool = True,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Ragged prefill over paged MHA keys."""
    entry = "trtllm_batch_context_with_kv_cache"
    _refuse(entry, kv_cache_sf=kv_cache_sf, causal=None if causal else causal)
    if batch_size != block_tables.shape[0]:
        accepted = f"{block_tables.shape[0]}, the rows of block_tables"
        raise KernelRefusal(f"{entry}: {rejected('batch_size', batch_size, accepted)}")
    caches = _paged(kv_cache, kv_layout)
    kernel, host_scale = _on(_kernel(), bmm1_scale)
    call = ContextCall(
        q=query,
        caches=caches,
        block_tables=block_tables,
        seq_lens=seq_lens,
        max_seq_len=_bound(block_tables, caches[0].shape[1]),
        bmm1_scale=host_scale,
        bmm2_scale=bmm2_scale,
        out_dtype=out_dtype or (query.dtype if out is None else out.dtype),
        window_left=window_left,
        sinks=sinks,
        cu_seqlens_q=cum_seq_lens_q,
        cu_seqlens_k=cum_seq_lens_kv,
        max_q_len=max_q_len,
    )
    return _filled(kernel.context(call), out)


def trtllm_fmha_v2_prefill(
    qkv: tuple[torch.Tensor, Any],
    input_layout: str,
    workspace_buffer: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | torch.Tensor,
    bmm2_scale: float,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    block_tables: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    mask_mode: str = "causal",
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float = 0.0,
) -> torch.Tensor:
    """Ragged prefill on SM90 and SM120; block tables [bs, 2, width] count from the first key."""
    query, kv_cache = qkv
    if mask_mode != "causal":
        raise KernelRefusal(rejected("mask_mode", mask_mode, "causal"))
    tables = block_tables
    if isinstance(kv_cache, torch.Tensor):  # [pages, 2, page_size, heads, dim]: a copy of both
        keys, values = kv_cache.unbind(1)
        kv_cache = (keys.contiguous(), values.contiguous())
    elif block_tables.dim() == 3:
        tables = block_tables[:, 0].contiguous()
    kernel = _kernel()
    _leave_scratch(workspace_buffer)
    # Another kernel than XQA, which takes an FP8 query over an FP8 cache.
    fmha_v2 = replace(kernel.capability, name="fmha_v2", casts_query_to_kv_dtype=True)
    with served_by(TorchPaged(fmha_v2)):
        return trtllm_batch_context_with_kv_cache(
            query,
            kv_cache,
            workspace_buffer,
            tables,
            seq_lens,
            max_q_len,
            max_kv_len,
            bmm1_scale,
            bmm2_scale,
            batch_size,
            cum_seq_lens_q,
            cum_seq_lens_kv,
            window_left,
            out,
            out_dtype,
            kv_layout=input_layout.rpartition("_")[2],
            sinks=sinks,
        )


def trtllm_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    out: torch.Tensor | None = None,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float = 1.0,
    sinks: object = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
) -> torch.Tensor:
    """Uniform decode over the paged latent; query [bs, q_len, heads, rank + rope]."""
    entry = "trtllm_batch_decode_with_kv_cache_mla"
    _refuse(entry, sinks=sinks, return_lse=return_lse or None)
    bs, q_len, heads = query.shape[:3]
    kernel, host_scale = _on(_kernel(), bmm1_scale)
    call = DecodeCall(
        q=query.flatten(0, 1),
        caches=(kv_cache.flatten(1, -2) if kv_cache.dim() == MHA_DIM else kv_cache,),
        kv_lora_rank=kv_lora_rank,
        block_tables=block_tables,
        seq_lens=seq_lens,
        max_seq_len=_bound(block_tables, kv_cache.shape[-2]),
        bmm1_scale=host_scale,
        bmm2_scale=bmm2_scale,
        out_dtype=torch.bfloat16 if query.dtype == torch.float8_e4m3fn else query.dtype,
        q_len_per_req=q_len,
    )
    result = kernel.mla_decode(call)
    return _filled(result.view(bs, q_len, heads, kv_lora_rank), out)


SERVED: dict[str, Any] = {
    "decode.trtllm_batch_decode_with_kv_cache": trtllm_batch_decode_with_kv_cache,
    "decode.trtllm_batch_decode_with_kv_cache_mla": trtllm_batch_decode_with_kv_cache_mla,
    "prefill.trtllm_batch_context_with_kv_cache": trtllm_batch_context_with_kv_cache,
    "prefill.trtllm_fmha_v2_prefill": trtllm_fmha_v2_prefill,
    "prefill.trtllm_ragged_attention_deepseek": trtllm_ragged_attention_deepseek,
    "BatchDecodeWithPagedKVCacheWrapper": BatchDecodeWithPagedKVCacheWrapper,
    "BatchPrefillWithPagedKVCacheWrapper": BatchPrefillWithPagedKVCacheWrapper,
    "BatchPrefillWithRaggedKVCacheWrapper": BatchPrefillWithRaggedKVCacheWrapper,
    "BatchMLAPagedAttentionWrapper": BatchMLAPagedAttentionWrapper,
    "fast_decode_plan": fast_decode_plan,
    "cascade.merge_state": merge_state,
    "rope.mla_rope_quantize_fp8": mla_rope_quantize_fp8,
    "decode._grouped_size_compiled_for_decode_kernels": lambda heads, kv_heads: (
        heads // kv_heads in DECODE_GROUP_SIZES
    ),
    "utils.get_device_sm_count": lambda device: 1,
    "utils.get_trtllm_gen_multi_ctas_kv_counter_bytes": lambda bs, heads, sms: 1,
}
