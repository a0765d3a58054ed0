"""Attention of gathered keys in float32, vectorised over requests and query tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harness.kernels.paged_kv import is_readable

SCORES_PER_BLOCK = 1 << 24
"""Scores held at once; long prefills are cut into blocks of query tokens to stay within it."""


@dataclass(frozen=True)
class Softmax:
    """Scale, window, sinks and mask of a softmax.

    Args:
        scale: of the softmax argument.
        window_left: keys seen to the left besides the query's own, -1 for all.
        sinks: [heads] float32, one logit per head that takes probability and gives nothing.
        packed_mask: [bs, queries, words] uint16, replaces causality inside the last ``queries``
            keys of each request.
    """

    scale: float
    window_left: int = -1
    sinks: torch.Tensor | None = None
    packed_mask: torch.Tensor | None = None


def visible_keys(position: torch.Tensor, num_keys: int, softmax: Softmax) -> torch.Tensor:
    """[bs, queries, keys] bool: which of the gathered keys a query sees.

    Args:
        position: [bs, queries] index of the query's own key; -1 for a row that does not exist.
        num_keys: keys gathered.
        softmax: window and mask.
    """
    key = torch.arange(num_keys, device=position.device)
    seen = key <= position[:, :, None]
    if softmax.packed_mask is not None:
        queries = position.shape[1]
        query = torch.arange(queries, device=position.device)
        words = softmax.packed_mask.to(torch.int32)[:, :, query // 16]
        bits = ((words >> (query % 16)) & 1).bool()
        own = (key - position[:, :1])[:, None, :].expand(-1, queries, -1)
        chosen = bits.gather(2, own.clamp(0, queries - 1))
        seen = torch.where((own >= 0) & (own < queries), chosen, seen)
    if softmax.window_left >= 0:
        seen = seen & (key >= position[:, :, None] - softmax.window_left)
    return seen


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    softmax: Softmax,
) -> torch.Tensor:
    """[bs, queries, heads, value dim] float32.

    A query that sees nothing yields zeros. A key or value with a NaN or an infinity reaches exactly
    the queries that see it, as NaN.

    Args:
        q: [bs, queries, heads, head_dim] float32.
        keys: [bs, keys, kv_heads, head_dim] float32.
        values: [bs, keys, kv_heads, value dim] float32; those with a NaN or an infinity are
            overwritten, in MLA's keys, too, whose scores no longer matter.
        position: see ``visible_keys``.
        softmax: scale, window, sinks and mask.
    """
    if not keys.shape[1]:
        return q.new_zeros(*q.shape[:3], values.shape[-1])
    seen = visible_keys(position, keys.shape[1], softmax)
    broken = ~values.sum(-1).isfinite()
    readable, spoils = is_readable(broken), None
    if not readable or bool(broken.any()):
        spoils = broken.float().permute(0, 2, 1)[..., None]
        # Few are; a mask would walk through all values.
        values[broken.nonzero(as_tuple=True) if readable else broken] = 0
    values = values.transpose(1, 2)
    # A product would lay them out, too, but element by element, which takes six times as long.
    keys = keys.transpose(1, 2).contiguous().transpose(2, 3)
    rows = max(1, SCORES_PER_BLOCK // max(1, q.shape[0] * q.shape[2] * keys.shape[3]))
    if rows >= q.shape[1]:
        return _block(q, keys, values, spoils, seen, softmax).contiguous()
    blocks = [
        _block(queries, keys, values, spoils, visible, softmax)
        for queries, visible in zip(q.split(rows, 1), seen.split(rows, 1), strict=True)
    ]
    return torch.cat(blocks, 1)


def _block(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    spoils: torch.Tensor | None,
    seen: torch.Tensor,
    softmax: Softmax,
) -> torch.Tensor:
    kv_heads = keys.shape[1]
    grouped = q.unflatten(2, (kv_heads, q.shape[2] // kv_heads)).permute(0, 2, 3, 1, 4)
    group_and_rows = grouped.shape[2:4]
    scores = (grouped.flatten(2, 3) @ keys).unflatten(2, group_and_rows).mul_(softmax.scale)
    scores.masked_fill_(~seen[:, None, None], -torch.inf)
    # A row that sees nothing has no largest score; any finite one gives it weights of zero.
    top = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    if softmax.sinks is None:
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
    else:
        sinks = softmax.sinks.view(kv_heads, -1, 1, 1)
        top = top.maximum(sinks)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True) + (sinks - top).exp()
    result: torch.Tensor = (weights.flatten(2, 3) @ values).unflatten(2, group_and_rows)
    result = result.div_(total).masked_fill_(total == 0, 0)
    if spoils is not None:
        reached = seen.float()[:, None] @ spoils
        result.masked_fill_(reached[:, :, None] > 0, torch.nan)
    return result.permute(0, 3, 1, 2, 4).flatten(2, 3)
