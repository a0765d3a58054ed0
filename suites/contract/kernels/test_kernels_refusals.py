"""A kernel that is not there, or not for this device or call, says so in one line."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from fixtures.fakes.fake_kernels import MODULES
from harness.core.capability import XQA
from harness.core.case import Dtype, Family
from harness.differential.invariants.memory import check_semaphores
from harness.errors import CaptureViolation, KernelRefusal, UsageError
from harness.kernels import flashinfer_prefill, flashinfer_xqa, packages, workspace
from harness.kernels.checked import CheckedKernel
from harness.kernels.flash_mla import FlashMLA
from harness.kernels.flashinfer_xqa import FlashInferXQA
from harness.kernels.limits.random_calls import Shape, draw
from harness.kernels.reference import TorchPaged
from harness.kernels.registry import real_kernel
from harness.kernels.trtllm_gen import TRTLLMGen

KERNELS: dict[str, Callable[[str], CheckedKernel]] = {
    "xqa": FlashInferXQA,
    "flash_mla": FlashMLA,
    "trtllm_gen mha": partial(TRTLLMGen, Family.MHA),
    "trtllm_gen mla": partial(TRTLLMGen, Family.MLA),
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], None]:
    """Pretend GPUs of that compute capability; the third is the current one."""

    def pretend(compute_capability: tuple[int, int]) -> None:
        monkeypatch.setattr(packages, "compute_capability", lambda _: compute_capability)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)

    return pretend


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_cpu_is_no_device_of_a_real_kernel(kernel: str) -> None:
    with pytest.raises(UsageError, match=r"device = 'cpu' .* a CUDA device for "):
        KERNELS[kernel]("cpu")


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu", 0)], ids=repr)
def test_a_numbered_cpu_has_the_reference_too(device: torch.device | str) -> None:
    told = "a CPU has the reference kernel, however it is written"
    assert real_kernel(Family.MHA, "xqa", device) is None, told


def test_a_package_whose_libraries_do_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = OSError("libcudart.so.13: cannot open shared object file")
    monkeypatch.setattr(packages, "import_module", Mock(side_effect=failed))
    with pytest.raises((UsageError, OSError)) as refusal:
        packages.load("flashinfer.decode", "xqa")
    told = f"a UsageError names the package that xqa needs and why it fails, not {refusal.value!r}"
    assert isinstance(refusal.value, UsageError), told
    needs = r"xqa needs flashinfer-python .* \(libcudart\.so\.13: "
    assert re.search(needs, str(refusal.value)), told


@pytest.mark.parametrize(
    ("kernel", "present", "text"),
    [
        ("xqa", (8, 9), "xqa needs compute capability 9.0 or 12.0 or 12.1, this device has 8.9"),
        ("flash_mla", (10, 0), "flash_mla needs compute capability 9.0, this device has 10.0"),
        (
            "trtllm_gen mha",
            (9, 0),
            "trtllm_gen needs compute capability 10.0 or 10.3, this device has 9.0",
        ),
        (
            "trtllm_gen mla",
            (12, 0),
            "trtllm_gen needs compute capability 10.0 or 10.3, this device has 12.0",
        ),
    ],
)
def test_another_architecture(gpu: Any, kernel: str, present: tuple[int, int], text: str) -> None:
    gpu(present)
    with pytest.raises(UsageError) as caught:
        KERNELS[kernel]("cuda")
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("kernel", "present", "module", "wanted"),
    [
        ("xqa", (9, 0), "flashinfer.decode", "xqa needs flashinfer-python 0.6.12"),
        ("flash_mla", (9, 0), "sgl_kernel.flash_mla", "flash_mla needs sglang-kernel 0.4.4"),
        ("trtllm_gen mla", (10, 3), "flashinfer.mla", "trtllm_gen needs flashinfer-python 0.6.12"),
    ],
)
def test_a_missing_package(
    monkeypatch: pytest.MonkeyPatch,
    gpu: Any,
    kernel: str,
    present: tuple[int, int],
    module: str,
    wanted: str,
) -> None:
    gpu(present)
    for name, fake in MODULES.items():
        monkeypatch.setitem(sys.modules, name, None if name == module else fake)
    with pytest.raises(UsageError) as caught:
        KERNELS[kernel]("cuda")
    line = str(caught.value)
    assert line.startswith(f"{wanted}, which cannot be imported (")
    assert line.endswith("; install it with: pip install -e '.[gpu]'")
    assert "\n" not in line


def test_the_device_has_its_index(gpu: Any) -> None:
    gpu((9, 0))
    told = 'a device without an index is the current one, where tensors of "cuda" are'
    assert packages.cuda_device("cuda", XQA) == torch.device("cuda", 2), told
    assert packages.cuda_device("cuda:0", XQA) == torch.device("cuda", 0)
    assert packages.cuda_device("cuda:3", XQA) == torch.device("cuda", 3)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FlashInferXQA:
    """XQA on fakes, on the CPU."""
    for name, fake in MODULES.items():
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setattr(flashinfer_xqa, "cuda_device", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(workspace, "_SHARED", {})
    monkeypatch.setattr(workspace, "SIZES", dict.fromkeys(workspace.SIZES, 9 * workspace.MIB))
    return FlashInferXQA("cuda")


@pytest.mark.parametrize(
    "shape",
    [
        Shape(entry="decode", q_len=4, masked=False),
        Shape(entry="decode", q_len=17),
        Shape(entry="decode", q_len=2, window_left=20),
        Shape(entry="decode", dtype=Dtype.FP32),
        Shape(entry="context", page_size=8),
        Shape(entry="context", heads=66),
        Shape(entry="mla_decode"),
        Shape(entry="mla_context"),
    ],
    ids=lambda shape: shape.entry,
)
def test_it_refuses_what_its_emulation_refuses(kernel: FlashInferXQA, shape: Shape) -> None:
    call, kernel.kernels = draw(shape), {}
    with pytest.raises(KernelRefusal, match=f"^xqa {shape.entry}: ") as real:
        call.on(kernel)
    with pytest.raises(KernelRefusal) as emulated:
        call.on(TorchPaged(kernel.capability))
    assert str(real.value) == str(emulated.value)
    assert kernel.calls == []


def test_a_geometry_first_seen_during_capture(
    monkeypatch: pytest.MonkeyPatch, kernel: FlashInferXQA
) -> None:
    shape = Shape(entry="context", q_len=5)
    draw(shape).on(kernel)
    monkeypatch.setattr(flashinfer_prefill, "is_readable", lambda _: False)
    draw(shape).on(kernel)
    with pytest.raises(CaptureViolation, match=r"planned during capture.* max_q_len 7, .*"):
        draw(replace(shape, q_len=7)).on(kernel)


def test_workspaces_are_zeroed_once_and_shared_by_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_SHARED", {})
    cpu = torch.device("cpu")
    xqa, prefill = workspace.workspace("xqa", cpu), workspace.workspace("prefill", cpu)
    assert workspace.workspace("xqa", cpu) is xqa, "calls of a family share a workspace"
    told = "each family has a workspace of its own"
    assert xqa.buffer.data_ptr() != prefill.buffer.data_ptr(), told
    other = workspace.workspace("prefill", torch.device("cpu", 0))
    told = "calls on a device that has an index share its workspace, too"
    assert workspace.workspace("prefill", torch.device("cpu", 0)) is other, told
    told = "each device has a workspace of its own"
    assert other.buffer.data_ptr() != prefill.buffer.data_ptr(), told
    assert other.name == "prefill on cpu:0", f"a workspace names its device: {other.name}"
    told = "a workspace of xqa is 8 MB of semaphores, then scratch to its end"
    assert xqa.semaphores.numel() == 8 << 20, told
    assert xqa.scratch.data_ptr() == xqa.buffer.data_ptr() + (8 << 20), told
    assert xqa.scratch.numel() + (8 << 20) == xqa.buffer.numel(), told
    told = "a workspace of prefill is scratch alone"
    assert prefill.scratch.numel() == prefill.buffer.numel(), told
    xqa.scratch[:3], prefill.buffer[:3] = 1, 1
    dirty = check_semaphores(workspace.shared_workspaces())
    assert dirty == [], f"what is written to scratch is no dirty semaphore: {dirty}"
    # The last byte: a check that counts elements for bytes would miss it.
    xqa.semaphores[5], xqa.semaphores[-1] = 1, 7
    dirty = check_semaphores(workspace.shared_workspaces())
    told = f"bytes 5 and -1 of xqa's semaphores, which are not 0, are reported: {dirty}"
    assert dirty == [
        "semaphores of xqa on cpu: byte 5 and 1 more are not 0 [identity and lifetime]"
    ], told


@pytest.mark.parametrize("family", ["xqa", "trtllm_gen"])
def test_a_kernel_that_splits_keys_has_the_scratch_that_flashinfer_advises(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of its own: every later trial of the process would look through these semaphores.
    monkeypatch.setattr(workspace, "_SHARED", {})
    # docs.flashinfer.ai, trtllm_batch_decode_with_kv_cache: workspace_buffer of 128 MB.
    made = workspace.workspace(family, torch.device("cpu"))
    assert made.buffer.numel() >= 128 << 20, "a workspace has 128 MB"
    told = "semaphores, which must stay zero, are the first 8 MB"
    assert made.semaphores.numel() == 8 << 20, told


def test_a_workspace_is_not_made_during_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_SHARED", {})
    cpu = torch.device("cpu")
    known = workspace.workspace("prefill", cpu)
    again = workspace.workspace("prefill", cpu)
    assert again is known, "calls share a workspace: one that was made is not made again"
    monkeypatch.setattr(workspace, "is_readable", lambda _: False)
    assert workspace.workspace("prefill", cpu) is known
    with pytest.raises(CaptureViolation, match="the workspace of xqa on cpu is made during"):
        workspace.workspace("xqa", cpu)
    with pytest.raises(UsageError, match=r"family = 'sparse' .*'trtllm_gen', 'xqa'\]"):
        workspace.workspace("sparse", cpu)
