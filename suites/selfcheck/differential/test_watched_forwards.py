"""Every judged forward is watched: a wait of the host or another kernel entry is red on any row."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fixtures.covering.rows import case_of
from fixtures.drivers.mode_orders import AllModes, cases_of
from fixtures.tables import find
from harness.attention.paged_backend import PagedBackend
from harness.core.case import Case, Execution, Family, Mode
from harness.core.conventions import OURS, Conventions
from harness.core.record import Verdict
from harness.differential.invariants import check_entries, check_operations
from harness.differential.trial import run_trial
from harness.differential.watching import watching
from harness.subjects import SUBJECTS
from harness.upstream.forward_batch_info import ForwardBatch, ForwardMode
from harness.upstream.memory_pool import SWAKVPool

EAGER, GRAPH = Execution.EAGER, Execution.GRAPH
GEN = SUBJECTS["trtllm_mha/trtllm_gen"]
# When it reads, a row where that shows and one where it does not.
RARE: dict[str, tuple[Callable[[ForwardBatch], bool], str, str]] = {
    "for-windows": (
        lambda batch: isinstance(batch.token_to_kv_pool, SWAKVPool),
        "mha-target_verify-window_bs5_interleaved",
        "mha-target_verify-bs5_ragged_padded_to_8",
    ),
    "for-many-requests": (
        lambda batch: batch.batch_size > 4,
        "mha-decode-bs5_ragged_padded_to_8",
        "mha-decode-bs3_ragged_padded_to_4",
    ),
}


@pytest.mark.parametrize("execution", [EAGER, GRAPH])
@pytest.mark.parametrize("name", RARE)
def test_a_rare_read_of_the_host(
    name: str, execution: Execution, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, shown, spared = RARE[name]
    verb = "init_forward_metadata" if execution is EAGER else "init_forward_metadata_out_graph"
    plan = getattr(PagedBackend, verb)

    def reading(self: PagedBackend, batch: ForwardBatch, *args: bool, **options: bool) -> None:
        plan(self, batch, *args, **options)
        if reads(batch):
            int(batch.seq_lens.max())

    monkeypatch.setattr(PagedBackend, verb, reading)
    assert run_trial(find(spared), GEN, execution).verdict is Verdict.PASSED
    record = run_trial(find(shown), GEN, execution)
    assert record.verdict is Verdict.BROKEN_INVARIANT
    line = reading.__code__.co_firstlineno + 3
    where = f"aten._local_scalar_dense.default at {__file__}:{line}"
    told = record.message.partition("; ")[0]
    assert told == f"the host waits for the device: {where} [device-to-host sync]"


def test_a_host_read_is_seen_on_rows_whose_operations_nobody_counts() -> None:
    rig: Any = SimpleNamespace(
        subject=SimpleNamespace(conventions=Conventions(more=None)),
        pool_state=SimpleNamespace(device=torch.device("cpu")),
        batch=SimpleNamespace(seq_lens_cpu=None),
    )
    lengths = torch.tensor([3, 5])
    with watching(rig) as seen:
        int(lengths.max())
    assert len(seen.waits) == 1, "a host read of a device's tensor in a forward is seen"


@pytest.mark.parametrize(
    ("verb", "execution", "what"),
    [
        ("init_forward_metadata", EAGER, "the plan"),
        ("forward", EAGER, "the forward"),
        ("init_forward_metadata_out_graph", GRAPH, "planning before a replay"),
        ("init_forward_metadata_in_graph", GRAPH, "the graph"),
        ("forward", GRAPH, "the graph"),
    ],
)
@pytest.mark.parametrize("name", RARE)
def test_work_for_some_batches_alone(
    name: str, verb: str, execution: Execution, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It changes no answer, waits for nothing and asks the kernel for nothing.
    has_more, shown, spared = RARE[name]
    original = getattr(PagedBackend, verb)

    def working(self: PagedBackend, *args: object, **options: object) -> object:
        batch = next(arg for arg in args if isinstance(arg, ForwardBatch))
        if has_more(batch):
            batch.seq_lens.clone()
        return original(self, *args, **options)

    monkeypatch.setattr(PagedBackend, verb, working)
    record = run_trial(find(spared), GEN, execution)
    said = f"a batch for which {what} does nothing more passes"
    assert record.verdict is Verdict.PASSED, f"{said}: {record.message}"
    record = run_trial(find(shown), GEN, execution)
    said = f"operations that {what} has for some batches alone are red as beyond the formula"
    assert record.verdict is Verdict.BROKEN_INVARIANT, f"{said}: {record.verdict} {record.message}"
    told = re.fullmatch(
        rf"{what}: (\d+) operations, expected (\d+) \[operations beyond the formula\]",
        record.message,
    )
    assert told, f"{said} and nothing else: {record.message}"
    layers = find(shown).num_layers if verb == "forward" else 1
    said = f"{what} has {layers} operations beyond the formula"
    assert int(told[1]) - int(told[2]) == layers, f"{said}: {record.message}"


def test_work_for_padded_batches_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PagedBackend.forward

    def working(self: PagedBackend, *args: object, **options: object) -> torch.Tensor:
        out = original(self, *args, **options)
        is_padded = len(out) > self.forward_metadata.geometry.num_tokens
        return out.clone() if is_padded else out

    monkeypatch.setattr(PagedBackend, "forward", working)
    spared = run_trial(find("mha-target_verify-bs2_ragged"), GEN, EAGER)
    said = "a batch without rows of DP padding is spared their operations"
    assert spared.verdict is Verdict.PASSED, f"{said}: {spared.message}"
    record = run_trial(find("mha-target_verify-dp_padding_whole_rows"), GEN, EAGER)
    said = "operations of an eager forward for DP-padded batches alone are red, beyond the formula"
    assert record.verdict is Verdict.BROKEN_INVARIANT, f"{said}: {record.verdict} {record.message}"
    assert record.message.startswith("the forward: "), f"{said}: {record.message}"


def test_work_that_is_left_out_is_told_too() -> None:
    assert check_operations("the plan", 34, 34) == []
    assert check_operations("the plan", 33, 34) == [
        "the plan: 33 operations, expected 34 [operations beyond the formula]"
    ]


@pytest.mark.parametrize(
    ("subject", "case"),
    [
        ("trtllm_mha/xqa", replace(find("mha-target_verify-bs2_ragged"), prefix_lens=(33,))),
        ("trtllm_mha/xqa", replace(find("mha-decode-bs2_ragged"), prefix_lens=(33,))),
        (
            "trtllm_mla/trtllm_gen",
            replace(
                find("mla-draft_extend_v1-bs2_ragged"),
                id="one-accepted-token",
                prefix_lens=(33,),
                accept_lens=(1,),
            ),
        ),
    ],
    ids=["mask-of-one-request", "query-of-one-token", "padded-query-of-one-token"],
)
def test_one_request_has_the_operations_of_its_own(subject: str, case: Case) -> None:
    record = run_trial(case, SUBJECTS[subject], EAGER)
    said = f"what torch need not copy for one request or token counts as none: {record.message}"
    assert record.verdict is Verdict.PASSED, said


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_of_padding_cost_the_same_however_many(rows: int) -> None:
    case = replace(find("mha-target_verify-dp_padding_whole_rows"), padded_rows=rows)
    record = run_trial(case, GEN, EAGER)
    said = f"zeros after the planned rows are two operations, of one row, too: {record.message}"
    assert record.verdict is Verdict.PASSED, said


@pytest.mark.parametrize("kv", ["auto", "float8_e4m3fn"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kernel", ["trtllm_gen", "xqa"])
def test_a_query_that_is_cast_is_not_copied_too(kernel: str, batch: int, kv: str) -> None:
    # One token's query is a view that nobody copies, and one in FP8 is new whatever its batch.
    row = {"family": Family.MHA, "mode": Mode.DECODE, "batch": batch, "length": 256, "kv": kv}
    record = run_trial(case_of(row), SUBJECTS[f"trtllm_mha/{kernel}"], GRAPH)
    said = "a right graph passes: one token spares no copy of a query that is cast, as none is made"
    assert (record.verdict, record.message) == (Verdict.PASSED, ""), f"{said}: {record.message}"


@pytest.mark.parametrize("baseline", ["dead_topk", "host_lengths", "kv_indices"])
def test_a_baseline_has_the_operations_of_its_own_row(
    baseline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = next(s for s in SUBJECTS.values() if f"-{baseline}/" in s.name)
    [mode] = sorted(subject.modes)[:1]
    case = find(f"{subject.family}-{mode}-bs2_ragged")
    assert run_trial(case, subject, GRAPH).verdict is Verdict.PASSED
    ours = replace(subject, conventions=replace(subject.conventions, more=OURS.more))
    record = run_trial(case, ours, GRAPH)
    assert record.verdict is Verdict.BROKEN_INVARIANT
    assert record.message.endswith("[operations beyond the formula]")


@pytest.mark.parametrize("execution", [EAGER, GRAPH])
def test_another_entry_of_the_kernel(execution: Execution, monkeypatch: pytest.MonkeyPatch) -> None:
    # The answers are the same: only what was asked for them is not.
    monkeypatch.setattr(GEN.backend, "decode_kernel_modes", frozenset({ForwardMode.DECODE}))
    assert run_trial(find("mha-decode-bs2_ragged"), GEN, execution).verdict is Verdict.PASSED
    record = run_trial(find("mha-target_verify-bs2_ragged"), GEN, execution)
    assert record.verdict is Verdict.BROKEN_INVARIANT
    assert record.message.startswith("the kernel was asked for context ")
    assert record.message.endswith(" [kernel dispatch]")


def test_another_entry_after_a_history(monkeypatch: pytest.MonkeyPatch) -> None:
    base = Case(
        id="watched",
        family=Family.MHA,
        mode=Mode.DECODE,
        prefix_lens=(33, 64, 95),
        page_size=32,
        capture_bs=(2, 4),
    )
    modes = AllModes(GEN, cases_of(base.prefix_lens, (1, 4, 2), base))
    fill = PagedBackend.init_forward_metadata

    def forgetting(self: PagedBackend, batch: ForwardBatch) -> None:
        fill(self, batch)
        if batch.forward_mode is ForwardMode.IDLE:
            monkeypatch.setattr(type(self), "decode_kernel_modes", frozenset())

    monkeypatch.setattr(PagedBackend, "init_forward_metadata", forgetting)
    assert modes.run((Mode.TARGET_VERIFY, EAGER)) == []
    assert modes.run((Mode.IDLE, EAGER)) == []
    found = modes.run((Mode.TARGET_VERIFY, EAGER))
    told = "what is broken while a forward runs turns it red: a verify ran on the context kernel"
    assert found, f"{told} after an idle forward"
    [wrong] = found
    assert wrong.message == (
        "the kernel was asked for context 2 times, expected decode 2 times [kernel dispatch]"
    )


VERIFY = find("mla-target_verify-bs2_ragged")
DRAFT = find("mha-multi_step_draft-bs2_ragged")


@pytest.mark.parametrize(
    ("case", "calls", "captured", "said"),
    [
        (VERIFY, ["mla_decode"] * 2, None, ""),
        (VERIFY, ["mla_decode"], None, "mla_decode 1 times, expected mla_decode 2 times"),
        (VERIFY, ["mla_decode"] * 4, None, "mla_decode 4 times, expected mla_decode 2 times"),
        (VERIFY, [], None, "nothing, expected mla_decode 2 times"),
        (VERIFY, ["mla_decode", "mla_context"], None, "mla_decode 1 times, mla_context 1 times,"),
        (VERIFY, ["mla_decode"] * 2 + ["mla_context"], None, "mla_decode 2 times, mla_context 1"),
        (VERIFY, ["mla_decode"] * 8 + ["mla_context"], 2, "mla_decode 8 times, mla_context 1"),
        (VERIFY, ["mla_decode"] * 8, 2, ""),
        (VERIFY, ["mla_decode"] * 12, 2, ""),
        (VERIFY, ["mla_decode"] * 4, 2, "mla_decode 4 times, expected mla_decode 4 times and as"),
        # One of two graphs had no warm-up; two layers each make the least 4.
        (VERIFY, ["mla_decode"] * 6, 2, "mla_decode 6 times, expected mla_decode 4 times and as"),
        (VERIFY, ["mla_decode"] * 9, 2, "mla_decode 9 times"),
        (DRAFT, ["decode"] * 2 * (DRAFT.num_steps - 1), None, ""),
        (DRAFT, ["decode"] * 2, None, "decode 2 times, expected decode "),
        (find("mha-draft_extend_v1-bs2_ragged"), ["context"] * 2, None, ""),
        (find("mla-draft_extend_v1-bs2_ragged"), ["mla_decode"] * 2, None, ""),
        (find("mla-extend-bs2_ragged"), ["mla_context"] * 2, None, ""),
        (find("mla-idle-no_requests"), [], None, ""),
        (find("mla-idle-no_requests"), ["mla_decode"], None, "mla_decode 1 times, expected"),
    ],
)
def test_entries_by_hand(case: Case, calls: list[str], captured: int | None, said: str) -> None:
    found = check_entries(calls, case, OURS, captured=captured)
    if said:
        told = "each attention runs on the kernel entry of its mode, or the trial is red: "
        told += f"a {case.mode} that asked for {calls}"
        assert f"the kernel was asked for {said}" in "".join(found), told
    else:
        assert found == []
    assert check_entries(calls, case, Conventions(context_modes=None), captured=captured) == []


def test_a_baseline_has_its_own_entry() -> None:
    case = find("mha-target_verify-bs2_ragged")
    baseline = SUBJECTS["trtllm_mha-context_kernel/xqa"].conventions
    assert check_entries(["context"] * 2, case, baseline) == []
    assert check_entries(["decode"] * 2, case, baseline) != []
