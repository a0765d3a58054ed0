"""Probes call kernels past every check, and a table is judged by what they answer."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from harness.core.capability import CAPABILITIES, REFERENCE, XQA
from harness.core.case import Family
from harness.errors import KernelRefusal, UsageError
from harness.kernels import reference
from harness.kernels.checked import CheckedKernel
from harness.kernels.interface import DecodeCall
from harness.kernels.limits import __main__ as limits
from harness.kernels.limits.random_calls import ENTRIES, Shape, draw
from harness.kernels.limits.table import TABLE, LimitProbe, probes
from harness.kernels.reference import TorchPaged

CPU = torch.device("cpu")
REAL = tuple(dict.fromkeys(c for c in CAPABILITIES.values() if c is not REFERENCE))


@pytest.mark.parametrize("probe", probes(REAL), ids=lambda p: f"{p.capability.name}-{p.what}")
def test_the_emulation_refuses_exactly_what_is_beyond(probe: LimitProbe) -> None:
    call, kernel = draw(probe.shape), TorchPaged(probe.capability)
    if probe.is_within:
        call.on(kernel)
        return
    with pytest.raises(KernelRefusal, match=f"^{probe.capability.name} "):
        call.on(kernel)


@pytest.mark.parametrize(("page_size", "width"), [(16, 24), (32, 16), (64, 8), (128, 6)])
def test_a_table_has_three_spare_columns_and_whole_groups_of_128_tokens(
    page_size: int, width: int
) -> None:
    tables = draw(Shape(entry="decode", page_size=page_size)).arguments.block_tables
    assert tables.shape == (4, width)
    assert (tables[:, -3:] == 0).all()


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_slot_that_no_request_holds_is_poisoned(entry: str) -> None:
    """130 keys end two tokens into a page, 64 at its end: two pages of 128 and 64 of four."""
    shape = Shape(entry=entry, lengths=(130, 64), poison=float("nan"))
    for cache in draw(shape).arguments.caches:
        unread = cache.flatten(2).isnan().all(-1)
        held = sorted((~unread).sum(1).tolist())
        told = "slots that hold no poison, page by page: 64 + 64 + 2 and 64 keys, and nothing else"
        assert held == [0, 0, 2, 64, 64, 64], f"{told}: {held}"


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("entry", ["decode", "context"])
def test_sinks_are_drawn_where_they_are_asked_for(entry: str, sinks: bool) -> None:
    found = draw(Shape(entry=entry, sinks=sinks)).arguments.sinks
    assert (None if found is None else found.shape) == ((8,) if sinks else None)


def test_every_kernel_has_probes_on_both_sides() -> None:
    for capability in REAL:
        asked = probes((capability,))
        assert {probe.is_within for probe in asked} == {True, False}
        assert len({probe.what for probe in asked}) == len(asked)
    assert {capability for capability, *_ in TABLE} == set(REAL)


def test_a_probe_asks_what_its_name_says() -> None:
    for probe in probes(REAL):
        shape = probe.shape
        kv_heads = shape.kv_heads if ENTRIES[shape.entry] is Family.MHA else 1
        asked = asdict(shape) | {"group_size": shape.heads / kv_heads}
        for name, value in re.findall(r"(\w+) (\d+)(?!, \d)\b", probe.what):
            assert asked[name] == int(value), (probe.capability.name, probe.what)


def kernel(**changes: object) -> CheckedKernel:
    return CheckedKernel(XQA, reference.FUNCTIONS | changes)


def refuses(call: DecodeCall) -> torch.Tensor:
    raise ValueError("head_dim must be even\nmore")


def is_off(call: DecodeCall) -> torch.Tensor:
    return reference.decode(call) * 1.02


@pytest.mark.parametrize(
    ("kernel", "is_within", "verdict", "said"),
    [
        (kernel(), True, "right", "error "),
        (kernel(), False, "stricter than the kernel", "error "),
        (kernel(decode=refuses), True, "TOO LOOSE", "ValueError: head_dim must be even"),
        (kernel(decode=refuses), False, "right", "ValueError: head_dim must be even"),
        (kernel(decode=is_off), True, "TOO LOOSE", "error 2."),
        (kernel(decode=is_off), False, "right", "error 2."),
    ],
)
def test_verdicts(kernel: CheckedKernel, is_within: bool, verdict: str, said: str) -> None:
    # 17 queries and no mask: refused by every check on the way.
    probe = LimitProbe(XQA, "q_len 17", is_within, Shape(entry="decode", q_len=17, masked=False))
    answer = limits.ask(probe, kernel, CPU)
    assert answer.verdict == verdict
    assert answer.said.startswith(said)
    assert "\n" not in answer.said


def test_the_worst_row_counts() -> None:
    expected = torch.ones(3, 2, 4)
    assert limits.worst_row(expected, expected) == 0
    off = expected.clone()
    off[1] *= 1.25
    assert limits.worst_row(off, expected) == pytest.approx(0.25)
    assert limits.worst_row(off / 100, expected / 100) == pytest.approx(0.25)
    off[2, 0, 0] = torch.nan
    assert limits.worst_row(off, expected) > 1e30
    empty = torch.zeros(3, 2, 4)
    assert limits.worst_row(empty, empty) == 0
    assert limits.worst_row(empty + 1e-6, empty) > 1e30


def test_a_process_answers_for_one_probe(capsys: pytest.CaptureFixture[str]) -> None:
    assert limits.main(["--device", "cpu", "--probe", "1"]) == 0
    answer = limits.ProbeAnswer(**json.loads(capsys.readouterr().out))
    assert (answer.kernel, answer.what, answer.verdict) == ("xqa", "head_dim 128", "right")


def test_a_process_that_dies_or_hangs_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = probes((XQA,))[0]

    def dies(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, -11, "", "noise\nillegal address\n")

    monkeypatch.setattr(limits.subprocess, "run", dies)
    assert limits.in_process(0, probe, "cpu").said == "died with -11: illegal address"

    def hangs(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(limits.subprocess, "run", hangs)
    answer = limits.in_process(0, probe, "cpu")
    assert (answer.said, answer.agrees) == (f"no answer in {limits.SECONDS} s", False)


def test_the_command_prints_and_writes_every_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def runs(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        index = int(command[-1])
        probe = probes(limits.kernels_on(CPU))[index]
        answer = limits.ProbeAnswer(
            probe.capability.name, probe.what, probe.is_within, not index, "so"
        )
        return subprocess.CompletedProcess(command, 0, json.dumps(asdict(answer)) + "\n", "")

    monkeypatch.setattr(limits.subprocess, "run", runs)
    page = tmp_path / "limits.md"
    assert limits.main(["--device", "cpu", "--out", str(page)]) == 1
    printed, count = capsys.readouterr().out.splitlines(), len(probes(REAL))
    assert len(printed) == count
    assert printed[0] == "xqa  head_dim 64  within  so  right"
    assert printed[1].endswith("TOO LOOSE")
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    assert len(rows) == count + 1


def test_kernels_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits.kernels_on(CPU) == REAL
    monkeypatch.setattr(limits, "compute_capability", lambda _: (9, 0))
    assert [c.name for c in limits.kernels_on(torch.device("cuda"))] == ["xqa", "flash_mla"]
    made = TorchPaged(XQA)
    monkeypatch.setattr(limits, "KERNELS", {("mha", "xqa"): lambda device: made})
    assert limits.kernel_of(XQA, torch.device("cuda")) is made


def test_an_unknown_entry() -> None:
    with pytest.raises(UsageError, match=r"entry = 'prefill' .* \['context', 'decode'"):
        Shape(entry="prefill")
