"""What tests free stays with the process that runs them."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="glibc alone has these thresholds"
)
TENSORS, BYTES = 8, 31 << 20


def heap() -> range:
    """Addresses that glibc hands out and takes back without the kernel."""
    maps = Path("/proc/self/maps").read_text("utf-8").splitlines()
    parts = [line.split()[0].split("-") for line in maps if line.endswith("[heap]")]
    return range(int(parts[0][0], 16), int(parts[-1][1], 16))


def test_memory_of_freed_tensors_is_kept() -> None:
    held = [torch.empty(BYTES, dtype=torch.uint8) for _ in range(TENSORS)]
    own = heap()
    assert all(tensor.data_ptr() in own for tensor in held), "a tensor was mapped by itself"
    del held
    lost = own.stop - heap().stop
    assert lost <= 0, f"{lost} freed bytes went back to the kernel"
