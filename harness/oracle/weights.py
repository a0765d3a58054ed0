"""Checkpoint tensors under their Hugging Face names: linear layers and norms."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812

# Routing decides by comparison, which no implementation does at less than float32.
KEPT_WIDE = "e_score_correction_bias"


class OracleWeights:
    """A view of the named tensors below a prefix."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], prefix: str = "") -> None:
        self._tensors = tensors
        self._prefix = prefix

    @classmethod
    def at_dtype(cls, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> OracleWeights:
        """All of a checkpoint, cast once."""
        kept = {name: t if name.endswith(KEPT_WIDE) else t.to(dtype) for name, t in tensors.items()}
        return cls(kept)

    def at(self, name: str) -> OracleWeights:
        """The tensors below ``name``."""
        return OracleWeights(self._tensors, f"{self._prefix}{name}.")

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        """One tensor.

        Raises:
            ValueError: the checkpoint has no such tensor.
        """
        if name not in self:
            raise ValueError(f"the checkpoint has no tensor {self._prefix + name!r}")
        return self._tensors[self._prefix + name]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T`` with the bias where the checkpoint has one."""
        bias = self._tensors.get(f"{self._prefix}{name}.bias")
        return F.linear(x, self[f"{name}.weight"], bias)

    def rms_norm(self, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
        """Root-mean-square norm, in at least float32."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return scaled.to(x.dtype) * self[f"{name}.weight"]
