"""A launch is seen where it is observed; a stray pointer is named by the tensor it passes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.errors import ContractError
from harness.graphs.triton_launches import Launch, _refuse_stray, launches_seen

TENSORS = [torch.zeros(size, dtype=torch.int32) for size in (10, 8)]
FIRST, LAST = sorted(TENSORS, key=torch.Tensor.data_ptr)
LAUNCH = Launch("kernel", lambda *_: None, (LAST, FIRST), {})


def test_an_observer_is_told_inside_its_region_and_not_after_one_that_raised() -> None:
    told: list[str] = []
    with launches_seen(lambda launch: told.append(launch.name)):
        LAUNCH.run()
    with pytest.raises(KeyError), launches_seen(lambda _: told.append("left behind")):
        raise KeyError
    LAUNCH.run()
    assert told == ["kernel"], "a region that raises ends the observation of launches, too"


def test_every_observer_is_told_the_first_as_well_as_the_last() -> None:
    told: dict[str, list[str]] = {"outer": [], "inner": []}
    with launches_seen(lambda launch: told["outer"].append(launch.name)):
        with launches_seen(lambda launch: told["inner"].append(launch.name)):
            LAUNCH.run()
        LAUNCH.run()
    assert told == {"outer": ["kernel"] * 2, "inner": ["kernel"]}, (
        "a launch is seen by effects and by the tape that records it, however they are nested"
    )


def test_bytes_past_the_end() -> None:
    end = LAST.data_ptr() + LAST.untyped_storage().nbytes()
    _refuse_stray(LAUNCH, "load", np.array([end - 4]), 4)
    with pytest.raises(ContractError, match=rf"loads 6 bytes past the end of int32\[{len(LAST)}\]"):
        _refuse_stray(LAUNCH, "load", np.array([end - 4, end + 2]), 4)


def test_the_end_of_a_view_is_that_of_its_memory() -> None:
    end = LAST.data_ptr() + LAST.untyped_storage().nbytes()
    launch = Launch("kernel", lambda *_: None, (LAST[:3],), {})
    _refuse_stray(launch, "load", np.array([end - 4]), 4)
    with pytest.raises(ContractError) as refused:
        _refuse_stray(launch, "load", np.array([end + 2]), 4)
    told = str(refused.value)
    rule = (
        "a stray access is told as so many bytes past a view's storage, here 6, not past the view"
    )
    assert "loads 6 bytes past the end of int32[3]" in told, f"{rule}: {told}"


def test_an_access_that_begins_inside_ends_inside() -> None:
    end = LAST.data_ptr() + LAST.untyped_storage().nbytes()
    said = rf"stores 6 bytes past the end of int32\[{len(LAST)}\]"
    with pytest.raises(ContractError, match=said):
        _refuse_stray(LAUNCH, "store", np.array([end - 2]), 8)


def test_bytes_before_the_start() -> None:
    start, said = FIRST.data_ptr(), rf"stores 8 bytes before the start of int32\[{len(FIRST)}\]"
    with pytest.raises(ContractError, match=said):
        _refuse_stray(LAUNCH, "store", np.array([start - 8]), 4)
