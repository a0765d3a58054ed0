"""A kernel of one program that divides the GPU's time among the phases of a step.

A stamp ends one phase and begins another. All that it knows is device memory, so it is launched or
recorded in a CUDA graph alike, and no host waits for it.
"""

from __future__ import annotations

from enum import IntEnum

import torch
import triton
import triton.language as tl

from harness.plugin.gpu_clock import globaltimer


class StepPhase(IntEnum):
    """What the GPU's time is counted as."""

    OUTSIDE = 0
    """Of every step: a prefill, what follows it, and waiting for one."""
    HOST_GAP = 1
    """Between two steps: from a draft extend's end to the next draft's beginning."""
    DRAFT = 2
    VERIFY = 3
    SAMPLING = 4
    DRAFT_EXTEND = 5
    METADATA = 6
    """Of a backend of ours, in the middle of another phase of a step."""


BACK = len(StepPhase)
"""Stamps that end metadata: what it interrupted goes on."""

_OUTSIDE = tl.constexpr(int(StepPhase.OUTSIDE))
_HOST_GAP = tl.constexpr(int(StepPhase.HOST_GAP))
_METADATA = tl.constexpr(int(StepPhase.METADATA))
_BACK = tl.constexpr(BACK)
HEAD = 3
_HEAD = tl.constexpr(HEAD)
LANES = 1 << (len(StepPhase) - 1).bit_length()
_LANES = tl.constexpr(LANES)


@triton.jit(do_not_specialize=["phase"])
def stamp(state, phase):  # type: ignore[no-untyped-def]
    """End the phase that runs and begin another.

    Args:
        state: [HEAD + 2 * LANES] int64: the last stamp's time in ns, the phase that runs, the one
            below metadata; then ns by phase, and by phase how often it began.
        phase: of ``StepPhase``, or ``BACK``.
    """
    now = globaltimer()
    # All is read at once, for a stamp lasts as long as its reads that wait for one another.
    lane = tl.arange(0, _LANES)
    times, counts = state + _HEAD + lane, state + _HEAD + _LANES + lane
    spent, began = tl.load(times), tl.load(counts)
    last, current, below = tl.load(state), tl.load(state + 1), tl.load(state + 2)
    below = tl.where(current == _METADATA, below, current)
    following = tl.where(phase == _BACK, below, phase)
    # A prefill's metadata is part of the prefill.
    outside = (phase == _METADATA) & (current <= _HOST_GAP)
    following = tl.where(outside, current, following)
    # What a prefill ends was no gap between two steps.
    ended = tl.where((current == _HOST_GAP) & (following == _OUTSIDE), _OUTSIDE, current)
    tl.store(times, spent + tl.where(lane == ended, now - last, 0))
    tl.store(counts, began + ((lane == following) & (following == phase)).to(tl.int64))
    tl.store(state, now)
    tl.store(state + 1, following)
    tl.store(state + 2, below)


class Timeline:
    """The phases of one stream of work.

    Args:
        device: whose stamps it takes. The kernel is compiled here: a capture cannot.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._state = torch.zeros(HEAD + 2 * LANES, dtype=torch.int64, device=device)
        self.stamp(StepPhase.OUTSIDE)

    def stamp(self, phase: int) -> None:
        """Begin a phase where the current stream is, or go ``BACK``; nobody waits."""
        stamp[(1,)](self._state, int(phase), num_warps=1)

    def read(self) -> dict[StepPhase, tuple[float, int]]:
        """Microseconds of every phase that began, and how often it did; waits for the device."""
        if self._state.is_cuda:  # stamps may be on another stream than this copy
            torch.cuda.synchronize(self._state.device)
        numbers = self._state.tolist()[HEAD:]
        spent, began = numbers[:LANES], numbers[LANES:]
        return {phase: (spent[phase] / 1e3, began[phase]) for phase in StepPhase if began[phase]}
