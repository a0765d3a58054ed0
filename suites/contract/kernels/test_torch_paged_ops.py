"""Each entry is one opaque operation, which also runs on meta and during a capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fixtures.toys.toy_attention import HEADS, RANK, ROPE, mha_pool, mla_pool
from fixtures.toys.toy_calls import ragged, uniform
from harness.core.capability import REFERENCE
from harness.kernels.interface import AttentionCall
from harness.kernels.reference import TorchPaged


@pytest.fixture
def kernel() -> TorchPaged:
    torch.manual_seed(7)
    return TorchPaged(REFERENCE)


class Recorder(TorchDispatchMode):
    """Names of the operations dispatched inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


OPERATIONS = {
    "decode": "paged_decode",
    "context": "paged_context",
    "mla_decode": "paged_decode",
    "mla_context": "paged_context",
}


def entries(kernel: TorchPaged, device: str = "cpu") -> dict[str, Callable[[], torch.Tensor]]:
    """A call of every entry, by the entry's name."""
    made: dict[str, Callable[[], torch.Tensor]] = {}
    for prefix, dim, pool in (("", 8, mha_pool()), ("mla_", RANK + ROPE, mla_pool())):
        q = torch.randn(6, HEADS, dim)
        calls = {"decode": uniform(q, pool), "context": ragged(q, pool, (2, 4))}
        for name, call in calls.items():
            entry = prefix + name
            made[entry] = partial(getattr(kernel, entry), moved(call, device))
    return made


def moved(call: AttentionCall, device: str) -> AttentionCall:
    """The call with every tensor on the device."""
    changes: dict[str, Any] = {
        name: value.to(device)
        for name, value in vars(call).items()
        if isinstance(value, torch.Tensor)
    }
    return replace(call, caches=tuple(cache.to(device) for cache in call.caches), **changes)


@pytest.mark.parametrize("entry", OPERATIONS)
def test_every_entry_is_one_opaque_operation(kernel: TorchPaged, entry: str) -> None:
    call = entries(kernel)[entry]
    with Recorder() as recorder:
        call()
    assert recorder.names == [f"specgate.{OPERATIONS[entry]}.default"]
    on_meta = entries(kernel, "meta")[entry]()
    assert on_meta.shape == call().shape
    assert on_meta.dtype == torch.float32


def test_a_captured_stream_is_never_read(
    kernel: TorchPaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = entries(kernel)
    wanted = {name: call() for name, call in calls.items()}
    for module in ("paged_kv", "value_checks", "torch_ops", "torch_attention"):
        monkeypatch.setattr(f"harness.kernels.{module}.is_readable", lambda _: False)
    for name, call in calls.items():
        torch.testing.assert_close(call(), wanted[name])
