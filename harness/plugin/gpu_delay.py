"""A delay on the GPU in every step of a server, which ``/slow_down`` sets in place of a sleep.

sglang sleeps on the host, which vanishes as long as the GPU has work left. This is a wait in the
target's forward, recorded by its graphs, whatever the attention backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

STATE = "specgate_gpu_delay_ns"
"""What the wait is now, in ``internal_states`` of ``/server_info``; missing where nothing waits."""
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


class GpuDelay:
    """The wait of one process: hooks for sglang's registry, each around what it is named after.

    Attributes:
        nanoseconds: [1] int64 on the GPU that every wait reads; None before the first.
    """

    def __init__(self) -> None:
        self.nanoseconds: torch.Tensor | None = None

    @property
    def hooks(self) -> dict[str, Callable[..., Any]]:
        """By target."""
        return {
            "sglang.srt.layers.logits_processor.LogitsProcessor.forward": self.forward,
            f"{SCHEDULER}.slow_down": self.slow_down,
            f"{SCHEDULER}.get_internal_state": self.get_internal_state,
        }

    def forward(
        self,
        original: Callable[..., Any],
        processor: Any,
        input_ids: Any,
        hidden_states: torch.Tensor,
        lm_head: Any,
        logits_metadata: Any,
        *rest: Any,
        **options: Any,
    ) -> Any:
        """Around the end of a model's forward: the target's waits in every step, no draft's."""
        if is_step_of_target(logits_metadata):
            self._wait(hidden_states.device)
        return original(
            processor, input_ids, hidden_states, lm_head, logits_metadata, *rest, **options
        )

    def _wait(self, device: torch.device) -> None:
        import torch

        from harness.plugin.spin import wait

        if self.nanoseconds is None:
            # Not in a graph's memory: sglang runs every forward before it captures it.
            self.nanoseconds = torch.zeros(1, dtype=torch.int64, device=device)
        wait(self.nanoseconds)

    def slow_down(self, original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
        """Around the handling of ``/slow_down``: the GPU waits for its seconds, and not the host.

        Where no forward has a wait the host sleeps as it would.
        """
        answer = original(scheduler, request)
        if self.nanoseconds is not None:
            seconds = scheduler.forward_sleep_time or 0.0
            scheduler.forward_sleep_time = None
            self.nanoseconds.fill_(round(seconds * 1e9))
        return answer

    def get_internal_state(self, original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
        """Around what a scheduler tells of itself: it tells the wait, too."""
        answer = original(scheduler, request)
        if self.nanoseconds is not None:
            answer.internal_state[STATE] = int(self.nanoseconds.item())
        return answer


def is_step_of_target(batch: Any) -> bool:
    """Whether a forward ends a step: a verify, or a decode that nobody speculates about.

    A draft decodes, too, but has a ``spec_info``.
    """
    mode = batch.forward_mode
    plain = mode.is_decode() and getattr(batch, "spec_info", None) is None
    return bool(mode.is_target_verify() or plain)
