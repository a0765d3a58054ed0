"""One golden: answer, identity, origin, and the outcomes of a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch


class GoldenOutcome(StrEnum):
    """Outcome of one golden in a run."""

    VERIFIED = "verified"
    ADDED = "added"
    REWRITTEN = "rewritten"

    @property
    def is_red(self) -> bool:
        """Recording never passes: whoever recorded runs again to verify."""
        return self is not GoldenOutcome.VERIFIED


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Digests of a golden's inputs; a change of any makes it stale.

    Args:
        case: digest of the row, or of the prompt and its settings.
        oracle: version of what answered.
        seed: of the drawn inputs.
        weights: digest of the weights.
    """

    case: str
    oracle: int
    seed: int
    weights: str


@dataclass(frozen=True, kw_only=True)
class Golden:
    """One recorded answer.

    Args:
        identity: of its inputs.
        tensors: name -> tensor.
        facts: name -> a JSON value.
        origin: torch, commit, command, date.
    """

    identity: Identity
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    origin: Mapping[str, str] = field(default_factory=dict)

    def says_the_same(self, other: Golden) -> bool:
        """Whether identity and answer are equal, whoever computed them; NaN equals nothing."""
        return (
            self.identity == other.identity
            and self.facts == other.facts
            and self.tensors.keys() == other.tensors.keys()
            and all(
                t.dtype == other.tensors[name].dtype and torch.equal(t, other.tensors[name])
                for name, t in self.tensors.items()
            )
        )


def digest(value: Any) -> str:
    """SHA-256 of the canonical JSON of plain data."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of names, dtypes, shapes and bytes, in the order of the names."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        sha.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
