"""``python -m ci.sanitize``: trials under NVIDIA's compute-sanitizer, one line per tool.

memcheck runs eager trials without torch's caching allocator, which would hide accesses past a
tensor, and replayed ones with it, because a capture cannot do without. racecheck looks at our own
kernels alone. Needs a GPU, the CUDA toolkit's ``compute-sanitizer`` and the gpu extra.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from harness.core.paths import ROOT

CASE_TEST = "suites/differential/test_cases.py::test_case"
EDGE = "bs3_ragged_padded_to_4"
MODES = ("decode", "multi_step_draft", "target_verify", "draft_extend_v1", "draft_extend_v2")
SANITIZED_SUBJECTS = ("trtllm_mha/xqa", "trtllm_mla/flash_mla")
FOUND = 86
"""Exit code of compute-sanitizer where it found something."""


@dataclass(frozen=True)
class SanitizerCheck:
    """One run of compute-sanitizer.

    Args:
        name: in the line that tells how it went.
        execution: of the trials.
        tool: and its options.
        environment: on top of the process's own.
    """

    name: str
    execution: str
    tool: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


SANITIZER_CHECKS = (
    SanitizerCheck(
        "memcheck eager", "eager", ("memcheck",), {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    ),
    SanitizerCheck("memcheck graph", "graph", ("memcheck",)),
    SanitizerCheck("racecheck", "graph", ("racecheck", "--kernel-regex", "kns=metadata")),
)


def trials(execution: str) -> list[str]:
    """A trial of every mode that is captured, of both families."""
    return [
        f"{CASE_TEST}[{subject.removeprefix('trtllm_')[:3]}-{mode}-{EDGE}-{subject}-{execution}]"
        for subject in SANITIZED_SUBJECTS
        for mode in MODES
    ]


def command(sanitizer: str, check: SanitizerCheck) -> list[str]:
    """The command line of a check."""
    options = ["--error-exitcode", str(FOUND), "--target-processes", "all", "--print-limit", "5"]
    pytest = ["-m", "pytest", "-q", "-n0", "--device", "cuda", *trials(check.execution)]
    return [sanitizer, "--tool", *check.tool, *options, sys.executable, *pytest]


def main() -> int:
    """Exit code: 0 where every check is clean, 1 where one is not, 2 without the tool."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).is_file():
        print("sanitize: compute-sanitizer of the CUDA toolkit is not installed", file=sys.stderr)
        return 2
    codes = []
    for check in SANITIZER_CHECKS:
        environment = os.environ | check.environment
        line = command(sanitizer, check)
        codes.append(subprocess.run(line, cwd=ROOT, env=environment, check=False).returncode)
        told = {0: "clean", FOUND: "errors found"}.get(codes[-1], f"ended with {codes[-1]}")
        print(f"sanitize: {check.name}, {len(trials(check.execution))} trials: {told}", flush=True)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
