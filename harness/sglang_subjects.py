"""Subjects of sglang: backends of a release or a checkout, on each kernel that serves them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from harness.core.capability import SGLANG_CAPABILITIES, Capability
from harness.core.case import Case, Execution, Family, Mode
from harness.core.conventions import Conventions
from harness.core.numerics import Numerics
from harness.core.record import Environment
from harness.kernels.interface import Kernel
from harness.kernels.reference import TorchPaged
from harness.sglang.backend import (
    FLASHINFER_MHA,
    FLASHINFER_MLA,
    FLASHMLA,
    TRITON,
    TRTLLM_MHA,
    TRTLLM_MLA,
    Classes,
    SGLangBackend,
    SGLangDraftBackend,
    new_backend,
    new_draft_backend,
)
from harness.sglang.context import INTERPRETED, XQA
from harness.sglang.process import activate
from harness.sglang.releases import FOLDER, RELEASES, Release
from harness.subjects import ALL_MODES, REFERENCE, Subject


@dataclass(frozen=True, kw_only=True)
class SGLangSubject(Subject):
    """A backend of a release of sglang on one kernel.

    Args:
        release: whose files run.
        classes: where it keeps the backend.
        source: the folder of a checkout's ``sglang/``; the release's wheel if None.
        packs_query: whether the model packs the query, so that what else happens to it is seen
            where the backend does not.
    """

    release: Release
    classes: Classes
    source: Path | None = None
    packs_query: bool = False

    @property
    def served_modes(self) -> frozenset[Mode]:
        """The modes that the release has."""
        v1 = frozenset() if self.release.has_draft_extend_v1 else frozenset({Mode.DRAFT_EXTEND})
        return self.modes - v1

    def new_kernel(self, device: torch.device | str) -> Kernel:
        """Serves FlashInfer's entry points on a CPU; on CUDA sglang calls the real ones itself."""
        return TorchPaged(self.capability)

    def new_backend(self, case: Case, **pools: Any) -> SGLangBackend:
        """Raises UsageError where the release is not installed."""
        activate(self.release, self.source, pools["device"])
        return new_backend(self.classes, case=case, packs_query=self.packs_query, **pools)

    def new_draft_backend(self, case: Case, **pools: Any) -> SGLangDraftBackend:
        """Raises UsageError where the release is not installed."""
        activate(self.release, self.source, pools["device"])
        return new_draft_backend(self.classes, case=case, **pools)

    @property
    def capability(self) -> Capability:
        """See ``Subject``."""
        return SGLANG_CAPABILITIES[self.family, self.kernel]

    def adapted(self, case: Case) -> Case:
        """Without a k_scale where the pool of this backend does not divide by one."""
        scaled = self.conventions.scales_mla_cache or self.family is Family.MHA
        return case if scaled else replace(case, k_scale=1.0, v_scale=1.0)

    def reproduce(self, trial: str) -> str:
        """See ``Subject``."""
        others = "" if self.classes.is_trtllm else " --all-backends"
        source = f" --source {shlex.quote(str(self.source))}" if self.source else ""
        unpacked = os.environ.get(FOLDER)
        where = f"{FOLDER}={shlex.quote(unpacked)} " if unpacked else ""
        return f"{where}specgate upstream {self.release.version}{others}{source} -k '{trial}'"

    def environment(self, device: torch.device | str) -> Environment:
        """See ``Subject``; a checkout has the release that it is closest to, and its folder."""
        at = f" at {self.source}" if self.source else ""
        return replace(super().environment(device), sglang=f"{self.release.version}{at}")

    def numerics(self, device: torch.device | str) -> Numerics:
        """As of the backend; MHA prefill on SM90 is fmha_v2's, which takes its query in FP8."""
        if self.classes == TRITON and torch.device(device).type == "cuda":
            return TRITON_ON_CUDA
        if self.classes in NUMERICS:
            return NUMERICS[self.classes]
        plain = super().numerics(device)
        context = frozenset({Mode.EXTEND, Mode.DRAFT_EXTEND})
        rounds = plain.rounds_query | context
        scales = self.family is Family.MHA and self.release.scales_query
        return replace(plain, rounds_query=rounds, scales_query=rounds if scales else frozenset())

    def refusal(
        self, case: Case, execution: Execution, device: torch.device | str = "cpu"
    ) -> str | None:
        """Why the release or its kernel does not run this case."""
        if case.mode not in self.served_modes:
            return f"sglang {self.release.version} has no ForwardMode.DRAFT_EXTEND"
        on_sm90 = self.kernel == XQA and self.classes == TRTLLM_MHA
        if case.mode is Mode.EXTEND and on_sm90 and not self.release.prefills_on_sm90:
            return f"sglang {self.release.version} takes trtllm_mha for prefill on SM100 alone"
        for holds, reason in NOT_PRODUCED.items():
            if holds(self, case, execution):
                return reason
        if torch.device(device).type == "cuda":
            for fails, reason in NOT_COMPILED.items():
                if fails(self, case):
                    return reason
        return super().refusal(case, execution, device)

    @property
    def drafts_with_window(self) -> bool:
        """Whether a multi-step draft backend serves a draft model with a window."""
        versions = list(RELEASES)
        recent = versions.index(self.release.version) >= versions.index("0.5.23")
        return self.classes == TRITON and recent


FLASHINFER_MLA_DIMS = SGLANG_CAPABILITIES[Family.MLA, "flashinfer"].mla_dims


def _latent(case: Case) -> tuple[int, int]:
    return case.kv_lora_rank, case.qk_rope_head_dim


TRITON_LATENTS = frozenset({(512, 64), (256, 32)})


def _pads_after_plan(subject: SGLangSubject, case: Case, execution: Execution) -> bool:
    """Whether sglang pads a planned batch, for other ranks of DP attention.

    An eager draft extend marks its plan as final (``prepare_for_draft_extend``, #38580). What
    FlashInfer's and Triton's kernels do with more queries than were planned was not looked at.
    """
    planned = case.mode is Mode.DRAFT_EXTEND_V2 and execution is Execution.EAGER
    whole = case.padded_rows % case.num_draft_tokens == 0
    kernels = subject.classes in (TRTLLM_MHA, TRTLLM_MLA)
    return kernels and planned and whole and not case.pads_before_plan


NOT_PRODUCED: dict[Callable[[SGLangSubject, Case, Execution], bool], str] = {
    lambda subject, case, execution: (
        case.padded_rows > 0 and not _pads_after_plan(subject, case, execution)
    ): ("DP padding is done by sglang's worker, which plans again or truncates; not at this seam"),
    lambda _, case, __: (
        case.mode in (Mode.EXTEND, Mode.DECODE)
        and max(case.total_lens, default=0) > case.max_context_len
    ): (
        "sglang's scheduler ends a request at context_len - 2 tokens; only drafts and their verify "
        "reach on"
    ),
    lambda subject, case, _: (
        case.mode is Mode.MULTI_STEP_DRAFT
        and case.window_left >= 0
        and not subject.drafts_with_window
    ): (
        "this multi-step draft backend of sglang makes no index tensors for a draft model with a "
        "window"
    ),
    lambda subject, case, execution: (
        subject.classes == FLASHINFER_MLA
        and case.mode in (Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2)
        and execution is Execution.GRAPH
    ): "sglang captures no draft extend on flashinfer's MLA (eagle_worker_v2.py lists who can)",
    lambda subject, case, execution: (
        subject.classes == FLASHINFER_MHA
        and subject.release.has_draft_extend_v1
        and case.mode is Mode.DRAFT_EXTEND_V2
        and execution is Execution.GRAPH
    ): "this release captures no draft extend v2 on flashinfer (eagle_worker_v2.py lists who can)",
    lambda subject, case, _: (
        subject.classes == TRTLLM_MHA
        and subject.kernel == XQA
        and subject.release.has_draft_extend_v1
        and case.mode in (Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2)
    ): "this release drafts by trtllm-gen's context kernel, which SM90 lacks",
    lambda subject, case, _: (
        subject.classes == TRTLLM_MLA
        and case.mode is Mode.EXTEND
        and _latent(case) not in FLASHINFER_MLA_DIMS
    ): "trtllm_mla prefills on flashinfer's MLA wrapper, which serves 512 + 64 wide latents alone",
}

NOT_COMPILED: dict[Callable[[SGLangSubject, Case], bool], str] = {
    lambda subject, case: (
        subject.classes == TRITON
        and case.family is Family.MLA
        and case.mode in (Mode.DECODE, Mode.MULTI_STEP_DRAFT)
        and (case.kv_lora_rank, case.qk_rope_head_dim) not in TRITON_LATENTS
    ): (
        "Triton's decode takes a latent's key and value columns to the same power of two: "
        "ValueError('Cannot make_shape_compatible: incompatible dimensions at index 1: 64 and 128')"
    ),
}
"""What the real kernels of a GPU do not serve, quoted; what stands in for them does."""

# FlashInfer's prefill on two wrappers: one for the batch's own keys, one for those of the cache.
RAGGED = frozenset({(Mode.EXTEND, Execution.EAGER), (Mode.DRAFT_EXTEND_V2, Execution.EAGER)})
EXTENDS = (Mode.EXTEND, Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2)
NUMERICS = {
    # With a prefix, prefill falls back to flashinfer's MLA, which takes the query as it is; no row
    # has an FP8 cache and no prefix.
    TRTLLM_MLA: Numerics(rounds_query=ALL_MODES - {Mode.EXTEND}),
    FLASHINFER_MHA: Numerics(
        attends_new_keys=RAGGED,
        merges=RAGGED,
        source="sglang 0.5.23, flashinfer_backend.py, forward_extend: merge_state of two results",
    ),
    FLASHINFER_MLA: Numerics(),
    TRITON: Numerics(
        attends_new_keys=frozenset(
            (mode, execution) for mode in EXTENDS for execution in Execution
        ),
        source="sglang 0.5.23, triton_backend.py, forward_extend: k and v of the batch",
    ),
}
TRITON_ON_CUDA = replace(
    NUMERICS[TRITON],
    rounds_query=ALL_MODES,
    scales_query=ALL_MODES,
    rounds_weights=ALL_MODES,
    source="sglang 0.5.16, decode_attention.py and extend_attention.py: for keys of an FP8 cache "
    "query and weights are rounded, for the batch's own keys and MLA's rotary part they are not",
)

PACKED_MODES = frozenset({Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND_V2})
MHA_CONVENTIONS = Conventions(
    zero_table_tail=False,
    shares_draft_table=False,
    freezes_host_numbers=False,
    waits=True,
    context_modes=None,
    more=None,
)
MLA_CONVENTIONS = Conventions(
    zero_table_tail=False,
    shares_draft_table=False,
    freezes_host_numbers=False,
    scales_mla_cache=False,
    waits=True,
    context_modes=None,
    more=None,
    lacks=frozenset({"cu_seqlens_q", "cu_seqlens_k", "max_seq_len_q"}),
)


def sglang_subjects(
    release: Release, source: Path | None = None, device: torch.device | str = "cpu"
) -> tuple[SGLangSubject, ...]:
    """Every backend of a release on every kernel that serves it on this device."""
    label = "source" if source else release.version
    # Nothing stands in for FlashMLA on a CPU; on CUDA no kernel is unlimited or interpreted.
    absent = {"flash_mla"} if torch.device(device).type == "cpu" else {REFERENCE, INTERPRETED}
    return tuple(
        SGLangSubject(
            name=f"sglang-{label}/{classes.name}{'-packed_query' if packs else ''}/{kernel}",
            family=family,
            kernel=kernel,
            modes=PACKED_MODES if packs else ALL_MODES,
            conventions=conventions,
            release=release,
            classes=classes,
            source=source,
            packs_query=packs,
        )
        for family, classes, kernel, conventions, packs in (
            (Family.MHA, TRTLLM_MHA, "xqa", MHA_CONVENTIONS, False),
            (Family.MHA, TRTLLM_MHA, "xqa", MHA_CONVENTIONS, True),
            (Family.MHA, TRTLLM_MHA, "trtllm_gen", MHA_CONVENTIONS, False),
            (Family.MHA, TRTLLM_MHA, REFERENCE, MHA_CONVENTIONS, False),
            (Family.MLA, TRTLLM_MLA, "trtllm_gen", MLA_CONVENTIONS, False),
            (Family.MLA, TRTLLM_MLA, REFERENCE, MLA_CONVENTIONS, False),
            (Family.MHA, FLASHINFER_MHA, "flashinfer", MHA_CONVENTIONS, False),
            (Family.MLA, FLASHINFER_MLA, "flashinfer", MLA_CONVENTIONS, False),
            (Family.MHA, TRITON, "triton", MHA_CONVENTIONS, False),
            (Family.MLA, TRITON, "triton", MLA_CONVENTIONS, False),
            (Family.MHA, TRITON, INTERPRETED, MHA_CONVENTIONS, False),
            (Family.MLA, TRITON, INTERPRETED, MLA_CONVENTIONS, False),
            (Family.MLA, FLASHMLA, "flash_mla", MLA_CONVENTIONS, False),
        )
        if kernel not in absent and not (packs and release.packs_query)
    )
