"""What every kernel family offers: tensors in, tensors out."""

from __future__ import annotations

from typing import Protocol

import torch

from harness.core.capability import Capability


class Kernel(Protocol):
    """Paged attention over a KV cache.

    Shapes, with bs requests, T packed query tokens and P cache pages:

    * ``q`` [T, heads, head_dim], packed request after request, contiguous. Decode calls have
      T = bs * q_len_per_req, and query j of a request sees ``seq_lens - q_len_per_req + j + 1``
      keys.
      Context calls have ragged requests cut by ``cu_seqlens_q``, aligned to the end of the keys.
    * ``k_cache``, ``v_cache`` [P, page_size, kv_heads, head_dim]; MLA: ``kv_cache``
      [P, page_size, kv_lora_rank + qk_rope_head_dim], whose first kv_lora_rank columns are the
      value.
    * ``block_tables`` [bs, width] int32, ``seq_lens`` [bs] int32 (keys a request in this call),
      ``cu_seqlens_q`` and ``cu_seqlens_k`` [bs + 1] int32.
    * ``packed_mask`` [bs, q_len_per_req, 2 * ceil(q_len_per_req / 32)] uint16, bit j of row i set
      where query i sees the request's query token j; for kernels that need it.
    * ``sinks`` [heads] float32. ``window_left`` -1 for none.

    The softmax argument is ``bmm1_scale * q @ k``; the result is multiplied by ``bmm2_scale``.
    Every call returns [T, heads, value dim] in ``out_dtype``; rows of a context call behind
    ``cu_seqlens_q[-1]`` are zero. On CUDA a call can be captured in a graph once it has run with
    the same shapes and numbers, and then follows the tensors' values.

    Raises:
        KernelRefusal: from any call, for an argument the kernel does not accept; before launch.
    """

    @property
    def capability(self) -> Capability:
        """What this kernel accepts."""
        ...

    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        q_len_per_req: int,
        max_seq_len: int,
        bmm1_scale: float,
        bmm2_scale: float,
        out_dtype: torch.dtype,
        window_left: int = -1,
        sinks: torch.Tensor | None = None,
        packed_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """MHA: q_len_per_req queries a request."""
        ...

    def context(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_q_len: int,
        max_kv_len: int,
        batch_size: int,
        bmm1_scale: float,
        bmm2_scale: float,
        out_dtype: torch.dtype,
        window_left: int = -1,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """MHA: ragged queries."""
        ...

    def mla_decode(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        *,
        kv_lora_rank: int,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        q_len_per_req: int,
        max_seq_len: int,
        bmm1_scale: float,
        bmm2_scale: float,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """Absorbed MLA: q_len_per_req queries a request."""
        ...

    def mla_context(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        *,
        kv_lora_rank: int,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_q_len: int,
        max_kv_len: int,
        batch_size: int,
        bmm1_scale: float,
        bmm2_scale: float,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """Absorbed MLA: ragged queries."""
        ...
