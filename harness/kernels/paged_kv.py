"""Paged keys and values of a call: cache pages that a block table lists."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harness.kernels.fp8 import widened


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether the host may read values of this tensor now; not while CUDA captures the stream."""
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


@dataclass(frozen=True)
class PagedKeys:
    """The cache side of one kernel call.

    Args:
        caches: (keys, values), [pages, page_size, kv_heads, dim] each, or MLA's (latent,),
            [pages, page_size, kv_lora_rank + rope].
        block_tables: [bs, width] int32.
        seq_lens: [bs] int32, keys per request.
        max_seq_len: bound of ``seq_lens``, known to the host.
        kv_lora_rank: leading columns of the latent that are the value; 0 for MHA.
    """

    caches: tuple[torch.Tensor, ...]
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int
    kv_lora_rank: int = 0

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.caches[0].shape[1]

    def live_columns(self, width: int) -> torch.Tensor:
        """[bs, width] bool: the columns of the block table that hold pages of a request."""
        starts = torch.arange(width, device=self.seq_lens.device) * self.page_size
        return starts < self.seq_lens[:, None]

    def gather(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, [bs, keys, kv_heads, dim] float32 each.

        Only pages that some request holds are read; a column past a request's own pages yields
        page 0, which no query sees.
        """
        longest = self.max_seq_len
        if is_readable(self.seq_lens):
            longest = int(self.seq_lens.max()) if self.seq_lens.numel() else 0
        width = min(self.block_tables.shape[1], -(-longest // self.page_size))
        table = self.block_tables[:, :width].long().where(self.live_columns(width), 0)
        gathered = [widened(cache[table].flatten(1, 2)) for cache in self.caches]
        if self.kv_lora_rank:
            latent = gathered[0][:, :, None]
            return latent, latent[..., : self.kv_lora_rank]
        return gathered[0], gathered[1]
