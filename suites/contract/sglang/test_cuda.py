"""On CUDA the installed release runs as it is, and a release on a CPU sees no CUDA."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fixtures.tables import CASES
from harness import subjects
from harness.core.case import Execution, Mode
from harness.errors import UsageError
from harness.sglang import context, process
from harness.sglang.releases import find_release
from harness.sglang.stubs import StubFinder
from harness.sglang_subjects import SGLangSubject, sglang_subjects

RELEASE = find_release("0.5.16")
CUDA = "cuda:0"
HIDE = "from harness.sglang import process; process.hide_gpus(); import torch; "
HIDE += "print(torch.cuda.is_available(), torch.cuda.device_count())"


@pytest.fixture
def nothing_active(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has imported no release, and paths of its own."""
    monkeypatch.setattr(process, "_active", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    finders = [finder for finder in sys.meta_path if not isinstance(finder, StubFinder)]
    monkeypatch.setattr(sys, "meta_path", finders)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> dict[str, SGLangSubject]:
    """The subjects of a release on a GPU of compute capability 9.0, by backend and kernel."""
    monkeypatch.setattr(subjects, "compute_capability", lambda device: (9, 0))
    found = sglang_subjects(RELEASE, device=CUDA)
    return {subject.name.partition("/")[2]: subject for subject in found}


def test_the_installed_release_is_active_and_nothing_is_stubbed(
    nothing_active: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "installed", lambda name: {"sglang": "0.5.16"}[name])
    paths, finders = list(sys.path), list(sys.meta_path)
    process.activate(RELEASE, device=CUDA)
    assert process.active() is RELEASE
    assert sys.path == paths
    assert sys.meta_path == finders


@pytest.mark.parametrize(("found", "shown"), [("0.5.14", "0.5.14"), ("", "none")])
def test_another_installed_release_is_refused(
    nothing_active: None, monkeypatch: pytest.MonkeyPatch, found: str, shown: str
) -> None:
    monkeypatch.setattr(process, "installed", lambda name: found)
    told = f"sglang on CUDA = '{shown}' is not accepted; accepted: 0.5.16 installed"
    with pytest.raises(UsageError, match=told):
        process.activate(RELEASE, device=CUDA)


def test_a_checkout_comes_first_on_the_path(nothing_active: None, tmp_path: Path) -> None:
    process.activate(RELEASE, tmp_path, CUDA)
    assert sys.path[0] == str(tmp_path)
    assert not any(isinstance(finder, StubFinder) for finder in sys.meta_path)


def test_a_process_keeps_to_its_checkout(nothing_active: None, tmp_path: Path) -> None:
    process.activate(RELEASE, tmp_path, CUDA)
    process.activate(RELEASE, tmp_path, CUDA)
    told = f"release = '0.5.16 in elsewhere' is not accepted; accepted: 0.5.16 in {tmp_path}, the"
    with pytest.raises(UsageError, match=re.escape(told)):
        process.activate(RELEASE, Path("elsewhere"), CUDA)
    with pytest.raises(UsageError, match=re.escape("release = '0.5.16' is not accepted")):
        process.activate(RELEASE, None, CUDA)
    assert sys.path[0] == str(tmp_path), "what is refused is not on the path"


def test_which_gpu_it_is_is_left_to_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(context, "active", lambda: RELEASE)
    monkeypatch.setattr(context, "run_on", told.append)
    for module in (context.runtime_context, context.module_globals):
        monkeypatch.setattr(module, "publish_ranks", lambda: None)
        monkeypatch.setattr(module, "publish_server_arguments", lambda arguments: arguments)
    case = CASES["mha-decode-bs1_short"]
    context.publish(case, "trtllm_mha", "xqa", CUDA)
    assert told == []
    context.publish(case, "trtllm_mha", "xqa", "cpu")
    assert told == ["sm90"]


def test_flashmla_runs_on_cuda_and_the_unlimited_kernel_on_a_cpu(
    hopper: dict[str, SGLangSubject],
) -> None:
    on_cpu = {subject.name.partition("/")[2] for subject in sglang_subjects(RELEASE)}
    assert hopper.keys() - on_cpu == {"flashmla/flash_mla"}
    assert on_cpu - hopper.keys() == {
        "trtllm_mha/reference",
        "trtllm_mla/reference",
        f"triton/{context.INTERPRETED}",
    }


def test_subjects_travel_to_a_process_of_their_own(hopper: dict[str, SGLangSubject]) -> None:
    for subject in hopper.values():
        assert pickle.loads(pickle.dumps(subject)) == subject


def test_a_real_kernel_is_judged_by_its_own_numerics(hopper: dict[str, SGLangSubject]) -> None:
    xqa = hopper["trtllm_mha/xqa"]
    assert xqa.numerics(CUDA).budget_factor == xqa.capability.numerics.budget_factor > 1
    assert xqa.numerics("cpu").budget_factor == 1
    triton = hopper["triton/triton"]
    assert Mode.DECODE in triton.numerics(CUDA).rounds_weights
    assert not triton.numerics("cpu").rounds_weights


@pytest.mark.parametrize(
    ("subject", "row", "device", "reason"),
    [
        ("triton/triton", "mla-decode-small_dims", CUDA, "Cannot make_shape_compatible"),
        ("triton/triton", "mla-decode-small_dims", "cpu", None),
        ("triton/triton", "mla-extend-small_dims", CUDA, None),
        ("triton/triton", "mla-decode-bs1_short", CUDA, None),
        ("trtllm_mha/trtllm_gen", "mha-decode-bs1_short", CUDA, "needs compute capability 10.0"),
        ("flashmla/flash_mla", "mla-decode-page32", CUDA, "refuses page_size 32"),
        ("trtllm_mha/xqa", "mha-extend-bs1_short", CUDA, "prefill on SM100 alone"),
    ],
)
def test_refusals_are_the_real_kernels(
    hopper: dict[str, SGLangSubject],
    monkeypatch: pytest.MonkeyPatch,
    subject: str,
    row: str,
    device: str,
    reason: str | None,
) -> None:
    capability = {CUDA: (9, 0), "cpu": None}[device]
    monkeypatch.setattr(subjects, "compute_capability", lambda name: capability)
    found = hopper[subject].refusal(CASES[row], Execution.EAGER, device)
    assert (reason in found) if reason and found else found is reason


def test_a_release_on_a_cpu_sees_no_gpu_of_the_machine(device: torch.device) -> None:
    assert torch.cuda.is_available() == (device.type == "cuda")
    done = subprocess.run([sys.executable, "-c", HIDE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "0"]


def test_a_process_that_has_used_cuda_runs_no_release_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UsageError, match="accepted: a process that has not used CUDA yet"):
        process.hide_gpus()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
