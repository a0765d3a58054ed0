"""A mode that sees every operation and leaves torch's compiler out of the process."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A ``TorchDispatchMode`` whose first call does not import ``torch._dynamo``.

    That import takes as long as torch's own, once per process, and only keeps torch.compile from
    tracing the mode; nothing here is compiled.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
