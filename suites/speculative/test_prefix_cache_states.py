"""After any sequence of submit, step, abort, retract and flush, every page has one owner."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fixtures.tables.past_examples import PastExample
from fixtures.toys.tiny_engine import TinyPair
from harness.engine.request import Request
from harness.engine.spec_config import SpecConfig, SpecVersion

SPECS = tuple(
    SpecConfig(num_steps=steps, num_draft_tokens=width, version=version)
    for steps, width in ((3, 3), (1, 2), (4, 5))
    for version in SpecVersion
)
PAGES = 10
"""One of the longest requests needs six of them, so that three at once do not fit."""
STEM = (5, 9, 3, 11, 60, 2, 7, 40, 21)
PROMPTS = (STEM[:1], STEM[:8], STEM, (*STEM[:8], 22, 8), (*STEM[:4], 33, 9, 1), (14, *STEM))


@cache
def tiny() -> TinyPair:
    return TinyPair("gqa")


@cache
def due(prompt: tuple[int, ...], spec: SpecConfig) -> list[int]:
    return list(tiny().expected([*prompt], spec).token_ids)


class Life(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []

    @initialize(spec=st.sampled_from(SPECS))
    def start(self, spec: SpecConfig) -> None:
        self.spec = spec
        self.engine = tiny().engine(spec, prefix_cache=True, num_pages=1 + PAGES)

    @rule(prompt=st.sampled_from(PROMPTS), count=st.integers(1, 12))
    def submit(self, prompt: tuple[int, ...], count: int) -> None:
        self.requests.append(self.engine.submit(prompt, count))

    @rule(times=st.integers(1, 4))
    @torch.inference_mode()
    def step(self, times: int) -> None:
        for _ in range(times):
            self.engine.step()
            self.every_page_has_one_owner()

    @precondition(lambda self: self.requests)
    @rule(place=st.integers(0, 40))
    @torch.inference_mode()
    def abort(self, place: int) -> None:
        request = self.requests.pop(place % len(self.requests))
        self.engine.abort(request)
        assert request not in (*self.engine.running, *self.engine.waiting)

    @precondition(lambda self: self.engine.running)
    @rule(place=st.integers(0, 2))
    @torch.inference_mode()
    def retract(self, place: int) -> None:
        self.engine.retract(self.engine.running[place % len(self.engine.running)])

    @precondition(lambda self: self.engine.idle)
    @rule()
    def flush(self) -> None:
        cached = self.engine.usage.cached_pages
        assert self.engine.flush() == cached
        assert self.engine.usage.free_pages == PAGES

    @invariant()
    def every_page_has_one_owner(self) -> None:
        usage = self.engine.usage
        assert usage.total_pages == PAGES
        assert usage.free_pages + usage.cached_pages + usage.held_pages == PAGES
        assert usage.held_rows == len(self.engine.running)
        own = [p for r in self.engine.running for p in r.held.pages[r.held.shared :]]
        assert len(own) == len(set(own)) == usage.held_pages
        shared = {p for r in self.engine.running for p in r.held.pages[: r.held.shared]}
        assert shared.isdisjoint(own)
        assert len(shared) <= usage.cached_pages

    @invariant()
    def every_text_is_the_oracles(self) -> None:
        for request in self.requests:
            ids = request.generation.token_ids
            assert ids == due(tuple(request.prompt), self.spec)[: len(ids)]

    @torch.inference_mode()
    def teardown(self) -> None:
        while not self.engine.idle:
            self.engine.step()
        assert all(request.finished for request in self.requests)
        self.every_text_is_the_oracles()
        self.flush()


LIVES = settings(
    max_examples=15,
    stateful_step_count=25,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_pages_have_one_owner_in_any_life(seeds: Iterator[int], past: list[PastExample]) -> None:
    for known in past:
        exec(known.example, dict(globals()))
    for number in seeds:
        run_state_machine_as_test(seed(number)(Life), settings=LIVES)
