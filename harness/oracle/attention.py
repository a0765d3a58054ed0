"""Dense attention of one request over its whole history, exact and at a subject's dtype."""

from __future__ import annotations

import torch

MAX_SCORES = 1 << 22


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    prefix_len: int,
    scale: float,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Exact attention of the n newest tokens of one request: [n, heads, v_dim] in ``dtype``.

    Args:
        q: [n, heads, dim].
        k: [prefix_len + n, kv_heads, dim], one row per token in order of position.
        v: [prefix_len + n, kv_heads, v_dim].
        prefix_len: tokens before the first query; query j sees keys 0 … prefix_len + j.
        scale: factor of the scores.
        window_left: keys seen to the left of the query besides itself, -1 for all.
        sinks: [heads], one extra softmax logit per head, which takes weight and gives no value.
        dtype: of the arithmetic and of the result.

    Raises:
        ValueError: the shapes do not describe one request.
    """
    _check(q, k, v, prefix_len)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    return _blockwise(q, k, v, prefix_len, scale, window_left, sinks, dtype)


def low_precision_attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    prefix_len: int,
    scale: float,
    dtype: torch.dtype,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    weights_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The same as a plain dense implementation at ``dtype`` computes it; the measure of budgets.

    Inputs and probabilities are rounded to ``dtype``; products accumulate in float32. A tensor
    that is FP8 already is taken as it lies in a cache: its exact values times ``k_scale`` or
    ``v_scale``. Probabilities are rounded to ``weights_dtype`` instead where that is given, as
    kernels do that multiply them by an FP8 cache. Arguments, shapes and errors are those of
    ``attend``.
    """
    _check(q, k, v, prefix_len)
    q, k, v = (t.float() if t.itemsize == 1 else t.to(dtype).float() for t in (q, k, v))
    rounded = weights_dtype or dtype
    out = _blockwise(q, k, v, prefix_len, scale * k_scale, window_left, sinks, rounded)
    return (out * v_scale).to(dtype)


def quantize(x: torch.Tensor, scale: float) -> torch.Tensor:
    """``x`` as a float8_e4m3fn cache with a per-tensor scale stores it; saturates."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    return (x / scale).clamp_(-largest, largest).to(torch.float8_e4m3fn)


def quantize_dequantize(x: torch.Tensor, scale: float) -> torch.Tensor:
    """``x`` after a round trip through that cache, in its own dtype."""
    # By way of float32, which holds FP8 exactly: torch takes longer to widen it to float64 at once.
    return quantize(x, scale).float().to(x.dtype).mul_(scale)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prefix_len: int) -> None:
    total = prefix_len + q.shape[0]
    fits = prefix_len >= 0 and k.shape[0] == v.shape[0] == total
    fits = fits and q.shape[2] == k.shape[2] and k.shape[1] == v.shape[1]
    if not fits or q.shape[1] % k.shape[1]:
        shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        tokens = f"{prefix_len} + {q.shape[0]} tokens"
        raise ValueError(f"{shapes} do not describe {tokens} of one request")


def _blockwise(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    prefix_len: int,
    scale: float,
    window_left: int,
    sinks: torch.Tensor | None,
    probability_dtype: torch.dtype,
) -> torch.Tensor:
    """Attention in blocks of queries, each with the keys that any of them sees, to bound memory."""
    rows = max(1, MAX_SCORES // (q.shape[1] * max(1, k.shape[0])))
    blocks = [q.new_empty(0, q.shape[1], v.shape[2])]
    for start in range(0, q.shape[0], rows):
        block = q[start : start + rows]
        last = prefix_len + start + block.shape[0]
        first = 0 if window_left < 0 else max(0, prefix_len + start - window_left)
        own = torch.arange(prefix_len + start, last, device=q.device)[:, None]
        key = torch.arange(first, last, device=q.device)[None, :]
        seen = key <= own
        if window_left >= 0:
            seen &= key >= own - window_left
        weights = _softmax(block, k[first:last], seen, scale, sinks)
        weights = _rounded(weights, probability_dtype).to(v.dtype)
        out = torch.einsum("hgnl,lhd->nhgd", weights, v[first:last])
        blocks.append(out.flatten(1, 2))
    return torch.cat(blocks)


def _rounded(weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Probabilities at a dtype; in FP8 the largest of a row becomes the largest number there is."""
    if dtype.itemsize > 1:
        return weights.to(dtype)
    peak = weights.amax(-1, keepdim=True)
    return quantize_dequantize(weights / peak, 1 / torch.finfo(dtype).max) * peak


def _softmax(
    q: torch.Tensor,
    k: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Probabilities [kv_heads, group, n, keys]."""
    grouped = q.unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("nhgd,lhd->hgnl", grouped, k).mul_(scale).masked_fill_(~seen, -torch.inf)
    peak = scores.amax(-1, keepdim=True)
    if sinks is None:
        weights = scores.sub_(peak).exp_()
        return weights.div_(weights.sum(-1, keepdim=True))
    sink = sinks.to(scores).view(k.shape[1], -1, 1, 1)
    peak = torch.maximum(peak, sink)
    weights = scores.sub_(peak).exp_()
    return weights.div_(weights.sum(-1, keepdim=True) + torch.exp(sink - peak))
