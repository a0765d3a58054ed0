"""A server's delay is one wait of the target in every step, as long as ``/slow_down`` said last."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.core.paths import ROOT
from harness.plugin.gpu_delay import STATE, GpuDelay
from harness.upstream.forward_batch_info import ForwardMode

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HIDDEN = torch.zeros(2, 3)
# What hands on a forward's end without its batch knows no spec_info.
WITHOUT = "no spec_info"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What every wait read, in order."""
    seen: list[torch.Tensor] = []
    monkeypatch.setattr("harness.plugin.spin.wait", seen.append)
    return seen


def end_forward(delay: GpuDelay, mode: ForwardMode, spec_info: object = None) -> Any:
    batch = SimpleNamespace(forward_mode=mode)
    if spec_info is not WITHOUT:
        batch.spec_info = spec_info
    hook = delay.hooks["sglang.srt.layers.logits_processor.LogitsProcessor.forward"]
    return hook(
        lambda *args, **kwargs: (args, kwargs), "self", "ids", HIDDEN, "head", batch, "aux", last=1
    )


def slow_down(delay: GpuDelay, scheduler: Any, seconds: float | None) -> Any:
    def original(scheduler: Any, request: Any) -> str:
        scheduler.forward_sleep_time = request.forward_sleep_time
        return "done"

    request = SimpleNamespace(forward_sleep_time=seconds)
    return delay.hooks[f"{SCHEDULER}.slow_down"](original, scheduler, request)


def told(delay: GpuDelay) -> dict[str, Any]:
    state: dict[str, Any] = {"last_gen_throughput": 3.0}
    hook = delay.hooks[f"{SCHEDULER}.get_internal_state"]
    answer = hook(lambda *_: SimpleNamespace(internal_state=state), "scheduler", "request")
    assert answer.internal_state is state
    return state


@pytest.mark.parametrize(
    ("mode", "spec_info", "count"),
    [
        (ForwardMode.TARGET_VERIFY, "verify input", 1),
        (ForwardMode.TARGET_VERIFY, WITHOUT, 1),
        (ForwardMode.DECODE, None, 1),
        (ForwardMode.DECODE, "draft input", 0),
        (ForwardMode.DRAFT_EXTEND_V2, "draft extend input", 0),
        (ForwardMode.EXTEND, None, 0),
    ],
    ids=str,
)
def test_the_target_waits_once_in_a_step(
    mode: ForwardMode, spec_info: object, count: int, waits: list[torch.Tensor]
) -> None:
    args, kwargs = end_forward(GpuDelay(), mode, spec_info)
    rule = "a verify or decode of the target waits once, a draft and a prefill never"
    assert len(waits) == count, f"{rule}: {mode.name} of {spec_info} {count}, not {len(waits)}"
    processor, ids, hidden, head, _, *rest = args
    said = "the logits processor is called with all its arguments, as sglang gave them"
    given = ("self", "ids", "head", ["aux"], {"last": 1})
    assert (processor, ids, head, rest, kwargs) == given, f"{said}: {args}, {kwargs}"
    assert hidden is HIDDEN, f"{said}: hidden states are the tensor itself"


def test_every_wait_reads_the_memory_that_slow_down_writes(waits: list[torch.Tensor]) -> None:
    delay, scheduler = GpuDelay(), SimpleNamespace(forward_sleep_time=None)
    end_forward(delay, ForwardMode.TARGET_VERIFY)
    [recorded] = waits
    rule = "a wait reads int64 nanoseconds, 0 before slow_down"
    assert (recorded.dtype, recorded.tolist()) == (torch.int64, [0]), f"{rule}, not {recorded}"
    for seconds, nanoseconds in ((0.00006, 60_000), (0.0021, 2_100_000), (None, 0)):
        assert slow_down(delay, scheduler, seconds) == "done"
        said = "where forwards wait on the GPU, the host does not sleep, too"
        assert scheduler.forward_sleep_time is None, said
        rule = f"slow_down({seconds}) makes waits of {nanoseconds} ns"
        assert recorded.tolist() == [nanoseconds], f"{rule}, not {recorded.tolist()}"
        state = told(delay)
        rule = f"internal_state tells the wait as {STATE} = {nanoseconds}"
        assert state == {"last_gen_throughput": 3.0, STATE: nanoseconds}, f"{rule}, not {state}"
    end_forward(delay, ForwardMode.TARGET_VERIFY)
    shared = waits[1].data_ptr() == recorded.data_ptr()
    assert shared, "all forwards, so all graphs, wait by one memory, which slow_down writes"


def test_where_no_forward_waits_the_host_sleeps(waits: list[torch.Tensor]) -> None:
    delay, scheduler = GpuDelay(), SimpleNamespace(forward_sleep_time=None)
    end_forward(delay, ForwardMode.DRAFT_EXTEND_V2, "draft extend input")
    assert slow_down(delay, scheduler, 0.002) == "done"
    assert scheduler.forward_sleep_time == 0.002
    assert STATE not in told(delay)
    assert not waits


def driven(what: str, *numbers: int, interpreted: bool) -> Any:
    command = [sys.executable, "-m", "fixtures.drivers.gpu_waits", what, *map(str, numbers)]
    given = os.environ | {"TRITON_INTERPRET": str(int(interpreted)), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_a_recorded_wait_lasts_as_long_as_its_memory_says_at_each_replay() -> None:
    # One reading starts it; those after it come 7 ns apart, and the last is not too early any more.
    assert driven("replayed", 100, 0, 21, 22, interpreted=True) == [1 + 15, 1 + 1, 1 + 3, 1 + 4]


def test_the_compiled_wait_reads_the_clock_in_a_loop_of_its_own() -> None:
    for code in driven("compiled", 90, 100, 120, interpreted=False):
        readings, jumps = code["readings"], code["jumps"]
        rule = "the compiled wait reads the clock at its start and in a loop, 2 readings and 1 jump"
        assert (readings, jumps) == (2, 1), f"{rule}, not {readings} and {jumps}"
        assert code["bytes"] > 0, "the compiled wait has code"
