"""The two reference calls as opaque operations ``specgate::…``: one dispatched call each.

Arguments are the fields of ``DecodeCall`` and ``ContextCall``. The operations are registered by
hand, because ``custom_op`` imports the compiler: a second at every start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from harness.core.opaque_operations import SHAPES
from harness.kernels.paged_kv import PagedKeys, is_readable
from harness.kernels.torch_attention import Softmax, attend
from harness.kernels.value_checks import check_cumulative, check_lengths

NAMESPACE = "specgate"
OpaqueFunction = Callable[..., torch.Tensor]
Function = TypeVar("Function", bound=Callable[..., Any])
SCHEMAS: dict[str, str] = {}


def _opaque(function: OpaqueFunction) -> OpaqueFunction:
    """Register a function as ``specgate::<its name>``, with a shape function beside it.

    Its own calls of torch are hidden from modes, which would only be slowed down by them.
    """

    @wraps(function)
    def hidden(**fields: Any) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            return function(**fields)

    SCHEMAS[function.__name__] = torch.library.infer_schema(function, mutates_args=())
    return _register(function.__name__, hidden, SCHEMAS[function.__name__], _result)


def operation(shapes: Callable[..., Any]) -> Callable[[Function], Function]:
    """Register a function as ``specgate::<its name>``; ``shapes`` makes results of its shapes."""

    def register(function: Function) -> Function:
        schema = torch.library.infer_schema(function, mutates_args=())
        return cast(Function, _register(function.__name__, function, schema, shapes))

    return register


def _register(
    name: str, function: Callable[..., Any], schema: str, shapes: Callable[..., Any]
) -> Callable[..., Any]:
    torch.library.define(f"{NAMESPACE}::{name}", schema)
    torch.library.impl(f"{NAMESPACE}::{name}", "CompositeExplicitAutograd")(function)
    torch.library.register_fake(f"{NAMESPACE}::{name}")(shapes)
    registered: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), name).default
    SHAPES[registered] = shapes
    return registered


def opaque(kind: str, name: str, function: OpaqueFunction) -> OpaqueFunction:
    """Register a function that takes what the reference call of this kind takes.

    Args:
        kind: "decode" or "context".
        name: of the operation, unique in the process.
        function: of the call's fields, by keyword.
    """
    return _register(name, function, SCHEMAS[f"paged_{kind}"], _result)


def _result(
    *,
    q: torch.Tensor,
    caches: Sequence[torch.Tensor],
    kv_lora_rank: int,
    out_dtype: torch.dtype,
    **_: object,
) -> torch.Tensor:
    value_dim = kv_lora_rank or caches[-1].shape[-1]
    return q.new_empty(*q.shape[:2], value_dim, dtype=out_dtype)


def _decode(
    operation: str, q: torch.Tensor, paged: PagedKeys, q_len: int, softmax: Softmax
) -> torch.Tensor:
    check_lengths(operation, paged, torch.full_like(paged.seq_lens, q_len))
    keys, values = paged.gather()
    position = paged.seq_lens[:, None] - q_len + torch.arange(q_len, device=q.device)
    rows = q.unflatten(0, (paged.seq_lens.shape[0], q_len)).float()
    return attend(rows, keys, values, position, softmax).flatten(0, 1)


def _context(
    operation: str,
    q: torch.Tensor,
    paged: PagedKeys,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q_len: int,
    softmax: Softmax,
) -> torch.Tensor:
    tokens, bs = q.shape[0], paged.seq_lens.shape[0]
    check_cumulative(operation, cu_q, cu_k, paged.seq_lens, tokens=tokens, max_q_len=max_q_len)
    q_lens = cu_q.diff()
    check_lengths(operation, paged, q_lens)
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


@_opaque
def paged_decode(
    *,
    q: torch.Tensor,
    caches: Sequence[torch.Tensor],
    kv_lora_rank: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float,
    bmm2_scale: float,
    out_dtype: torch.dtype,
    window_left: int,
    sinks: torch.Tensor | None,
    q_len_per_req: int,
    packed_mask: torch.Tensor | None,
) -> torch.Tensor:
    """See ``DecodeCall``."""
    paged = PagedKeys(tuple(caches), block_tables, seq_lens, max_seq_len, kv_lora_rank)
    softmax = Softmax(bmm1_scale, window_left, sinks, packed_mask)
    result = _decode("paged_decode", q, paged, q_len_per_req, softmax)
    return result.mul_(bmm2_scale).to(out_dtype)


@_opaque
def paged_context(
    *,
    q: torch.Tensor,
    caches: Sequence[torch.Tensor],
    kv_lora_rank: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float,
    bmm2_scale: float,
    out_dtype: torch.dtype,
    window_left: int,
    sinks: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_q_len: int,
) -> torch.Tensor:
    """See ``ContextCall``."""
    paged = PagedKeys(tuple(caches), block_tables, seq_lens, max_seq_len, kv_lora_rank)
    softmax = Softmax(bmm1_scale, window_left, sinks)
    result = _context("paged_context", q, paged, cu_seqlens_q, cu_seqlens_k, max_q_len, softmax)
    return result.mul_(bmm2_scale).to(out_dtype)
