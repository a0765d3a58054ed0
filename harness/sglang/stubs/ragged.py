"""Prefill over keys and values of the batch itself, and the merge of two partial results."""

from __future__ import annotations

from typing import Any

import torch

from harness.errors import KernelRefusal, rejected
from harness.kernels.csr_attention import csr_attention
from harness.kernels.shape_checks import refuse_unless
from harness.sglang.stubs.wrappers import CompiledModule, Wrapper, refuse_options


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    """Ragged queries over ragged keys, both packed."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        backend: str = "auto",
    ) -> None:
        if use_cuda_graph:
            raise KernelRefusal(rejected("use_cuda_graph", True, "False: sglang captures none"))
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        self._qo_indptr_buf: Any = None
        self._kv_indptr_buf: Any = None
        self._causal = False

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        causal: bool = False,
        window_left: int = -1,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        **options: Any,
    ) -> None:
        """Read a batch's index tensors; ``options`` that change a result are refused."""
        refuse_options("plan", options)
        same = len(qo_indptr) == len(kv_indptr)
        refuse_unless("plan", [(same, "kv_indptr size", len(kv_indptr), len(qo_indptr))])
        self._keep_dtypes(q_data_type, kv_data_type)
        self._geometry = (num_qo_heads, num_kv_heads, head_dim_qk)
        self._value_dim = head_dim_vo or head_dim_qk
        qo_host, kv_host = qo_indptr.to("cpu"), kv_indptr.to("cpu")
        self._qo_indptr_last = int(qo_host[-1])
        self._keep(_qo_indptr_buf=qo_indptr, _kv_indptr_buf=kv_indptr)
        self._cached_module = CompiledModule()
        self._plan_info = self._cached_module.plan(
            *self._workspaces, qo_host, kv_host, kv_host.diff()
        )
        self._causal, self._window_left = causal, window_left
        self._planned_window = window_left

    begin_forward = plan

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_lse: bool = False
    ) -> Any:
        """[T, heads, value dim] in the query's dtype, and with it what ``return_lse`` asks for."""
        return self._attend(
            q,
            k,
            v,
            kv_indptr=self._kv_indptr_buf,
            is_causal=self._causal,
            return_lse=return_lse,
        )

    def _checked(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        super()._checked(q, keys, values)
        dim, given = self._value_dim, values.shape[2]
        same = (given == dim, "v.head_dim", given, f"{dim}, as planned")
        refuse_unless(type(self).__name__, [same])


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two sets of keys from that over each.

    Args:
        v_a: [T, heads, dim], of the one.
        s_a: [T, heads] float32, base-2 logarithm of its softmax's sum.
        v_b: of the other.
        s_b: likewise.
    """
    for name, s in (("s_a", s_a), ("s_b", s_b)):
        refuse_unless(
            "merge_state", [(s.dtype == torch.float32, f"{name}.dtype", s.dtype, torch.float32)]
        )
    top = torch.maximum(s_a, s_b)
    safe = top.masked_fill(top.isneginf(), 0)
    a, b = (torch.exp2(s - safe)[..., None] for s in (s_a, s_b))
    total = a + b
    merged = (v_a.float() * a + v_b.float() * b) / total.clamp_min(torch.finfo(torch.float32).tiny)
    return merged.to(v_a.dtype), torch.log2(total[..., 0]) + safe


def trtllm_ragged_attention_deepseek(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    workspace_buffer: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float,
    bmm2_scale: float,
    o_sf_scale: float,
    batch_size: int,
    window_left: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    enable_pdl: bool | None,
    is_causal: bool,
    return_lse: bool,
    skip_softmax_threshold_scale_factor: float | None = None,
    out: torch.Tensor | None = None,
    **options: Any,
) -> Any:
    """MLA prefill over the decompressed keys and values of a batch, packed."""
    entry = "trtllm_ragged_attention_deepseek"
    refuse_options(entry, options)
    lens = seq_lens.tolist()
    steps = cum_seq_lens_kv.diff().tolist()
    queries = cum_seq_lens_q.diff().tolist()
    refuse_unless(
        entry,
        [
            (batch_size == len(lens), "batch_size", batch_size, f"{len(lens)} lengths"),
            (steps == lens, "seq_lens", lens, f"{steps}, the steps of cum_seq_lens_kv"),
            (max(lens) <= max_kv_len, "max_kv_len", max_kv_len, f">= {max(lens)}"),
            (max(queries) <= max_q_len, "max_q_len", max_q_len, f">= {max(queries)}"),
        ],
    )
    result, lse = csr_attention(
        q=query,
        keys=key,
        values=value,
        qo_indptr=cum_seq_lens_q,
        kv_indptr=cum_seq_lens_kv,
        kv_indices=None,
        kv_lens=None,
        planned=None,
        packed_mask=None,
        mask_indptr=None,
        is_causal=is_causal,
        window_left=window_left,
        scale=float(bmm1_scale),
        out_scale=float(bmm2_scale),
        out_dtype=query.dtype if out is None else out.dtype,
    )
    result = result if out is None else out.copy_(result.view_as(out))
    return (result, lse) if return_lse else result
