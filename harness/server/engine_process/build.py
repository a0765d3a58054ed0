"""The scheduler that an engine process drives, built from its options."""

from __future__ import annotations

from pathlib import Path

import torch

from harness.core.capability import device_refusal
from harness.core.case import Family
from harness.core.environment import compute_capability, present
from harness.engine.models.checkpoint import read_json
from harness.engine.models.loader import load_pair
from harness.engine.scheduler import Scheduler
from harness.engine.spec_config import SpecConfig, SpecVersion
from harness.engines import EngineBuilder, EngineConfig, family_of
from harness.errors import CheckpointError, UsageError, rejected
from harness.server.engine_process.messages import EngineOptions
from harness.subjects import SUBJECTS, PagedSubject

DTYPES = {"reference": torch.float32}
"""The dtype of a kernel; real ones have bfloat16."""
VERSIONS = {"v1": SpecVersion.V1, "v2": SpecVersion.V2}


def build(options: EngineOptions) -> tuple[Scheduler, int, int]:
    """The scheduler, the size of the vocabulary and the end token.

    Raises:
        UsageError: there is no such device or kernel, or the kernel does not run on the device.
        CheckpointError: a file of the pair is missing or broken.
    """
    device = present(options.device, "device")
    torch.set_num_threads(1)
    dtype = DTYPES.get(options.kernel, torch.bfloat16)
    pair = load_pair(options.models / options.pair, dtype, device)
    backend = "trtllm_mla" if family_of(pair.target) is Family.MLA else "trtllm_mha"
    spec_config = None
    if options.spec != "none":
        spec_config = SpecConfig(
            num_steps=options.num_steps,
            num_draft_tokens=options.num_draft_tokens,
            version=VERSIONS[options.spec],
        )
    powers = [1 << n for n in range(options.max_running_requests.bit_length())]
    config = EngineConfig(
        page_size=options.page_size,
        num_pages=options.num_pages,
        max_bs=options.max_running_requests,
        max_context_len=options.context_length,
        capture_bs=tuple(sorted({*powers, options.max_running_requests})),
    )
    builder = EngineBuilder(pair, _subject(backend, options.kernel, device), spec_config, config)
    eos = _eos_token(options.models / options.pair / "target" / "generation_config.json")
    return builder.scheduler(prefix_cache=True), pair.target.config.vocab_size, eos


def _eos_token(path: Path) -> int:
    eos = read_json(path).get("eos_token_id")
    if not isinstance(eos, int):
        raise CheckpointError(f"{path}: " + rejected("eos_token_id", eos, "one token"))
    return eos


def _subject(backend: str, kernel: str, device: torch.device) -> PagedSubject:
    kernels = {
        subject.partition("/")[2]: found
        for subject, found in SUBJECTS.items()
        if subject.partition("/")[0] == backend
    }
    if kernel not in kernels:
        raise UsageError(rejected("kernel", kernel, ", ".join(sorted(kernels))))
    if why := device_refusal(kernels[kernel].capability, compute_capability(device)):
        raise UsageError(f"kernel = {kernel!r}: {why}")
    return kernels[kernel]
