"""Each kernel is one opaque operation that also runs on meta and where nothing may be read."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fixtures.toys.toy_attention import HEADS, RANK, mha_pool, mla_pool
from fixtures.toys.toy_calls import ragged, uniform
from harness.core.capability import REFERENCE
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


def entries(kernel: TorchPaged, device: str = "cpu") -> dict[str, Any]:
    """Every entry by name, called once when called."""

    def move(call: dict[str, Any]) -> dict[str, Any]:
        return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in call.items()}

    mha = [t.to(device) for t in (torch.randn(6, HEADS, 8), *mha_pool().get_kv_buffer(0))]
    mla = [t.to(device) for t in (torch.randn(6, HEADS, 20), mla_pool().get_key_buffer(0))]
    rank = {"kv_lora_rank": RANK}
    return {
        "paged_decode": partial(kernel.decode, *mha, **move(uniform())),
        "paged_context": partial(kernel.context, *mha, **move(ragged((2, 4)))),
        "mla_decode": partial(kernel.mla_decode, *mla, **move(uniform(**rank))),
        "mla_context": partial(kernel.mla_context, *mla, **move(ragged((2, 4), **rank))),
    }


@pytest.mark.parametrize("name", ["paged_decode", "paged_context", "mla_decode", "mla_context"])
def test_every_entry_is_one_opaque_operation(kernel: TorchPaged, name: str) -> None:
    call = entries(kernel)[name]
    with Recorder() as recorder:
        call()
    assert recorder.names == [f"specgate.{name}.default"]
    on_meta = entries(kernel, "meta")[name]()
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
