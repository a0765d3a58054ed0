"""Functions of sgl_kernel that backends call on a CPU, too."""

from __future__ import annotations

from typing import Any

import torch

FP8 = torch.float8_e4m3fn


def sgl_per_tensor_quant_fp8(
    x: torch.Tensor, out: torch.Tensor, scale: torch.Tensor, is_static: bool
) -> None:
    """Quantize x into out by ``scale`` [1] float32, which is computed first unless static."""
    limit = torch.finfo(FP8).max
    if not is_static:
        scale.copy_(x.abs().amax().float().reshape(1) / limit)
    # CUDA's fmin takes the limit where 0 is divided by the scale of nothing but zeros.
    out.copy_((x.float() / scale).nan_to_num(limit).clamp(-limit, limit).to(FP8))


SERVED: dict[str, Any] = {
    "sgl_per_tensor_quant_fp8": sgl_per_tensor_quant_fp8,
    "utils.is_arch_support_pdl": lambda: False,
}
