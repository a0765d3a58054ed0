"""The subjects under test: names of kernels, backends and graph runners put together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from harness.attention.baselines import (
    ContextKernelMHABackend,
    HostLengthsMLABackend,
    KVIndicesMLAMultiStepDraftBackend,
    VerifyFixUpMHABackend,
)
from harness.attention.multi_step_draft import (
    PagedMultiStepDraftBackend,
    TRTLLMHAAttnMultiStepDraftBackend,
    TRTLLMMLAMultiStepDraftBackend,
)
from harness.attention.paged_backend import PagedBackend
from harness.attention.trtllm_mha import TRTLLMHAAttnBackend
from harness.attention.trtllm_mla import TRTLLMMLABackend
from harness.core.capability import CAPABILITIES, Capability, refusal
from harness.core.case import Case, Execution, Family, Mode
from harness.core.conventions import OURS, Conventions, MoreOperations
from harness.core.environment import compute_capability, environment
from harness.core.numerics import Numerics
from harness.core.record import Environment
from harness.errors import UsageError, rejected
from harness.graphs.draft_extend_runner import BaselineDraftExtendRunner, DraftExtendRunner
from harness.kernels.custom import CustomKernel, Function, load_function
from harness.kernels.interface import Kernel
from harness.kernels.registry import new_kernel, real_kernel
from harness.upstream.base_attn_backend import AttentionBackend, MultiStepDraftBackend

ALL_MODES = frozenset(Mode)
REFERENCE = "reference"
"""The unlimited kernel, for rows that no real one serves."""
TRIAL_TEST = "suites/differential/test_cases.py::test_case"
GRAPH_MODES = ALL_MODES - {Mode.EXTEND, Mode.IDLE}


@dataclass(frozen=True, kw_only=True)
class Subject(ABC):
    """One backend on one kernel.

    Args:
        name: "backend/kernel", as in test ids and reports.
        family: the attention family.
        kernel: name of the kernel's capability.
        draft_extend_runner: captures both draft extends.
        modes: what this subject is run on; a baseline only where it differs.
        conventions: of its backend.
    """

    name: str
    family: Family
    kernel: str
    draft_extend_runner: type[DraftExtendRunner] = DraftExtendRunner
    modes: frozenset[Mode] = ALL_MODES
    conventions: Conventions = OURS

    def new_kernel(self, device: torch.device | str) -> Kernel:
        """The kernel, shared by every backend of a rig."""
        return new_kernel(self.family, self.capability, device)

    @abstractmethod
    def new_backend(self, case: Case, **pools: Any) -> AttentionBackend:
        """The backend of every mode but the multi-step draft, on the pools of a case."""

    @abstractmethod
    def new_draft_backend(self, case: Case, **pools: Any) -> MultiStepDraftBackend:
        """The backend of the multi-step draft, on the pools of a case."""

    def adapted(self, case: Case) -> Case:
        """The case in this subject's conventions."""
        return case

    def reproduce(self, trial: str) -> str:
        """The command that runs one trial, "case-subject-execution", alone."""
        return f"pytest '{TRIAL_TEST}[{trial}]'"

    def environment(self, device: torch.device | str) -> Environment:
        """Versions that a trial ran on."""
        return environment(str(device))

    @property
    def is_baseline(self) -> bool:
        """Whether it stands for one optimization undone, in the modes where that shows."""
        return self.modes != ALL_MODES

    @property
    def capability(self) -> Capability:
        """What the subject's kernel accepts."""
        return CAPABILITIES[self.family, self.kernel]

    def numerics(self, device: torch.device | str) -> Numerics:
        """Numerics of the real kernel, or of the reference, which rounds its query alone."""
        if real_kernel(self.family, self.kernel, device) is not None:
            return self.capability.numerics
        casts = self.capability.casts_query_to_kv_dtype
        return Numerics(rounds_query=ALL_MODES if casts else frozenset())

    def refusal(
        self, case: Case, execution: Execution, device: torch.device | str = "cpu"
    ) -> str | None:
        """Why this subject does not run this case on this device, or None if it does."""
        if execution is Execution.GRAPH and case.mode not in GRAPH_MODES:
            return f"{case.mode} has no graph"
        if execution is Execution.GRAPH and case.padded_rows:
            return "DP padding after the planned rows is an eager case; graphs pad by bucket"
        return refusal(case, self.capability, compute_capability(device))


@dataclass(frozen=True, kw_only=True)
class PagedSubject(Subject):
    """A backend of ours.

    Args:
        backend: serves every mode but the multi-step draft.
        draft_backend: serves the multi-step draft.
    """

    backend: type[PagedBackend]
    draft_backend: type[PagedMultiStepDraftBackend]

    def new_backend(self, case: Case, **pools: Any) -> PagedBackend:
        """See ``Subject``."""
        return self.backend(**pools)

    def new_draft_backend(self, case: Case, **pools: Any) -> PagedMultiStepDraftBackend:
        """See ``Subject``."""
        return self.draft_backend(**pools)


@dataclass(frozen=True, kw_only=True)
class CustomKernelSubject(PagedSubject):
    """A backend of ours on a kernel of somebody else's.

    Args:
        function: the kernel.
    """

    function: Function

    @property
    def capability(self) -> Capability:
        """What the function states."""
        return self.function.capability  # type: ignore[attr-defined, no-any-return]

    def new_kernel(self, device: torch.device | str) -> CustomKernel:
        """See ``Subject``."""
        return CustomKernel(self.function)

    def numerics(self, device: torch.device | str) -> Numerics:
        """What the Capability states, on every device."""
        return self.capability.numerics

    def reproduce(self, trial: str) -> str:
        """See ``Subject``."""
        return f"{super().reproduce(trial)} --kernel {self.kernel}"


Kind = tuple[Family, type[PagedBackend], type[PagedMultiStepDraftBackend]]
MHA_BACKENDS: Kind = (Family.MHA, TRTLLMHAAttnBackend, TRTLLMHAAttnMultiStepDraftBackend)
MLA_BACKENDS: Kind = (Family.MLA, TRTLLMMLABackend, TRTLLMMLAMultiStepDraftBackend)


def _subject(name: str, of: Kind, **changes: Any) -> PagedSubject:
    family, backend, draft_backend = of
    fields: dict[str, Any] = {"backend": backend, "draft_backend": draft_backend} | changes
    return PagedSubject(name=name, family=family, kernel=name.split("/")[1], **fields)


BY_CONTEXT = frozenset({Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND_V2})
BASELINES: tuple[tuple[str, Kind, tuple[str, ...], dict[str, Any]], ...] = (
    (
        "host_lengths",
        MLA_BACKENDS,
        ("flash_mla", "trtllm_gen"),
        {
            "backend": HostLengthsMLABackend,
            "conventions": Conventions(
                waits=True, more=MoreOperations(eager=(-3, 0), recorded=(-14, 0), on_host=20)
            ),
            "modes": frozenset({Mode.DECODE, Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND_V2}),
        },
    ),
    (
        "kv_indices",
        MLA_BACKENDS,
        ("flash_mla", "trtllm_gen"),
        {
            "draft_backend": KVIndicesMLAMultiStepDraftBackend,
            "conventions": Conventions(more=MoreOperations(eager=(3, 19), recorded=(3, 10))),
            "modes": frozenset({Mode.MULTI_STEP_DRAFT}),
        },
    ),
    (
        "context_kernel",
        MHA_BACKENDS,
        ("xqa", "trtllm_gen"),
        {
            "backend": ContextKernelMHABackend,
            "conventions": Conventions(context_modes=BY_CONTEXT),
            "modes": BY_CONTEXT,
        },
    ),
    (
        "verify_fix_up",
        MHA_BACKENDS,
        ("xqa",),
        {"backend": VerifyFixUpMHABackend, "modes": frozenset({Mode.TARGET_VERIFY})},
    ),
    (
        "dead_topk",
        MHA_BACKENDS,
        ("xqa",),
        {
            "draft_extend_runner": BaselineDraftExtendRunner,
            "conventions": Conventions(more=MoreOperations(outputs=7)),
            "modes": frozenset({Mode.DRAFT_EXTEND_V2}),
        },
    ),
)
"""Baselines undo one optimization each: its name, whose it is, kernels, and what it changes."""

SUBJECTS = {
    subject.name: subject
    for subject in (
        _subject("trtllm_mha/reference", MHA_BACKENDS),
        _subject("trtllm_mha/xqa", MHA_BACKENDS),
        _subject("trtllm_mha/trtllm_gen", MHA_BACKENDS),
        _subject("trtllm_mla/reference", MLA_BACKENDS),
        _subject("trtllm_mla/flash_mla", MLA_BACKENDS),
        _subject("trtllm_mla/trtllm_gen", MLA_BACKENDS),
        *(
            _subject(f"trtllm_{of[0]}-{name}/{kernel}", of, **changes)
            for name, of, kernels, changes in BASELINES
            for kernel in kernels
        ),
    )
}


def find_subject(name: str) -> PagedSubject:
    """The subject of that name.

    Raises:
        UsageError: there is none; the message lists them.
    """
    if name not in SUBJECTS:
        raise UsageError(rejected("subject", name, ", ".join(SUBJECTS)))
    return SUBJECTS[name]


def custom_subjects(name: str) -> tuple[CustomKernelSubject, ...]:
    """Our backends on the kernel "module:function", of every family that it states.

    Raises:
        UsageError: there is no such function, or it states no Capability.
    """
    function = load_function(name)
    families: frozenset[Family] = function.capability.families  # type: ignore[attr-defined]
    return tuple(
        CustomKernelSubject(
            name=f"trtllm_{family}/{name.rpartition(':')[2]}",
            family=family,
            kernel=name,
            backend=backend,
            draft_backend=draft_backend,
            function=function,
        )
        for family, backend, draft_backend in (MHA_BACKENDS, MLA_BACKENDS)
        if family in families
    )
