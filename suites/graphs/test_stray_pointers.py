"""A stray pointer is named by the tensor that it passes, or that it falls short of."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.errors import ContractError
from harness.graphs.triton_launches import Launch, _refuse_stray

TENSORS = [torch.zeros(size, dtype=torch.int32) for size in (10, 8)]
FIRST, LAST = sorted(TENSORS, key=torch.Tensor.data_ptr)
LAUNCH = Launch("kernel", lambda *_: None, (LAST, FIRST), {})


def test_bytes_past_the_end() -> None:
    end = LAST.data_ptr() + LAST.untyped_storage().nbytes()
    _refuse_stray(LAUNCH, "load", np.array([end - 4]), 4)
    with pytest.raises(ContractError, match=rf"loads 6 bytes past the end of int32\[{len(LAST)}\]"):
        _refuse_stray(LAUNCH, "load", np.array([end - 4, end + 2]), 4)


def test_an_access_that_begins_inside_ends_inside() -> None:
    end = LAST.data_ptr() + LAST.untyped_storage().nbytes()
    said = rf"stores 6 bytes past the end of int32\[{len(LAST)}\]"
    with pytest.raises(ContractError, match=said):
        _refuse_stray(LAUNCH, "store", np.array([end - 2]), 8)


def test_bytes_before_the_start() -> None:
    start, said = FIRST.data_ptr(), rf"stores 8 bytes before the start of int32\[{len(FIRST)}\]"
    with pytest.raises(ContractError, match=said):
        _refuse_stray(LAUNCH, "store", np.array([start - 8]), 4)
