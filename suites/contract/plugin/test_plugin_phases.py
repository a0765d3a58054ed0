"""The GPU's time is divided among the phases of a step, whatever interrupts them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl

from harness.plugin import stamp as stamps
from harness.plugin.phases import Recorder, phase_hooks
from harness.plugin.stamp import BACK, StepPhase, Timeline

At = Callable[..., None]
EXTEND, DECODE = (SimpleNamespace(is_extend=lambda value=value: value) for value in (True, False))


class Clock:
    """Nanoseconds, in the place of the GPU's."""

    def __init__(self) -> None:
        self.now = 5_000

    def __call__(self) -> Any:
        return tl.full((), self.now, tl.int64)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Clock:
    if request.config.getoption("--device") != "cpu":
        pytest.skip("the clock is replaced in Triton's interpreter")
    made = Clock()
    monkeypatch.setattr(stamps, "globaltimer", made)
    return made


@pytest.fixture
def at(clock: Clock) -> tuple[At, Timeline]:
    timeline = Timeline("cpu")

    def stamp(now: int, phase: int) -> None:
        clock.now = now
        timeline.stamp(phase)

    return stamp, timeline


def test_a_step_is_divided_among_its_phases(at: tuple[At, Timeline]) -> None:
    stamp, timeline = at
    stamp(11_000, StepPhase.DRAFT)
    stamp(11_020, StepPhase.METADATA)
    stamp(11_024, BACK)
    stamp(11_100, StepPhase.VERIFY)
    stamp(11_107, StepPhase.METADATA)
    stamp(11_109, BACK)
    stamp(12_100, StepPhase.SAMPLING)
    stamp(12_130, StepPhase.DRAFT_EXTEND)
    stamp(12_300, StepPhase.HOST_GAP)
    stamp(12_311, StepPhase.DRAFT)
    found = timeline.read()
    assert found == {
        StepPhase.OUTSIDE: (11.0, 1),
        StepPhase.DRAFT: (pytest.approx(0.096), 2),
        StepPhase.METADATA: (pytest.approx(0.006), 2),
        StepPhase.VERIFY: (pytest.approx(0.998), 1),
        StepPhase.SAMPLING: (pytest.approx(0.030), 1),
        StepPhase.DRAFT_EXTEND: (pytest.approx(0.170), 1),
        StepPhase.HOST_GAP: (pytest.approx(0.011), 1),
    }


def test_waiting_and_a_prefill_are_outside_of_every_step(at: tuple[At, Timeline]) -> None:
    stamp, timeline = at
    stamp(6_000, StepPhase.DRAFT_EXTEND)
    stamp(6_500, StepPhase.HOST_GAP)
    stamp(9_000_000, StepPhase.OUTSIDE)  # an idle server, then a prefill with its metadata
    stamp(9_000_100, StepPhase.METADATA)
    stamp(9_000_200, BACK)
    stamp(9_001_000, StepPhase.DRAFT)
    found = timeline.read()
    gap, outside = found[StepPhase.HOST_GAP], found[StepPhase.OUTSIDE][0]
    assert gap == (0.0, 1), f"waiting for requests is OUTSIDE, no HOST_GAP: (0.0, 1), not {gap}"
    told = "metadata of a prefill is OUTSIDE, no METADATA of a step"
    assert StepPhase.METADATA not in found, told
    told = "OUTSIDE is the time from the last step's end to the next step's draft"
    assert outside == pytest.approx((9_001_000 - 500) / 1e3), f"{told}, not {outside}"


def test_metadata_between_two_steps_is_part_of_the_gap(at: tuple[At, Timeline]) -> None:
    stamp, timeline = at
    stamp(1_000, StepPhase.DRAFT_EXTEND)
    stamp(1_150, StepPhase.HOST_GAP)
    stamp(1_160, StepPhase.METADATA)
    stamp(1_165, BACK)
    stamp(1_190, StepPhase.DRAFT)
    found = timeline.read()
    told = "metadata is counted in the middle of a phase of a step, and a gap is none"
    assert StepPhase.METADATA not in found, told
    assert found[StepPhase.HOST_GAP] == (pytest.approx(0.040), 1)


def test_metadata_within_metadata_ends_at_the_phase_below(at: tuple[At, Timeline]) -> None:
    stamp, timeline = at
    stamp(1_000, StepPhase.VERIFY)
    stamp(1_010, StepPhase.METADATA)
    stamp(1_011, StepPhase.METADATA)
    stamp(1_013, BACK)
    stamp(1_020, BACK)
    stamp(1_100, StepPhase.SAMPLING)
    found = timeline.read()
    assert found[StepPhase.METADATA][0] == pytest.approx(0.003)
    assert found[StepPhase.VERIFY][0] == pytest.approx(0.097)


class Server:
    """Every hooked function, which takes so many nanoseconds by the name it ends with."""

    def __init__(self, clock: Clock, took: dict[str, int]) -> None:
        self._clock, self._took = clock, took
        self.recorder = Recorder("cpu")
        self._hooks = phase_hooks(self.recorder)

    def call(self, name: str, *args: Any, inside: Callable[[], object] = lambda: None) -> Any:
        (target,) = (one for one in self._hooks if one.endswith(name))

        def original(*given: Any) -> Any:
            assert given == args
            inside()
            self._clock.now += self._took.get(name, 0)
            return SimpleNamespace(internal_state={"other": 1})

        return self._hooks[target](original, *args)


@pytest.mark.parametrize(
    ("mode", "of_another_rank"),
    [
        pytest.param(EXTEND, False, id="prefill"),
        pytest.param(DECODE, True, id="decode-in-a-prefill-of-another-rank"),
    ],
)
def test_a_server_tells_the_phases_of_its_steps(
    clock: Clock, mode: SimpleNamespace, of_another_rank: bool
) -> None:
    took = {"V2.forward_batch_generation": 13, "Worker.draft": 100, "V2.verify": 700}
    took |= {"eagle_sample": 20, "_draft_extend_for_decode": 150}
    plan_draft = "DraftBackend.init_forward_metadata"
    took[plan_draft] = 8
    plan = "PluginBackend.init_forward_metadata_out_graph"
    took[plan] = 3
    server, worker, backend = Server(clock, took), object(), object()
    modes = [SimpleNamespace(name=name) for name in ("TARGET_VERIFY", "DRAFT_EXTEND_V2")]
    verify, extend = (SimpleNamespace(forward_mode=mode) for mode in modes)

    def step() -> None:
        server.call("Worker.draft", worker, inside=lambda: server.call(plan_draft, backend))
        server.call("V2.verify", worker, inside=lambda: server.call(plan, backend, verify))
        server.call("eagle_sample", worker)
        extended = "_draft_extend_for_decode"
        server.call(extended, worker, inside=lambda: server.call(plan, backend, extend))

    prefill = SimpleNamespace(forward_mode=mode, is_extend_in_batch=of_another_rank)
    decode = SimpleNamespace(forward_mode=DECODE, is_extend_in_batch=False)
    for waited, steps in ((0, 2), (90_000, 1)):
        clock.now += waited
        server.call("V2.forward_batch_generation", worker, prefill)
        for _ in range(steps):
            clock.now += 40
            server.call("V2.forward_batch_generation", worker, decode, inside=step)
    found = server.call("get_internal_state", worker).internal_state
    assert found["other"] == 1
    gap_us, _ = found["phases"].get("host_gap", (0, 0))
    batch = "an idle or decode batch in another rank's prefill" if of_another_rank else "a prefill"
    assert gap_us < 90, f"{batch} is OUTSIDE of every step: its time is no host gap"
    assert found["phases"] == {
        "host_gap": [pytest.approx(0.053), 3],
        "draft": [pytest.approx(0.3), 3],
        # Its planning fills nothing: it is part of the verify.
        "verify": [pytest.approx(2.109), 3],
        "sampling": [pytest.approx(0.06), 3],
        "draft_extend": [pytest.approx(0.45), 3],
        "metadata": [pytest.approx(0.033), 6],
    }


def test_planning_beside_the_steps_takes_none_of_their_time(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, backend = Server(clock, {"PluginBackend.init_forward_metadata": 5}), object()
    server.recorder.begin(StepPhase.VERIFY)
    monkeypatch.setattr(torch.cpu, "current_stream", lambda: "of plans")
    server.call("PluginBackend.init_forward_metadata", backend)
    assert "metadata" not in server.recorder.told()


def test_planning_is_timed_on_the_stream_that_steps_run_on_now(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, backend = Server(clock, {"PluginBackend.init_forward_metadata": 5}), object()
    server.recorder.begin(StepPhase.VERIFY)
    monkeypatch.setattr(torch.cpu, "current_stream", lambda: "of later steps")
    server.recorder.begin(StepPhase.VERIFY)
    server.call("PluginBackend.init_forward_metadata", backend)
    told = "steps that went over to another stream take their planning along"
    assert server.recorder.told().get("metadata") == [pytest.approx(0.005), 1], told


def test_planning_that_a_graph_records_is_stamped_on_whichever_stream_it_is_captured(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = ["of captures", "of steps"]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: len(streams) == 1)
    recorder = Recorder("cuda")
    recorder.timeline = Timeline("cpu")
    recorder.begin(StepPhase.VERIFY)
    streams.pop()

    def plan() -> None:
        clock.now += 5

    recorder.metadata(plan)
    said = "a graph that was captured beside the steps' stream is replayed on it: its stamps count"
    assert recorder.told().get("metadata") == [pytest.approx(0.005), 1], said
