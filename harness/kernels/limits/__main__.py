"""``python -m harness limits``: what a capability table says, asked of the kernel itself.

For every field one call within and one beyond it are launched past the checks. Within, the kernel
must agree with the reference kernel; beyond, it must refuse or disagree, or the table is stricter
than it need be. Every probe has a process of its own: a kernel that faults or hangs takes nothing
with it, and binaries compile side by side.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from harness.core.argument_types import CommandLine, check_writable
from harness.core.capability import CAPABILITIES, REFERENCE, Capability, device_refusal
from harness.core.case import KVDtype
from harness.core.environment import compute_capability, environment, present
from harness.core.paths import ROOT
from harness.errors import SpecgateError, UsageError
from harness.kernels.checked import CheckedKernel
from harness.kernels.limits.random_calls import draw
from harness.kernels.limits.table import LimitProbe, probes
from harness.kernels.reference import FUNCTIONS, TorchPaged
from harness.kernels.registry import KERNELS

WORKERS, SECONDS = 8, 480
AGREES = {KVDtype.AUTO: 1e-2, KVDtype.FP8: 1e-1}
"""Largest relative L2 error of a row: some bf16 roundings; softmax weights rounded to FP8."""
KERNEL_ERRORS = (SpecgateError, AssertionError, KeyError, RuntimeError, TypeError, ValueError)
"""Errors by which kernel packages refuse a call."""


@dataclass(frozen=True)
class ProbeAnswer:
    """The answer to a probe.

    Args:
        kernel: its name.
        what: the field and its value.
        is_within: whether the table says that the kernel serves it.
        agrees: whether the kernel gave the reference's answer.
        said: the largest relative error of a row, or why there is no answer.
    """

    kernel: str
    what: str
    is_within: bool
    agrees: bool
    said: str

    @property
    def verdict(self) -> str:
        """The verdict on the table."""
        if self.is_within:
            return "right" if self.agrees else "TOO LOOSE"
        return "stricter than the kernel" if self.agrees else "right"

    def line(self, separator: str) -> str:
        """One row of a table."""
        side = "within" if self.is_within else "beyond"
        return separator.join((self.kernel, self.what, side, self.said, self.verdict))


class UncheckedKernel(CheckedKernel):
    """A kernel without its checks."""

    def _check(self, *_: Any) -> None:
        """Everything passes."""


def ask(probe: LimitProbe, kernel: CheckedKernel, device: torch.device) -> ProbeAnswer:
    """Launch a probe past the kernel's checks, and compare with the reference kernel."""
    call = draw(probe.shape, device)
    reference = UncheckedKernel(REFERENCE, FUNCTIONS)
    expected = call.on(reference, out_dtype=torch.float32)
    question = (probe.capability.name, probe.what, probe.is_within)
    try:
        obtained = call.on(UncheckedKernel(kernel.capability, kernel.kernels))
        error = worst_row(obtained, expected)
    except KERNEL_ERRORS as reason:
        first = str(reason).strip().partition("\n")[0][:160]
        return ProbeAnswer(*question, False, f"{type(reason).__name__}: {first}")
    agrees = error <= AGREES[probe.shape.kv_dtype]
    return ProbeAnswer(*question, agrees, f"error {error:.1e}")


def worst_row(obtained: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest relative L2 error of a row; infinite where a value is not finite.

    Args:
        obtained: [T, heads, dim].
        expected: likewise, float32; a row of zeros must be met exactly.
    """
    difference = (obtained.float() - expected).flatten(1).norm(dim=1)
    size = expected.flatten(1).norm(dim=1)
    error = (
        (difference / size)
        .where(size > 0, difference.sign() * torch.inf)
        .where((size > 0) | (difference != 0), 0)
    )
    return float(error.nan_to_num(torch.inf).max())


def kernels_on(device: torch.device) -> tuple[Capability, ...]:
    """Capabilities of the kernels that this device runs; on a CPU of all that are emulated."""
    gpu = compute_capability(device)
    distinct = dict.fromkeys(CAPABILITIES.values())
    return tuple(c for c in distinct if c.compute_capabilities and not device_refusal(c, gpu))


def kernel_of(capability: Capability, device: torch.device) -> CheckedKernel:
    """The kernel on a GPU, its strict emulation on a CPU."""
    if device.type == "cpu":
        return TorchPaged(capability)
    (family,) = capability.families
    made = KERNELS[family, capability.name](device)
    assert isinstance(made, CheckedKernel)
    return made


def in_process(index: int, probe: LimitProbe, device: str) -> ProbeAnswer:
    """Ask in a process of its own; one that dies or hangs has no answer."""
    command = [
        sys.executable,
        "-m",
        "harness.kernels.limits",
        "--device",
        device,
        "--probe",
        str(index),
    ]
    question = (probe.capability.name, probe.what, probe.is_within)
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return ProbeAnswer(*question, False, f"no answer in {SECONDS} s")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1][:160]
        return ProbeAnswer(*question, False, f"died with {done.returncode}: {last}")
    return ProbeAnswer(**json.loads(done.stdout.strip().splitlines()[-1]))


def report(answers: Sequence[ProbeAnswer], device: str) -> str:
    """The answers as a Markdown page."""
    machine = environment(device)
    wrong = sum(answer.verdict != "right" for answer in answers)
    head = [
        "# Limits of the kernels, as probed",
        "",
        f"{machine.device}, torch {machine.torch}, flashinfer {machine.flashinfer or 'none'}: "
        f"{len(answers)} probes, {wrong} verdicts other than right.",
        "Written by `python -m harness limits`.",
        "",
        "| kernel | asked | table | kernel | verdict |",
        "|---|---|---|---|---|",
    ]
    rows = ("| " + answer.line(" | ").replace("\n", " ") + " |" for answer in answers)
    return "\n".join((*head, *rows, ""))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 1 where a table is too loose."""
    parser = CommandLine(prog="specgate limits", description=__doc__)
    whose = "whose kernels are asked: cuda, cuda:1, …, or cpu"
    parser.add_argument("--device", default="cuda", metavar="NAME", help=whose)
    parser.add_argument("--out", type=Path, metavar="PAGE", help="a Markdown page to write")
    parser.add_argument("--probe", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    try:
        device = present(options.device, "--device")
        if options.out:
            check_writable(options.out, "--out")
    except UsageError as error:
        parser.error(str(error))
    asked = probes(kernels_on(device))
    if options.probe is not None:
        probe = asked[options.probe]
        print(json.dumps(asdict(ask(probe, kernel_of(probe.capability, device), device))))
        return 0
    with ThreadPoolExecutor(WORKERS) as pool:
        jobs = [pool.submit(in_process, i, p, options.device) for i, p in enumerate(asked)]
        answers = []
        for job in jobs:
            answers.append(job.result())
            print(answers[-1].line("  "), flush=True)
    if options.out:
        options.out.write_text(report(answers, options.device), encoding="utf-8")
    return int(any(answer.verdict == "TOO LOOSE" for answer in answers))


if __name__ == "__main__":
    sys.exit(main())
