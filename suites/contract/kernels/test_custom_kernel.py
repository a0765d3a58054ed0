"""A kernel of somebody else's runs every row that its Capability does not refuse."""

from __future__ import annotations

import pytest
import torch

from fixtures.fakes.own_kernel import CAPABILITY
from fixtures.plan import custom_trials
from fixtures.tables import CASES
from harness.core.case import Execution, Family
from harness.core.record import Verdict
from harness.differential.trial import run_trial
from harness.kernels.custom import CustomKernel, Function
from harness.kernels.interface import AttentionCall, DecodeCall
from harness.subjects import custom_subjects

pytest_plugins = ["pytester"]

KERNELS = "fixtures.fakes.own_kernel"
(RIGHT,) = custom_subjects(f"{KERNELS}:attention")
(WRONG,) = custom_subjects(f"{KERNELS}:short_attention")
ROWS = (
    "mha-extend-bs3_ragged_padded_to_4",
    "mha-decode-bs3_ragged_padded_to_4",
    "mha-target_verify-bs3_ragged_padded_to_4",
    "mha-draft_extend_v1-bs3_ragged_padded_to_4",
    "mha-draft_extend_v2-bs3_ragged_padded_to_4",
    "mha-multi_step_draft-bs3_ragged_padded_to_4",
)


TRIALS = [(row, e) for row in ROWS for e in Execution if e is Execution.EAGER or row not in ROWS[0]]


@pytest.mark.parametrize(("row", "execution"), TRIALS)
def test_a_right_kernel_passes_and_a_wrong_one_does_not(row: str, execution: Execution) -> None:
    case = CASES[row]
    right = run_trial(case, RIGHT, execution)
    assert right.verdict is Verdict.PASSED, right.message
    assert run_trial(case, WRONG, execution).verdict.is_red


def test_a_trial_names_the_kernel_and_the_command() -> None:
    record = run_trial(CASES[ROWS[1]], RIGHT, Execution.EAGER)
    assert record.subject == "trtllm_mha/attention"
    assert record.reproduce.endswith(f"--kernel {KERNELS}:attention")


def constant(value: float) -> Function:
    """A kernel of the name that every other has, whose answers are all the same."""

    def attention(call: AttentionCall) -> torch.Tensor:
        return call.q.new_full((*call.q.shape[:2], call.value_dim), value, dtype=call.out_dtype)

    attention.capability = CAPABILITY  # type: ignore[attr-defined]
    return attention


def test_kernels_that_share_a_name_are_two_kernels() -> None:
    page = torch.zeros(1, 16, 1, 8, dtype=torch.bfloat16)
    call = DecodeCall(
        q=page[0, :1],
        caches=(page, page),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        seq_lens=torch.ones(1, dtype=torch.int32),
        max_seq_len=1,
        bmm1_scale=1.0,
        bmm2_scale=1.0,
        out_dtype=torch.bfloat16,
        q_len_per_req=1,
    )
    answers = [CustomKernel(constant(value)).decode(call).unique().tolist() for value in (2.0, 3.0)]
    assert answers == [[2.0], [3.0]], "a kernel is its function, not its function's name"


def test_rows_outside_of_the_capability_are_refused_by_name() -> None:
    record = run_trial(CASES["mha-decode-fp8_cache"], RIGHT, Execution.EAGER)
    assert record.verdict is Verdict.REFUSED
    assert record.message.startswith("own refuses kv_dtype float8_e4m3fn")


def test_every_row_of_its_families_is_planned() -> None:
    planned = {case.id for case, _, _ in custom_trials([RIGHT])}
    assert planned == {case.id for case in CASES.values() if case.family is Family.MHA}


@pytest.mark.parametrize(
    "name", ["nowhere:kernel", f"{KERNELS}:nothing", f"{KERNELS}:CAPABILITY", "kernel", ":x"]
)
def test_a_kernel_that_is_not_there_is_one_line(pytester: pytest.Pytester, name: str) -> None:
    plugin = ("-p", "fixtures.pytest_plugin.plugin", "-n0")
    done = pytester.runpytest_inprocess(*plugin, "--kernel", name)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    [told] = [line for line in done.errlines if line]
    assert f"--kernel = {name!r} is not accepted; accepted: MODULE:FUNCTION" in told
