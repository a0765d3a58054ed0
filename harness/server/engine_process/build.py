"""From what was asked for to the engine that serves it."""

from __future__ import annotations

import json

import torch

from harness.core.capability import device_refusal
from harness.core.case import Family
from harness.core.environment import compute_capability, present
from harness.engine.models.loader import load_pair
from harness.engine.scheduler import Scheduler
from harness.engine.spec_config import SpecConfig, SpecVersion
from harness.engines import EngineBuilder, EngineConfig, family_of
from harness.errors import UsageError, rejected
from harness.server.engine_process.messages import Options
from harness.subjects import SUBJECTS, Subject

DTYPES = {"reference": torch.float32}
"""What a kernel computes in; real ones in bfloat16."""
VERSIONS = {"v1": SpecVersion.V1, "v2": SpecVersion.V2}


def build(options: Options) -> tuple[Scheduler, int, int]:
    """The engine, how many tokens there are, and the one that ends a text.

    Raises:
        UsageError: there is no such device or kernel, or the kernel does not run on the device.
    """
    device = present(options.device, "device")
    torch.set_num_threads(1)
    dtype = DTYPES.get(options.kernel, torch.bfloat16)
    pair = load_pair(options.models / options.pair, dtype, device)
    backend = "trtllm_mla" if family_of(pair.target) is Family.MLA else "trtllm_mha"
    speculation = None
    if options.spec != "none":
        speculation = SpecConfig(
            num_steps=options.num_steps,
            num_draft_tokens=options.num_draft_tokens,
            version=VERSIONS[options.spec],
        )
    powers = [1 << n for n in range(options.max_running_requests.bit_length())]
    room = EngineConfig(
        page_size=options.page_size,
        num_pages=options.num_pages,
        max_bs=options.max_running_requests,
        max_context_len=options.context_length,
        capture_bs=tuple(sorted({*powers, options.max_running_requests})),
    )
    rigging = EngineBuilder(pair, _subject(backend, options.kernel, device), speculation, room)
    path = options.models / options.pair / "target" / "generation_config.json"
    generation = json.loads(path.read_text(encoding="utf-8"))
    engine = rigging.engine(prefix_cache=True)
    return engine, pair.target.config.vocab_size, int(generation["eos_token_id"])


def _subject(backend: str, kernel: str, device: torch.device) -> Subject:
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
