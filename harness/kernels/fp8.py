"""FP8 at float32, which holds each of its values; on a CPU by a table, in a third of the time."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import torch


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor.float()``, of any dtype on any device."""
    if tensor.itemsize > 1 or tensor.is_cuda or tensor.numel() % 2:
        return tensor.float()
    looked_up = _pairs(tensor.dtype)[tensor.flatten().view(torch.uint16).numpy()]
    return torch.from_numpy(looked_up.view(np.float32)).view(tensor.shape)


@cache
def _pairs(dtype: torch.dtype) -> npt.NDArray[np.float64]:
    """The two values of every two bytes, as one number of eight."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    values: npt.NDArray[np.float32] = every.view(dtype).float().numpy()
    return values.view(np.float64)
