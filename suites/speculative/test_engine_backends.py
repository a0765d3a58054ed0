"""On the optimized backends, eager and replayed, speculation equals the oracle's."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from fixtures.toys.tiny_engine import BACKENDS, CONTEXT, NEW, PROMPTS, TinyPair
from fixtures.toys.toy_engine import spec_config
from harness.attention import baselines
from harness.engine.plan_stream import RecordedStreams
from harness.engine.request import Generation
from harness.errors import SpecgateError
from harness.oracle.generation import greedy

pytestmark = pytest.mark.untraced


@pytest.fixture(scope="module", params=sorted(BACKENDS))
def tiny(request: pytest.FixtureRequest) -> TinyPair:
    return TinyPair(request.param)


def test_target_only_decoding_is_the_oracles_greedy_text(tiny: TinyPair) -> None:
    obtained = tiny.engine(None).generate(PROMPTS, NEW)
    assert [g.token_ids for g in obtained] == [greedy(tiny.target, p, NEW)[0] for p in PROMPTS]


@pytest.mark.parametrize(
    ("version", "graphs", "overlap"),
    [
        pytest.param(1, False, False, id="draft_extend_v1-eager"),
        pytest.param(1, True, False, id="draft_extend_v1-graph"),
        pytest.param(2, False, False, id="draft_extend_v2-eager"),
        pytest.param(2, False, True, id="draft_extend_v2-eager-overlap"),
        pytest.param(2, True, False, id="draft_extend_v2-graph"),
        pytest.param(2, True, True, id="draft_extend_v2-graph-overlap"),
    ],
)
@pytest.mark.parametrize(("steps", "width"), [(3, 4), (4, 3)], ids=lambda n: str(n))
def test_tokens_and_accept_lengths_are_the_oracles(
    tiny: TinyPair, steps: int, width: int, version: int, graphs: bool, overlap: bool
) -> None:
    spec = spec_config(steps, width, version)
    streams = RecordedStreams() if overlap else None
    obtained = tiny.engine(spec, graphs=graphs, streams=streams).generate(PROMPTS, NEW)
    for prompt, generation in zip(PROMPTS, obtained, strict=True):
        expected = tiny.expected(prompt, spec)
        assert tuple(generation.token_ids) == expected.token_ids
        assert tuple(generation.accept_lengths) == expected.accept_lengths
    assert streams is None or streams.hazards() == []


def test_the_pair_is_worth_judging_by(tiny: TinyPair) -> None:
    spec = spec_config(3, 4)
    lengths = {n for prompt in PROMPTS for n in tiny.expected(prompt, spec).accept_lengths}
    assert lengths >= {1, 2, 3}


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graph"])
def test_a_text_may_fill_the_context(tiny: TinyPair, graphs: bool) -> None:
    spec, prompt = spec_config(3, 4), [(7 * i * i + 3) % 97 for i in range(CONTEXT - NEW)]
    (generation,) = tiny.engine(spec, graphs=graphs).generate([prompt], NEW)
    assert tuple(generation.token_ids) == tiny.expected(prompt, spec).token_ids
    assert tuple(generation.accept_lengths) == tiny.expected(prompt, spec).accept_lengths


@pytest.mark.parametrize("version", [1, 2], ids=["draft_extend_v1", "draft_extend_v2"])
def test_idle_rounds_and_a_retraction_between_replays(tiny: TinyPair, version: int) -> None:
    spec = spec_config(3, 4, version)
    engine = tiny.engine(spec, graphs=True)
    engine.step()
    requests = [engine.submit(prompt, NEW) for prompt in PROMPTS[:3]]
    engine.step()
    engine.retract(requests[1])
    while engine.running or engine.waiting:
        engine.step()
    engine.step()
    for prompt, request in zip(PROMPTS, requests, strict=False):
        assert tuple(request.generation.token_ids) == tiny.expected(prompt, spec).token_ids


@cache
def served(family: str, backend: Any, overlap: bool, new: int) -> list[Generation]:
    """A request alone, so that its end leaves idle rounds; the optimization's own without one."""
    prompt = PROMPTS[0]
    streams = RecordedStreams() if overlap else None
    engine = TinyPair(family).engine(spec_config(4, 5), streams=streams, backend=backend)
    return engine.generate([prompt], min(new, CONTEXT - len(prompt)))


@pytest.mark.parametrize("new", [1, CONTEXT], ids=["ends_in_its_prefill", "fills_the_context"])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize(
    ("family", "backend"),
    [
        ("gqa", baselines.ContextKernelMHABackend),
        ("gqa", baselines.VerifyFixUpMHABackend),
        ("mla", baselines.HostLengthsMLABackend),
    ],
)
def test_a_baseline_serves_what_its_optimization_does(
    family: str, backend: Any, overlap: bool, new: int
) -> None:
    try:
        found = served(family, None, overlap, new), served(family, backend, overlap, new)
    except SpecgateError as error:
        pytest.fail(f"{backend.__name__} serves every round that its optimization does: {error}")
    own, its = ([(g.token_ids, g.accept_lengths) for g in each] for each in found)
    assert its == own, "a baseline generates the tokens of its optimization, round by round"
