"""The base class of kernels: each call is checked in one place, and then launched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain

import torch

from harness.core.capability import Capability
from harness.core.case import Family
from harness.kernels import shape_checks
from harness.kernels.interface import AttentionCall, ContextCall, DecodeCall

KernelFunction = Callable[..., torch.Tensor]
"""The launch of a checked call: one ``DecodeCall`` or ``ContextCall`` -> the result."""
KEPT_CALLS = 1 << 16
"""Entries that a kernel remembers at most: a server's may be called for weeks."""


class CheckedKernel:
    """A ``Kernel`` that refuses what its Capability refuses and launches everything else.

    A call without a query row or without a request launches nothing and returns zeros.

    Args:
        capability: what is refused.
        kernels: entry -> what launches it; entries of a family that the capability lacks are never
            reached.

    Attributes:
        kernels: as given.
        calls: entries called last, in order: "decode", "context", "mla_decode" or "mla_context". A
            call that is being recorded appears once, its replays do not.
    """

    def __init__(self, capability: Capability, kernels: Mapping[str, KernelFunction]) -> None:
        self._capability = capability
        self.kernels = kernels
        self.calls: list[str] = []

    @property
    def capability(self) -> Capability:
        """What this kernel accepts."""
        return self._capability

    def decode(self, call: DecodeCall) -> torch.Tensor:
        """MHA; see ``Kernel.decode``."""
        checks = chain(
            shape_checks.uniform(self.capability, call),
            shape_checks.packed_mask(self.capability, call),
            shape_checks.window_and_sinks(self.capability, call, call.q_len_per_req),
        )
        return self._launch("decode", Family.MHA, call, checks)

    def context(self, call: ContextCall) -> torch.Tensor:
        """MHA; see ``Kernel.context``."""
        checks = chain(
            shape_checks.ragged(call), shape_checks.window_and_sinks(self.capability, call)
        )
        return self._launch("context", Family.MHA, call, checks)

    def mla_decode(self, call: DecodeCall) -> torch.Tensor:
        """Absorbed MLA; see ``Kernel.mla_decode``."""
        checks = chain(
            shape_checks.latent(self.capability, call),
            shape_checks.uniform(self.capability, call),
        )
        return self._launch("mla_decode", Family.MLA, call, checks)

    def mla_context(self, call: ContextCall) -> torch.Tensor:
        """Absorbed MLA; see ``Kernel.mla_context``."""
        checks = chain(shape_checks.latent(self.capability, call), shape_checks.ragged(call))
        return self._launch("mla_context", Family.MLA, call, checks)

    def _launch(
        self,
        entry: str,
        family: Family,
        call: AttentionCall,
        checks: Iterable[shape_checks.ShapeCheck],
    ) -> torch.Tensor:
        self._check(entry, family, call, checks)
        if call.is_empty:
            shape = (*call.q.shape[:2], call.value_dim)
            return call.q.new_zeros(shape, dtype=call.out_dtype)
        return self.kernels[entry](call)

    def _check(
        self,
        entry: str,
        family: Family,
        call: AttentionCall,
        checks: Iterable[shape_checks.ShapeCheck],
    ) -> None:
        capability = self.capability
        common = chain(
            shape_checks.query_and_cache(capability, family, call),
            shape_checks.tables(capability, call),
            shape_checks.output(capability, call),
        )
        shape_checks.refuse_unless(f"{capability.name} {entry}", chain(common, checks))
        self.calls.append(entry)
        if len(self.calls) > KEPT_CALLS:
            del self.calls[: KEPT_CALLS // 2]


def scale_and_cast(out: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """The result of a kernel that knows neither the output's scale nor its dtype."""
    return (out if scale == 1 else out * scale).to(dtype)
