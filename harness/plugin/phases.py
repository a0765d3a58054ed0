"""Hooks that stamp the phases of a server's steps, for any attention backend.

A phase lasts until the next one begins, so the phases of a step leave nothing out: a verify begins
where its planning does, and sampling goes on until the draft extend. Metadata is that of our
backends; of others it is part of the phase that needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch

from harness.plugin.stamp import BACK, StepPhase, Timeline

EAGLE = "sglang.srt.speculative"
WORKER = f"{EAGLE}.eagle_worker_v2.EAGLEWorkerV2"
DRAFT_WORKER = f"{EAGLE}.eagle_worker_v2.EagleDraftWorker"
OURS = "harness.plugin.backend.PluginBackend"
OUR_DRAFT = "harness.plugin.backend.PluginMultiStepDraftBackend"
Hook = Callable[..., Any]


class Recorder:
    """The timeline of a server's process, made when it is first needed.

    Args:
        device: of the model.
    """

    def __init__(self, device: str = "cuda") -> None:
        self._device = torch.device(device)
        self._stream: object = None

    @cached_property
    def timeline(self) -> Timeline:
        """Of the stream that steps run on."""
        return Timeline(self._device)

    def begin(self, phase: StepPhase) -> None:
        """A phase of a step begins on the current stream."""
        self._stream = self._current_stream()
        self.timeline.stamp(phase)

    def metadata(self, original: Hook, *args: Any, **kwargs: Any) -> Any:
        """Around planning, launched or recorded; on another stream it is no part of a step."""
        if not self._is_recording() and self._current_stream() != self._stream:
            return original(*args, **kwargs)
        self.timeline.stamp(StepPhase.METADATA)
        result = original(*args, **kwargs)
        self.timeline.stamp(BACK)
        return result

    def told(self) -> dict[str, list[float]]:
        """Name -> [microseconds, count] of the phases of a step so far."""
        found = self.timeline.read()
        return {
            phase.name.lower(): list(numbers)
            for phase, numbers in found.items()
            if phase is not StepPhase.OUTSIDE
        }

    def _current_stream(self) -> object:
        return torch.get_device_module(self._device).current_stream()

    def _is_recording(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def phase_hooks(recorder: Recorder) -> dict[str, Hook]:
    """What goes around which function of sglang and of ours; the names hold since sglang 0.5.14."""
    planned = ("init_forward_metadata", "init_forward_metadata_in_graph")
    metadata = [f"{backend}.{name}" for backend in (OURS, OUR_DRAFT) for name in planned]
    metadata.append(f"{OURS}.update_verify_buffers_to_fill_after_draft")
    found: dict[str, Hook] = {
        f"{WORKER}.forward_batch_generation": partial(forward, recorder),
        f"{DRAFT_WORKER}.draft": partial(begun, recorder, StepPhase.DRAFT),
        f"{WORKER}.verify": partial(begun, recorder, StepPhase.VERIFY),
        f"{EAGLE}.eagle_utils.eagle_sample": partial(begun, recorder, StepPhase.SAMPLING),
        f"{DRAFT_WORKER}._draft_extend_for_decode": partial(draft_extend, recorder),
        f"{OURS}.init_forward_metadata_out_graph": partial(plan_draft_extend, recorder),
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state": partial(tell, recorder),
    }
    found |= dict.fromkeys(metadata, recorder.metadata)
    graphs = [f"{backend}.init_cuda_graph_state" for backend in (OURS, OUR_DRAFT)]
    return found | dict.fromkeys(graphs, partial(prepared, recorder))


def begun(recorder: Recorder, phase: StepPhase, original: Hook, *args: Any, **kwargs: Any) -> Any:
    """Around what a phase begins with."""
    recorder.begin(phase)
    return original(*args, **kwargs)


def draft_extend(recorder: Recorder, original: Hook, *args: Any, **kwargs: Any) -> Any:
    """Around the last phase of a step."""
    result = begun(recorder, StepPhase.DRAFT_EXTEND, original, *args, **kwargs)
    recorder.begin(StepPhase.HOST_GAP)
    return result


def forward(
    recorder: Recorder, original: Hook, worker: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around a batch of any mode: a prefill is outside of every step."""
    if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
        recorder.begin(StepPhase.OUTSIDE)
    return original(worker, batch, *args, **kwargs)


def plan_draft_extend(
    recorder: Recorder, original: Hook, backend: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around the choice of a graph's metadata, which fills none but draft extend's."""
    call = partial(original, backend, forward_batch, *args, **kwargs)
    fills = forward_batch.forward_mode.name.startswith("DRAFT_EXTEND")
    return recorder.metadata(call) if fills else call()


def prepared(recorder: Recorder, original: Hook, *args: Any, **kwargs: Any) -> Any:
    """Around the allocation of what graphs read: stamps in them read the timeline."""
    assert recorder.timeline
    return original(*args, **kwargs)


def tell(recorder: Recorder, original: Hook, *args: Any, **kwargs: Any) -> Any:
    """Around what ``/server_info`` shows of a scheduler."""
    output = original(*args, **kwargs)
    output.internal_state["phases"] = recorder.told()
    return output
