"""Effects of a region are counted exactly: host reads with their line, operations, bytes, moves."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import SimpleNamespace

import pytest
import torch
from torch._C._autograd import DeviceType

from harness.errors import UsageError
from harness.graphs.cuda import CudaGraph
from harness.graphs.effects import AddressLedger, observe


def test_operations_and_bytes_are_exact() -> None:
    x = torch.ones(4, 8)
    with observe() as effects:
        y = x.view(8, 4) + 1
        y.mul_(2)
        torch.zeros(16, dtype=torch.int64).topk(2)
    assert effects.operations == {
        "aten.view.default": 1,
        "aten.add.Tensor": 1,
        "aten.mul_.Tensor": 1,
        "aten.zeros.default": 1,
        "aten.topk.default": 1,
    }
    due = 4 * 8 * 4 + 16 * 8 + 2 * 8 + 2 * 8
    told = "bytes_allocated counts each new result, no view and nothing in place"
    assert effects.bytes_allocated == due, f"{told}: {due}, not {effects.bytes_allocated}"
    assert effects.host_syncs == [], "what reads nothing on the host is no host sync"
    assert (effects.count("topk"), effects.count("aten."), effects.count("mm")) == (1, 5, 0)


def test_a_result_written_to_memory_given_by_name_allocates_nothing() -> None:
    x, y = torch.ones(6), torch.zeros(6)
    with observe() as effects:
        torch.add(x, 1, out=y)
    assert effects.operations == {"aten.add.out": 1}
    assert effects.bytes_allocated == 0


def test_each_host_sync_is_reported_once_with_its_line_and_still_happens() -> None:
    lengths = torch.tensor([3, 5])

    def plan() -> tuple[int, list[int], torch.Tensor]:
        longest = int(lengths.max())
        mirror = lengths.tolist()
        return longest, mirror, torch.tensor([longest])

    with observe() as effects:
        longest, mirror, fresh = plan()
    assert (longest, mirror, fresh.tolist()) == (5, [3, 5], [5])
    first = plan.__code__.co_firstlineno
    syncs = [sync.partition(" at ")[0] for sync in effects.host_syncs]
    for call, name in (
        ("int of a tensor", "aten._local_scalar_dense.default"),
        ("Tensor.tolist", "Tensor.tolist"),
        ("torch.tensor of a list", "torch.tensor"),
    ):
        assert syncs.count(name) == 1, f"{call} is one host sync, {name}, of {syncs}"
    assert effects.host_syncs == [
        f"aten._local_scalar_dense.default at {__file__}:{first + 1}",
        f"Tensor.tolist at {__file__}:{first + 2}",
        f"torch.tensor at {__file__}:{first + 3}",
    ]


def test_a_host_sync_behind_one_that_failed_is_reported() -> None:
    lengths = torch.tensor([3, 5])
    with observe() as effects:
        with pytest.raises(RuntimeError):
            torch.tensor(object())
        int(lengths.max())
    assert [line.split()[0] for line in effects.host_syncs] == [
        "torch.tensor",
        "aten._local_scalar_dense.default",
    ]


def test_what_happens_outside_the_region_is_not_seen() -> None:
    x = torch.ones(2)
    with observe() as effects:
        pass
    (x + 1).tolist()
    assert not effects.operations
    assert not effects.host_syncs


def test_a_region_that_raises_ends_the_observation() -> None:
    with pytest.raises(KeyError), observe() as effects:
        raise KeyError
    torch.ones(1).tolist()
    assert effects.host_syncs == []


def test_a_ledger_names_what_moved() -> None:
    ledger, kept, moved, freed = AddressLedger(), torch.ones(3), torch.ones(3), torch.ones(3)
    for name, tensor in (("kept", kept), ("moved", moved), ("freed", freed)):
        ledger.enter(name, tensor)
    kept.fill_(5)
    assert ledger.moved() == []
    moved.set_(torch.zeros(3))
    freed.untyped_storage().resize_(0)
    assert ledger.moved() == ["moved", "freed"]


def test_only_devices_with_a_clock_of_their_own_are_watched() -> None:
    with pytest.raises(UsageError, match="device = 'meta'"), observe("meta"):
        pass


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_cuda_graph_without_a_cuda_device_says_so(device: str) -> None:
    if torch.cuda.is_available() and device == "cuda":
        assert CudaGraph(device)
        return
    with pytest.raises(UsageError, match=f"device = '{device}' .* CUDA device"):
        CudaGraph(device)


class Profile(AbstractContextManager["Profile"]):
    """Of a GPU that ran two kernels."""

    def __init__(self, **_: object) -> None:
        self.names = ("fill", "decode")

    def __exit__(self, *_: object) -> None:
        pass

    def events(self) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(name=name, device_type=DeviceType.CUDA, id=i)
            for i, name in enumerate(self.names)
        ]


def test_on_cuda_torch_warns_of_waits_in_the_region_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    modes, allocated = [1], iter((100, 164, 0, 0))
    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    told = {"allocated_bytes.all.allocated": 0}
    monkeypatch.setattr(
        torch.cuda, "memory_stats", lambda device: told | dict.fromkeys(told, next(allocated))
    )
    with observe("cuda") as effects:
        assert modes == [1, "warn"]
    assert modes == [1, "warn", 1]
    assert (effects.bytes_allocated, effects.operations) == (64, {"fill": 1, "decode": 1})
    with pytest.raises(ValueError, match="in the region"), observe("cuda"):
        raise ValueError("in the region")
    assert modes[-1] == 1, "a region that fails leaves the mode as it was"


def test_an_empty_mirror_makes_no_other_empty_tensor_the_hosts() -> None:
    mirror, lengths = torch.ones(0), torch.ones(0)
    with observe(host=[mirror]) as effects:
        lengths.tolist()
    syncs = [sync.partition(" at ")[0] for sync in effects.host_syncs]
    told = (
        "Tensor.tolist of an empty tensor is a host sync, unless its storage is the host's mirror's"
    )
    assert len(syncs) == 1, f"{told}: counted were {syncs}"


def test_work_on_a_mirror_of_the_host_is_not_counted() -> None:
    mirror, lengths = torch.tensor([3, 5]), torch.tensor([3, 5])
    with observe(host=[mirror]) as effects:
        longest = int((mirror + 1).max()) + len(mirror.tolist())
        int((mirror + lengths).max())
    assert longest == 6 + 2
    assert len(effects.host_syncs) == 1, "the sum follows from a tensor of the device"
    assert effects.count("add") == 1


def test_what_is_made_of_python_data_waits_though_the_host_made_the_data() -> None:
    mirror, lengths = torch.tensor(3), torch.tensor([3, 5])
    with observe(host=[mirror]) as effects:
        lengths.new_tensor([mirror])
    syncs = [sync.partition(" at ")[0] for sync in effects.host_syncs]
    assert syncs == ["Tensor.new_tensor"]
