"""The four kernels as opaque operations ``specgate::…``: one dispatched call each.

Registered by hand, because ``custom_op`` imports the compiler: a second at every start.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from harness.kernels.paged_kv import PagedKeys, is_readable
from harness.kernels.torch_attention import Softmax, attend
from harness.kernels.value_checks import check_cumulative, check_lengths

NAMESPACE = "specgate"
Kernel = Callable[..., torch.Tensor]


def _opaque(value_dim: Callable[..., int]) -> Callable[[Kernel], Kernel]:
    """Register a function as ``specgate::<its name>``, with a shape function beside it.

    Args:
        value_dim: value size of a head, from the positional arguments behind the query.
    """

    def register(kernel: Kernel) -> Kernel:
        name = f"{NAMESPACE}::{kernel.__name__}"
        schema = torch.library.infer_schema(kernel, mutates_args=())
        torch.library.define(name, schema)
        torch.library.impl(name, "CompositeExplicitAutograd")(kernel)

        def shape(
            q: torch.Tensor, *args: object, out_dtype: torch.dtype, **_: object
        ) -> torch.Tensor:
            return q.new_empty(*q.shape[:2], value_dim(*args), dtype=out_dtype)

        torch.library.register_fake(name)(shape)
        registered: Kernel = getattr(getattr(torch.ops, NAMESPACE), kernel.__name__).default
        return registered

    return register


def _decode(
    kernel: str, q: torch.Tensor, paged: PagedKeys, q_len: int, softmax: Softmax
) -> torch.Tensor:
    check_lengths(kernel, paged, torch.full_like(paged.seq_lens, q_len))
    keys, values = paged.gather()
    position = paged.seq_lens[:, None] - q_len + torch.arange(q_len, device=q.device)
    rows = q.unflatten(0, (paged.seq_lens.shape[0], q_len)).float()
    return attend(rows, keys, values, position, softmax).flatten(0, 1)


def _context(
    kernel: str,
    q: torch.Tensor,
    paged: PagedKeys,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q_len: int,
    softmax: Softmax,
) -> torch.Tensor:
    tokens, bs = q.shape[0], paged.seq_lens.shape[0]
    check_cumulative(kernel, cu_q, cu_k, paged.seq_lens, tokens=tokens, max_q_len=max_q_len)
    q_lens = cu_q.diff()
    check_lengths(kernel, paged, q_lens)
    longest = max_q_len
    if is_readable(q_lens):
        longest = int(q_lens.max()) if bs else 0
    keys, values = paged.gather()
    if not (tokens and longest):
        return q.new_zeros(tokens, q.shape[1], values.shape[-1], dtype=torch.float32)
    slot = torch.arange(longest, device=q.device)
    position = torch.where(slot < q_lens[:, None], (paged.seq_lens - q_lens)[:, None] + slot, -1)
    rows = q[(cu_q[:-1, None] + slot).clamp_max(tokens - 1)].float()
    result = attend(rows, keys, values, position, softmax)
    token = torch.arange(tokens, device=q.device)
    request = torch.searchsorted(cu_q[1:], token, right=True).clamp_max(bs - 1)
    picked = result[request, (token - cu_q[request]).clamp_max(longest - 1)]
    return picked.masked_fill((token >= cu_q[-1])[:, None, None], 0)


@_opaque(lambda k_cache, v_cache, *_: v_cache.shape[-1])
def paged_decode(
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
    window_left: int,
    sinks: torch.Tensor | None,
    packed_mask: torch.Tensor | None,
) -> torch.Tensor:
    """See ``Provider.decode``."""
    paged = PagedKeys((k_cache, v_cache), block_tables, seq_lens, max_seq_len)
    softmax = Softmax(bmm1_scale, window_left, sinks, packed_mask)
    return (_decode("paged_decode", q, paged, q_len_per_req, softmax) * bmm2_scale).to(out_dtype)


@_opaque(lambda k_cache, v_cache, *_: v_cache.shape[-1])
def paged_context(
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
    bmm1_scale: float,
    bmm2_scale: float,
    out_dtype: torch.dtype,
    window_left: int,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """See ``Provider.context``."""
    paged = PagedKeys((k_cache, v_cache), block_tables, seq_lens, max_kv_len)
    softmax = Softmax(bmm1_scale, window_left, sinks)
    result = _context("paged_context", q, paged, cu_seqlens_q, cu_seqlens_k, max_q_len, softmax)
    return (result * bmm2_scale).to(out_dtype)


@_opaque(lambda kv_cache, kv_lora_rank, *_: kv_lora_rank)
def mla_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_lora_rank: int,
    *,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    q_len_per_req: int,
    max_seq_len: int,
    bmm1_scale: float,
    bmm2_scale: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """See ``Provider.mla_decode``."""
    paged = PagedKeys((kv_cache,), block_tables, seq_lens, max_seq_len, kv_lora_rank)
    result = _decode("mla_decode", q, paged, q_len_per_req, Softmax(bmm1_scale))
    return (result * bmm2_scale).to(out_dtype)


@_opaque(lambda kv_cache, kv_lora_rank, *_: kv_lora_rank)
def mla_context(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_lora_rank: int,
    *,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float,
    bmm2_scale: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """See ``Provider.mla_context``."""
    paged = PagedKeys((kv_cache,), block_tables, seq_lens, max_kv_len, kv_lora_rank)
    softmax = Softmax(bmm1_scale)
    result = _context("mla_context", q, paged, cu_seqlens_q, cu_seqlens_k, max_q_len, softmax)
    return (result * bmm2_scale).to(out_dtype)
