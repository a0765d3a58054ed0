"""A prompt with a cached beginning generates the same as one that is computed whole."""

from __future__ import annotations

import random

import pytest
import torch

from fixtures.toys.tiny_engine import BACKENDS, NEW, TinyPair
from harness.engine.plan_stream import RecordedStreams
from harness.engine.prefix_cache import PrefixCache
from harness.engine.request import Request
from harness.engine.scheduler import Scheduler
from harness.engine.spec_config import SpecConfig, SpecVersion
from harness.errors import ContractError, UsageError
from harness.upstream.allocator import PagedAllocator

SPECS = {
    "target_only": None,
    "v1": SpecConfig(num_steps=3, num_draft_tokens=3, version=SpecVersion.V1),
    "v2": SpecConfig(num_steps=3, num_draft_tokens=3, version=SpecVersion.V2),
}
FIRST = [5, 9, 3, 11, 60, 2, 7, 40, 21, 8]
FORKED = [*FIRST[:8], 22, 8, 13]
"""Two whole pages alike, but another token after the second."""
LONGER = [*FIRST, 17, 33, 4]


@pytest.fixture(scope="module", params=sorted(BACKENDS))
def tiny(request: pytest.FixtureRequest) -> TinyPair:
    return TinyPair(request.param)


def finish(engine: Scheduler, *prompts: list[int]) -> list[Request]:
    requests = [engine.submit(prompt, NEW) for prompt in prompts]
    while not engine.idle:
        engine.step()
        balanced(engine)
    return requests


def balanced(engine: Scheduler) -> None:
    usage = engine.usage
    assert usage.free_pages + usage.cached_pages + usage.held_pages == usage.total_pages


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize(
    ("name", "streams"),
    [("target_only", None), ("v1", None), ("v2", None), ("v2", RecordedStreams)],
    ids=["target_only", "v1", "v2", "v2_overlap"],
)
@torch.inference_mode()
def test_warm_answers_are_the_oracles(tiny, name, streams, graphs):
    spec = SPECS[name]
    due = {len(p): tiny.expected(p, spec or SPECS["v2"]) for p in (FIRST, FORKED, LONGER)}
    engine = tiny.engine(spec, graphs=graphs, streams=streams and streams(), prefix_cache=True)
    cold = finish(engine, FIRST)[0]
    warm = finish(engine, FORKED, LONGER, FIRST)
    assert [r.generation.cached_tokens for r in (cold, *warm)] == [0, 4, 8, 8]
    for request in (cold, *warm):
        expected = due[len(request.prompt)]
        assert request.generation.token_ids == list(expected.token_ids)
        if spec:
            accepted = request.generation.accept_lengths
            assert accepted == list(expected.accept_lengths)[: len(accepted)]


@torch.inference_mode()
def test_generated_tokens_are_found_again(tiny):
    engine = tiny.engine(SPECS["v2"], prefix_cache=True)
    said = finish(engine, FIRST)[0].tokens
    again = finish(engine, [*said[:21], 1])[0].generation
    due = tiny.expected([*said[:21], 1], SPECS["v2"])
    assert again.cached_tokens == 20
    assert again.token_ids == list(due.token_ids)
    assert again.accept_lengths == list(due.accept_lengths)[: len(again.accept_lengths)]


def test_a_prompt_of_whole_pages_leaves_a_token_to_compute():
    allocator = PagedAllocator(6, 4)
    cache, pages = PrefixCache(allocator), allocator.alloc(2)
    assert cache.insert(FIRST[:8], 8, pages) == {pages[0]}
    assert [node.page for node in cache.acquire(FIRST[:8])] == [pages[0]]


@torch.inference_mode()
def test_eviction_makes_room_and_nothing_leaks(tiny):
    engine = tiny.engine(SPECS["v2"], prefix_cache=True, num_pages=1 + 9)
    draw = random.Random(3)
    for _ in range(6):
        prompt = [draw.randrange(90) for _ in range(draw.randrange(9, 18))]
        request = finish(engine, prompt)[0]
        assert len(request.generation.token_ids) == NEW
    assert engine.usage.cached_pages > 4
    cached = engine.usage.cached_pages
    assert engine.flush() == cached
    assert engine.usage.free_pages == 9


@torch.inference_mode()
def test_aborted_and_retracted_requests_give_their_pages_back(tiny):
    engine = tiny.engine(SPECS["v2"], prefix_cache=True)
    finish(engine, FIRST)
    one, two = engine.submit(LONGER, NEW), engine.submit(FORKED, NEW)
    engine.step()
    engine.retract(one)
    balanced(engine)
    engine.abort(two)
    balanced(engine)
    while not engine.idle:
        engine.step()
        balanced(engine)
    assert one.generation.token_ids == list(tiny.expected(LONGER, SPECS["v2"]).token_ids)
    said = "cached_tokens of a retracted request are those of its first prefill"
    assert one.generation.cached_tokens == 8, said
    assert engine.usage.held_rows == engine.usage.held_pages == 0
    engine.flush()
    assert engine.usage.free_pages == engine.usage.total_pages


@torch.inference_mode()
def test_a_prefill_that_fails_caches_nothing(tiny, monkeypatch):
    engine = tiny.engine(SPECS["v2"], prefix_cache=True)
    finish(engine, FIRST[:5])

    def fails(*_: object) -> None:
        raise RuntimeError("out of memory")

    request = engine.submit(LONGER, NEW)
    with monkeypatch.context() as patched:
        patched.setattr(engine._worker, "prefill", fails)
        before = engine.usage
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.step()
    said = "pages of a prefill that failed hold no keys and values: they are freed and not cached"
    assert engine.usage == before, f"{said}: {engine.usage}, not {before}"
    while not engine.idle:
        engine.step()
    assert request.generation.cached_tokens == 4, "a page that was cached before is found still"
    assert request.generation.token_ids == list(tiny.expected(LONGER, SPECS["v2"]).token_ids)


@torch.inference_mode()
def test_a_busy_engine_does_not_flush(tiny):
    engine = tiny.engine(SPECS["v2"], prefix_cache=True)
    engine.submit(FIRST, 4)
    with pytest.raises(ContractError, match="0 running, 1 waiting"):
        engine.flush()
    engine.step()
    with pytest.raises(ContractError, match="1 running, 0 waiting"):
        engine.flush()
    assert not engine.idle


@pytest.mark.parametrize(("name", "most"), [("target_only", 14), ("v1", 12), ("v2", 12)])
@pytest.mark.parametrize("prefix_cache", [False, True], ids=["cold", "cached"])
@torch.inference_mode()
def test_what_just_fits_is_served_and_one_token_more_is_refused(tiny, name, most, prefix_cache):
    """Six pages of four; 10 prompt tokens, a round of 1 or 3, and the last token is not stored."""
    engine = tiny.engine(SPECS[name], prefix_cache=prefix_cache, num_pages=1 + 6)
    with pytest.raises(UsageError, match=r"tokens of a request and a round = 25 .*<= 24"):
        engine.submit(FIRST, most + 1)
    requests = [engine.submit(FIRST, most) for _ in range(3)]
    engine.step()
    while not engine.idle:
        if engine.running:
            engine.retract(engine.running[-1])
        engine.step()
        balanced(engine)
    assert {len(request.generation.token_ids) for request in requests} == {most}
