"""A mode that sees every operation, and the tensors that an operation is given."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

SEQUENCES = (list, tuple)


class DispatchMode(TorchDispatchMode):
    """A ``TorchDispatchMode`` whose first call does not import ``torch._dynamo``.

    That import takes as long as torch's own, once per process, and only keeps torch.compile from
    tracing the mode; nothing here is compiled.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def tensors_in(value: object) -> list[torch.Tensor]:
    """Every tensor of an operation's argument or result, through lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    if isinstance(value, SEQUENCES):
        for item in value:
            if isinstance(item, torch.Tensor):
                found.append(item)
            elif isinstance(item, SEQUENCES):
                found += tensors_in(item)
    return found
