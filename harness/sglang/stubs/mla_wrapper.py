"""FlashInfer's wrapper of absorbed MLA over slots of the latent cache.

Its kernel takes where a request's queries and slots begin, and how many there are, from the plan in
the integer workspace; of the index tensors it reads the slots alone (flashinfer 0.6 and later,
include/flashinfer/attention/mla.cuh).
"""

from __future__ import annotations

from typing import Any

import torch

from harness.kernels.csr_attention import csr_attention
from harness.kernels.shape_checks import refuse_unless
from harness.sglang.stubs.wrappers import MAX_REQUESTS, Wrapper, store, token_pages

HEAD_DIMS = (512, 64)


class MLAModule:
    """What a plan hands the host's numbers to."""

    def plan(
        self,
        float_workspace: torch.Tensor,
        int_workspace: torch.Tensor,
        pinned: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_lens: torch.Tensor,
        num_heads: int,
        head_dim_o: int,
        causal: bool,
    ) -> list[int]:
        """Starts and lengths into the integer workspace [3, MAX_REQUESTS + 1]."""
        store(int_workspace, qo_indptr, kv_indptr, kv_lens)
        return []


class BatchMLAPagedAttentionWrapper(Wrapper):
    """Ragged queries over slots of the latent cache."""

    workspace_rows = 3

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, "NHD", use_cuda_graph, backend)
        self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr, kv_indptr
        self._kv_indices_buf, self._kv_len_arr_buf = kv_indices, kv_len_arr
        self._causal = False

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        """Read a batch's index tensors."""
        dims, bs = (head_dim_ckv, head_dim_kpe), len(qo_indptr) - 1
        refuse_unless(
            "plan",
            [
                (dims == HEAD_DIMS, "head_dim_ckv, head_dim_kpe", dims, HEAD_DIMS),
                (page_size == 1, "page_size", page_size, "1: sglang lists token slots"),
                (len(kv_indptr) == bs + 1, "kv_indptr size", len(kv_indptr), bs + 1),
                (len(kv_len_arr) == bs, "kv_len_arr size", len(kv_len_arr), bs),
            ],
        )
        self._keep_dtypes(q_data_type, kv_data_type)
        self._geometry = (num_heads, 1, head_dim_ckv)
        self._keep(
            _qo_indptr_buf=qo_indptr,
            _kv_indptr_buf=kv_indptr,
            _kv_indices_buf=kv_indices,
            _kv_len_arr_buf=kv_len_arr,
        )
        self._batch_size, self._causal, self._sm_scale = bs, causal, sm_scale
        self._cached_module = MLAModule()
        self._plan_info = self._cached_module.plan(
            *self._workspaces,
            qo_indptr.to("cpu"),
            kv_indptr.to("cpu"),
            kv_len_arr.to("cpu"),
            num_heads,
            head_dim_ckv,
            causal,
        )

    begin_forward = plan

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        """[T, heads, head_dim_ckv] in the query's dtype, and with it what ``return_lse`` asks for.

        Args:
            q_nope: [T, heads, head_dim_ckv], contiguous or a slice.
            q_pe: [T, heads, head_dim_kpe].
            ckv_cache: [slots, 1, head_dim_ckv].
            kpe_cache: [slots, 1, head_dim_kpe].
            out: written to if given.
            return_lse: whether the base-2 logarithm of each softmax's sum is returned.
        """
        latent, rope = (token_pages(cache) for cache in (ckv_cache, kpe_cache))
        self._checked(q_nope.contiguous(), latent, rope)
        workspace, bs = self._int_workspace_buffer, self._batch_size
        assert bs <= MAX_REQUESTS
        result, lse = csr_attention(
            q=torch.cat((q_nope, q_pe), -1),
            keys=torch.cat((latent, rope), -1),
            values=latent,
            qo_indptr=workspace[0, : bs + 1],
            kv_indptr=workspace[1, : bs + 1],
            kv_indices=self._kv_indices_buf,
            kv_lens=workspace[2, :bs],
            planned=None,
            packed_mask=None,
            mask_indptr=None,
            is_causal=self._causal,
            window_left=-1,
            scale=self._softmax_scale(q_nope),
            out_scale=1.0,
            out_dtype=q_nope.dtype,
        )
        result = result if out is None else out.copy_(result)
        return (result, lse) if return_lse else result
