"""Through the optimized backends, eager and replayed, speculation is what the oracle says it is."""

from __future__ import annotations

import pytest

from fixtures.tiny_engine import BACKENDS, NEW, PROMPTS, Rig
from fixtures.toy_engine import speculation
from harness.engine.plan_stream import RecordedStreams
from harness.oracle.generation import greedy


@pytest.fixture(scope="module", params=sorted(BACKENDS))
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(request.param)


def test_plain_decoding_is_the_oracles_greedy_text(rig: Rig) -> None:
    obtained = rig.engine(None).generate(PROMPTS, NEW)
    assert [g.token_ids for g in obtained] == [greedy(rig.target, p, NEW)[0] for p in PROMPTS]


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
    rig: Rig, steps: int, width: int, version: int, graphs: bool, overlap: bool
) -> None:
    spec = speculation(steps, width, version)
    streams = RecordedStreams() if overlap else None
    obtained = rig.engine(spec, graphs=graphs, streams=streams).generate(PROMPTS, NEW)
    for prompt, generation in zip(PROMPTS, obtained, strict=True):
        expected = rig.expected(prompt, spec)
        assert tuple(generation.token_ids) == expected.token_ids
        assert tuple(generation.accept_lengths) == expected.accept_lengths
    assert streams is None or streams.hazards() == []


def test_the_pair_is_worth_judging_by(rig: Rig) -> None:
    spec = speculation(3, 4)
    lengths = {n for prompt in PROMPTS for n in rig.expected(prompt, spec).accept_lengths}
    assert lengths >= {1, 2, 3}
