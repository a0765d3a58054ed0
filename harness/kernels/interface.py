"""The interface of every kernel family, and the two calls it serves: tensors in, tensors out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from harness.core.capability import Capability


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """What decode and context calls have in common: paged attention of bs requests.

    The softmax argument is ``bmm1_scale * q @ k``; the result is multiplied by ``bmm2_scale``.

    Args:
        q: [T, heads, head_dim] packed query tokens, request after request, contiguous.
        caches: (keys, values), [pages, page_size, kv_heads, head_dim] each, or MLA's (latent,),
            [pages, page_size, kv_lora_rank + qk_rope_head_dim].
        kv_lora_rank: leading columns of the latent that are the value; 0 for MHA.
        block_tables: [bs, width] int32, page ids.
        seq_lens: [bs] int32, keys per request in this call.
        max_seq_len: bound of ``seq_lens``, known to the host.
        bmm1_scale: see above.
        bmm2_scale: see above.
        out_dtype: of the result.
        window_left: keys seen to the left besides the query's own, -1 for all; MHA only.
        sinks: [heads] float32, attention sinks; MHA only.
    """

    q: torch.Tensor
    caches: tuple[torch.Tensor, ...]
    kv_lora_rank: int = 0
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int
    bmm1_scale: float
    bmm2_scale: float
    out_dtype: torch.dtype
    window_left: int = -1
    sinks: torch.Tensor | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of an operation, by name; which forward it belongs to is none."""
        return {name: value for name, value in vars(self).items() if name != "forward"}

    @property
    def batch_size(self) -> int:
        """Requests, padding included."""
        return self.block_tables.shape[0]

    @property
    def value_dim(self) -> int:
        """Size of a value, and of a row of the result."""
        return self.kv_lora_rank or self.caches[-1].shape[-1]

    @property
    def is_empty(self) -> bool:
        """Whether there is no query to answer."""
        return not self.q.shape[0]


@dataclass(frozen=True, kw_only=True)
class DecodeCall(AttentionCall):
    """The same number of queries for each request; T = bs * q_len_per_req.

    Query j of a request sees its first ``seq_lens - q_len_per_req + j + 1`` keys.

    Args:
        q_len_per_req: query tokens per request.
        packed_mask: [bs, q_len_per_req, 2 * ceil(q_len_per_req / 32)] uint16, bit j of row i set
            where query i sees the request's query token j; for kernels that need it. MHA only.
        forward: an object that the calls of one forward share, recorded or not: a kernel may plan
            by lengths at the first of them. None where calls have nothing in common.
    """

    q_len_per_req: int
    packed_mask: torch.Tensor | None = None
    forward: object | None = None


@dataclass(frozen=True, kw_only=True)
class ContextCall(AttentionCall):
    """Ragged queries, aligned to the end of each request's keys.

    Rows of the result after ``cu_seqlens_q[-1]`` are zero.

    Args:
        cu_seqlens_q: [bs + 1] int32, where each request's queries begin and end.
        cu_seqlens_k: [bs + 1] int32, likewise for its keys.
        max_q_len: bound of the query tokens per request, known to the host.
        forward: an object that the calls of one eager forward share, whose index tensors nobody
            changes in between; None where a graph may read them.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_q_len: int
    forward: object | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is no query to answer."""
        return not (self.q.shape[0] and self.batch_size and self.max_q_len)


class Kernel(Protocol):
    """Paged attention over a KV cache.

    Every call returns [T, heads, value dim] in ``out_dtype``. On CUDA a call can be captured in a
    graph once it has run with the same shapes and numbers, and then follows the tensors' values.

    Raises:
        KernelRefusal: from any call, for an argument the kernel does not accept; before launch.
    """

    @property
    def capability(self) -> Capability:
        """What this kernel accepts."""
        ...

    def decode(self, call: DecodeCall) -> torch.Tensor:
        """MHA with the same number of queries for each request."""
        ...

    def context(self, call: ContextCall) -> torch.Tensor:
        """MHA with ragged queries."""
        ...

    def mla_decode(self, call: DecodeCall) -> torch.Tensor:
        """Absorbed MLA with the same number of queries for each request."""
        ...

    def mla_context(self, call: ContextCall) -> torch.Tensor:
        """Absorbed MLA with ragged queries."""
        ...
