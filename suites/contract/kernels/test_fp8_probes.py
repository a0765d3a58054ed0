"""Weighted rows show what FP8 rounding hides on random ones: 1 % of a scale, one key, one page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fixtures.fakes.fp8_kernel import FAULTS, KERNELS, FP8Kernel
from fixtures.tables import CASES
from harness.core.case import Execution, Mode
from harness.core.record import Record, Verdict
from harness.differential import trial
from harness.subjects import MHA_BACKENDS, CustomKernelSubject

MODES = (Mode.DECODE, Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND_V2, Mode.MULTI_STEP_DRAFT)
UNSEEN = ("k_scale_1%_up", "k_scale_1%_down", "v_scale_1%_up", "v_scale_1%_down")


def run(row: str, kernel: FP8Kernel) -> Record:
    family, backend, draft_backend = MHA_BACKENDS
    subject = CustomKernelSubject(
        name="trtllm_mha/fp8",
        family=family,
        kernel="fp8",
        backend=backend,
        draft_backend=draft_backend,
        function=kernel,
    )
    return trial.run_trial(CASES[row], subject, Execution.EAGER)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mode", MODES)
def test_however_weights_are_rounded_a_right_kernel_is_nearly_exact(
    mode: Mode, kernel: str
) -> None:
    record = run(f"mha-{mode}-weighted_fp8_cache", KERNELS[kernel])
    assert record.verdict is Verdict.PASSED, record.message
    assert max(quantity.error for quantity in record.quantities) < 0.004


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mode", MODES)
def test_every_fault_is_red(
    mode: Mode, kernel: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel != "right":  # Keys are found by runs of their own, which no rounding changes.
        monkeypatch.setattr(trial, "explain", lambda *_: "")
    faulty = replace(KERNELS[kernel], **FAULTS[fault])
    record = run(f"mha-{mode}-weighted_fp8_cache", faulty)
    assert record.verdict is Verdict.WRONG_NUMBERS, record.message


@pytest.mark.parametrize("fault", UNSEEN)
def test_random_rows_do_not_show_a_scale(fault: str) -> None:
    faulty = replace(KERNELS["right"], **FAULTS[fault])
    assert run("mha-decode-fp8_cache", faulty).verdict is Verdict.PASSED
