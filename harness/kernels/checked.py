"""The one place where a call is checked: every kernel refuses through it, then only launches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import TypedDict, Unpack

import torch

from harness.core.capability import Capability
from harness.core.case import Family
from harness.kernels import shape_checks as strict


class Paging(TypedDict):
    """What every entry takes; shapes in ``kernels.base``."""

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    bmm1_scale: float
    bmm2_scale: float
    out_dtype: torch.dtype


class Uniform(Paging):
    """What decode entries take besides."""

    q_len_per_req: int
    max_seq_len: int


class Ragged(Paging):
    """What context entries take besides."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_q_len: int
    max_kv_len: int


KernelFunction = Callable[..., torch.Tensor]
"""A kernel behind the checks: query, cache (and kv_lora_rank), and the rest by name."""


class CheckedKernel:
    """A ``Provider`` that refuses what its Capability refuses and launches everything else.

    A call without a query row or without a request launches nothing and returns zeros.

    Args:
        capability: what is refused.
        kernels: entry -> what launches it; entries of a family that the capability lacks are never
            reached.

    Attributes:
        kernels: as given.
        calls: entries called, in order: "decode", "context", "mla_decode" or "mla_context". A call
            that is being recorded appears once, its replays do not.
    """

    def __init__(self, capability: Capability, kernels: Mapping[str, KernelFunction]) -> None:
        self._capability = capability
        self.kernels = kernels
        self.calls: list[str] = []

    @property
    def capability(self) -> Capability:
        """What this kernel accepts."""
        return self._capability

    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        window_left: int = -1,
        sinks: torch.Tensor | None = None,
        packed_mask: torch.Tensor | None = None,
        **call: Unpack[Uniform],
    ) -> torch.Tensor:
        """MHA: q_len_per_req queries a request; see ``Provider.decode``."""
        caches, tables, q_len = (k_cache, v_cache), call["block_tables"], call["q_len_per_req"]
        checks = chain(
            strict.uniform(self.capability, q, tables, q_len),
            strict.packed_mask(self.capability, packed_mask, tables, q_len),
            strict.window_and_sinks(self.capability, q, window_left, sinks, q_len),
        )
        self._check("decode", Family.MHA, q, caches, call, checks)
        if not q.shape[0]:
            return _nothing(q, v_cache.shape[-1], call)
        options = {"window_left": window_left, "sinks": sinks, "packed_mask": packed_mask}
        return self.kernels["decode"](q, k_cache, v_cache, **options, **call)

    def context(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        batch_size: int,
        window_left: int = -1,
        sinks: torch.Tensor | None = None,
        **call: Unpack[Ragged],
    ) -> torch.Tensor:
        """MHA: ragged queries; see ``Provider.context``."""
        caches = (k_cache, v_cache)
        cut = (call["cu_seqlens_q"], call["cu_seqlens_k"])
        checks = chain(
            strict.ragged(call["block_tables"], batch_size, *cut),
            strict.window_and_sinks(self.capability, q, window_left, sinks),
        )
        self._check("context", Family.MHA, q, caches, call, checks)
        if not (q.shape[0] and batch_size and call["max_q_len"]):
            return _nothing(q, v_cache.shape[-1], call)
        options = {"window_left": window_left, "sinks": sinks}
        return self.kernels["context"](q, k_cache, v_cache, **options, **call)

    def mla_decode(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        *,
        kv_lora_rank: int,
        **call: Unpack[Uniform],
    ) -> torch.Tensor:
        """Absorbed MLA: q_len_per_req queries a request; see ``Provider.mla_decode``."""
        tables, q_len = call["block_tables"], call["q_len_per_req"]
        checks = chain(
            strict.latent(self.capability, kv_cache, kv_lora_rank),
            strict.uniform(self.capability, q, tables, q_len),
        )
        self._check("mla_decode", Family.MLA, q, (kv_cache,), call, checks)
        if not q.shape[0]:
            return _nothing(q, kv_lora_rank, call)
        return self.kernels["mla_decode"](q, kv_cache, kv_lora_rank, **call)

    def mla_context(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        *,
        kv_lora_rank: int,
        batch_size: int,
        **call: Unpack[Ragged],
    ) -> torch.Tensor:
        """Absorbed MLA: ragged queries; see ``Provider.mla_context``."""
        cut = (call["cu_seqlens_q"], call["cu_seqlens_k"])
        checks = chain(
            strict.latent(self.capability, kv_cache, kv_lora_rank),
            strict.ragged(call["block_tables"], batch_size, *cut),
        )
        self._check("mla_context", Family.MLA, q, (kv_cache,), call, checks)
        if not (q.shape[0] and batch_size and call["max_q_len"]):
            return _nothing(q, kv_lora_rank, call)
        return self.kernels["mla_context"](q, kv_cache, kv_lora_rank, **call)

    def _check(
        self,
        entry: str,
        family: Family,
        q: torch.Tensor,
        caches: tuple[torch.Tensor, ...],
        call: Paging,
        checks: Iterable[strict.ShapeCheck],
    ) -> None:
        capability = self.capability
        common = chain(
            strict.query_and_cache(capability, family, q, caches),
            strict.tables(capability, caches[0], call["block_tables"], call["seq_lens"]),
            strict.output(capability, call["out_dtype"]),
        )
        strict.refuse_unless(f"{capability.name} {entry}", chain(common, checks))
        self.calls.append(entry)


def _nothing(q: torch.Tensor, value_dim: int, call: Paging) -> torch.Tensor:
    """Zeros [T, heads, value_dim] for a call with no query row or no request."""
    return q.new_zeros(q.shape[0], q.shape[1], value_dim, dtype=call["out_dtype"])


def finished(out: torch.Tensor, bmm2_scale: float, out_dtype: torch.dtype) -> torch.Tensor:
    """What a kernel that knows neither the output's scale nor its dtype still lacks."""
    return (out if bmm2_scale == 1 else out * bmm2_scale).to(out_dtype)
