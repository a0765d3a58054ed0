"""Scheduled in any order, each request emits its own text and the pools end as they began."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fixtures.toys.toy import expected_generation
from fixtures.toys.toy_engine import PROMPTS, ToyEngine, spec_config, toy_engine
from harness.engine.request import Generation, Request

NEW = 13
VARIANTS: dict[str, Callable[..., ToyEngine]] = {
    "target_only": toy_engine,
    "draft_extend_v1": lambda **kw: toy_engine(spec_config(3, 4, 1), **kw),
    "draft_extend_v2": lambda **kw: toy_engine(spec_config(3, 4, 2), **kw),
}
EVERY = pytest.mark.parametrize("make", VARIANTS.values(), ids=VARIANTS)


def text(prompt: list[int], count: int = NEW) -> list[int]:
    return expected_generation(prompt, count, 1, 2).tokens


def assert_conserved(generation: Generation) -> None:
    """Prefills and rounds account for every token, and the last round for what was cut."""
    emitted = generation.prefills + sum(generation.accept_lengths)
    said = "prefills + sum(accept_lengths) - cut is the number of generated tokens"
    assert emitted - generation.cut == generation.completion_tokens, said
    assert generation.spec_verify_ct == len(generation.accept_lengths)


def drain(toy: ToyEngine, requests: list[Request]) -> None:
    while toy.engine.running or toy.engine.waiting:
        toy.engine.step()
    assert all(request.finished for request in requests)


@EVERY
@pytest.mark.parametrize("max_bs", [1, 2, 3, 5])
def test_slots_are_reused_by_those_who_wait(make: Callable[..., ToyEngine], max_bs: int) -> None:
    toy = make(max_bs=max_bs)
    free = toy.free
    generations = toy.engine.generate(PROMPTS, NEW)
    assert [g.token_ids for g in generations] == [text(prompt) for prompt in PROMPTS]
    assert toy.free == free
    for generation in generations:
        assert_conserved(generation)
        assert generation.prefills == 1


@EVERY
@pytest.mark.parametrize("max_bs", [1, 2, 4])
def test_as_many_run_as_may(make: Callable[..., ToyEngine], max_bs: int) -> None:
    engine = make(max_bs=max_bs).engine
    requests = [engine.submit(prompt, NEW) for prompt in PROMPTS]
    engine.step()
    count, due = len(engine.running), min(max_bs, len(requests))
    said = f"{due} of {len(requests)} requests run at once where max_bs = {max_bs}"
    assert count == due, f"{said}, not {count}"
    assert engine.running == requests[:max_bs], f"{said}, and these are the first that came"
    while not engine.idle:
        engine.step()
        count = len(engine.running)
        assert count <= max_bs, f"no more than max_bs = {max_bs} requests run at once, not {count}"


def test_accept_lengths_do_not_depend_on_the_batch() -> None:
    lengths = [
        [
            g.accept_lengths
            for g in toy_engine(spec_config(3, 4), max_bs=n).engine.generate(PROMPTS, NEW)
        ]
        for n in (1, 2, 5)
    ]
    assert lengths[0] == lengths[1] == lengths[2]


@EVERY
def test_an_engine_serves_one_batch_after_another(make: Callable[..., ToyEngine]) -> None:
    toy = make(max_bs=3)
    for prompts in (PROMPTS, PROMPTS[::-1], PROMPTS[1:3]):
        obtained = toy.engine.generate(prompts, NEW)
        assert [g.token_ids for g in obtained] == [text(prompt) for prompt in prompts]


@EVERY
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("rounds", [1, 3])
def test_a_retracted_request_gives_all_back_and_goes_on(
    make: Callable[..., ToyEngine], rounds: int, victim: int
) -> None:
    toy = make()
    free = toy.free
    requests = [toy.engine.submit(prompt, NEW) for prompt in PROMPTS[:3]]
    for _ in range(rounds):
        toy.engine.step()
    held = [len(r.lease.pages) if r.lease else 0 for r in requests]
    toy.engine.retract(requests[victim])
    due = free[0] - 2, free[1] - sum(held) + held[victim]
    said = "a retracted request gives back its row and its pages"
    assert toy.free == due, f"{said}: {due} rows and pages are free, not {toy.free}"
    drain(toy, requests)
    said = "rows and pages are as free as before when all requests have ended"
    assert toy.free == free, f"{said}: {free}, not {toy.free}"
    for place, request in enumerate(requests):
        found, due = request.generation.token_ids, text(PROMPTS[place])
        said = "a retracted request goes on behind the tokens that it has generated, others as ever"
        assert found == due, f"{said}: {due}, not {found}"
        count = request.generation.prefills
        said = "a request is prefilled once, and once again after it was retracted"
        assert count == 1 + (place == victim), f"{said}, not {count} times"
        assert_conserved(request.generation)


def test_a_retracted_request_goes_before_those_who_never_ran() -> None:
    toy = toy_engine(spec_config(3, 4), max_bs=2)
    requests = [toy.engine.submit(prompt, NEW) for prompt in PROMPTS]
    toy.engine.step()
    toy.engine.retract(requests[0])
    assert list(toy.engine.waiting) == [requests[i] for i in (0, 2, 3, 4)]
    toy.engine.step()
    assert toy.engine.running == [requests[1], requests[0]]


@EVERY
def test_the_youngest_is_retracted_when_pages_run_out(make: Callable[..., ToyEngine]) -> None:
    toy = make(num_pages=14, max_context_len=40)
    free = toy.free
    generations = toy.engine.generate(PROMPTS, NEW)
    assert [g.token_ids for g in generations] == [text(prompt) for prompt in PROMPTS]
    assert toy.free == free
    assert generations[0].prefills == 1
    assert any(g.prefills > 1 for g in generations[1:])
    for generation in generations:
        assert_conserved(generation)


def test_nobody_is_admitted_without_room_for_a_first_round() -> None:
    """7 + 4 tokens take three pages of four; two such prompts alone would fit five pages."""
    toy = toy_engine(spec_config(3, 4), num_pages=6, max_bs=2)
    for _ in range(2):
        toy.engine.submit(PROMPTS[0], 3)
    toy.engine.step()
    prefilled = [batch.batch_size for batch in toy.trace.of("target_extend")]
    assert prefilled == [0, 1]


def test_a_large_request_is_not_overtaken_by_a_small_one() -> None:
    """Of five pages the first takes three, the second would take four and the third two."""
    toy = toy_engine(spec_config(3, 4), num_pages=6, max_bs=3)
    counts = {0: 3, 2: 1, 1: 3}
    first, *others = (toy.engine.submit(PROMPTS[i], count) for i, count in counts.items())
    toy.engine._admit()
    assert toy.engine.running == [first]
    assert list(toy.engine.waiting) == others


@EVERY
@pytest.mark.parametrize("raised", [RuntimeError, KeyboardInterrupt])
def test_a_prefill_that_fails_leaves_nothing_allocated(
    make: Callable[..., ToyEngine],
    raised: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toy = make()
    free = toy.free
    requests = [toy.engine.submit(prompt, NEW) for prompt in PROMPTS[:2]]

    def fails(*_: object) -> None:
        raise raised("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(toy.worker, "prefill", fails)
        with pytest.raises(raised, match="out of memory"):
            toy.engine.step()
        said = "a prefill that ends early, whatever it raises, gives back its rows and pages"
        assert toy.free == free, f"{said}: {free} are free, not {toy.free}"
        assert list(toy.engine.waiting) == requests
        with pytest.raises(raised, match="out of memory"):
            toy.engine.generate(PROMPTS[2:3], NEW)
        assert toy.free == free
    drain(toy, requests)
    assert [r.generation.token_ids for r in requests] == [text(r.prompt) for r in requests]


@pytest.mark.parametrize(("steps", "drafts", "tokens"), [(5, 2, 5), (3, 4, 4)])
def test_a_round_has_room_for_its_draft_and_for_its_verify(
    steps: int, drafts: int, tokens: int
) -> None:
    room = toy_engine(spec_config(steps, drafts)).worker.headroom
    said = (
        f"a round reserves max(num_steps = {steps}, num_draft_tokens = {drafts}) = {tokens} tokens"
    )
    assert room == tokens, f"{said}, not {room}"


@EVERY
def test_an_aborted_request_leaves_the_others_alone(make: Callable[..., ToyEngine]) -> None:
    toy = make(max_bs=2)
    free = toy.free
    requests = [toy.engine.submit(prompt, NEW) for prompt in PROMPTS]
    toy.engine.step()
    for request in (requests[0], requests[3]):
        toy.engine.abort(request)
        toy.engine.abort(request)
    drain(toy, [requests[i] for i in (1, 2, 4)])
    said = "aborted requests give back their rows and pages"
    assert toy.free == free, f"{said}: {free} are free, not {toy.free}"
    found = [requests[i].generation.token_ids for i in (1, 2, 4)]
    said = "requests that are not aborted generate their own text"
    assert found == [text(PROMPTS[i]) for i in (1, 2, 4)], f"{said}: {found}"
    found = requests[3].generation.token_ids
    assert found == [], f"a request that is aborted while it waits is never generated: {found}"


@EVERY
def test_requests_of_one_prompt_are_told_apart(make: Callable[..., ToyEngine]) -> None:
    toy = make(max_bs=2)
    requests = [toy.engine.submit(PROMPTS[0], NEW) for _ in range(4)]
    toy.engine.step()
    for request in (requests[3], requests[0]):
        toy.engine.abort(request)
    kept = {id(request) for request in (*toy.engine.running, *toy.engine.waiting)}
    left = [place for place, request in enumerate(requests) if id(request) in kept]
    said = "of four requests of one prompt the aborted first and last are gone, and no other"
    assert left == [1, 2], f"{said}: {left} are left"
    rows = toy.engine._state.bs
    assert rows == 1, f"the state has a row of the one request that still runs, not {rows} rows"
    drain(toy, requests[1:3])
    found = [request.generation.token_ids for request in requests[1:3]]
    assert found == [text(PROMPTS[0])] * 2, f"both generate the text of their prompt: {found}"


@pytest.mark.parametrize("count", range(1, 9))
def test_a_generation_ends_at_the_token_asked_for(count: int) -> None:
    toy = toy_engine(spec_config(3, 4))
    toy.trace.clear()
    (generation,) = toy.engine.generate(PROMPTS[:1], count)
    expected = expected_generation(PROMPTS[0], count, 3, 4)
    assert generation.token_ids == expected.tokens
    assert_draft_is_fed(toy, PROMPTS[0], generation)
    assert generation.accept_lengths == expected.accept_lengths
    assert len(generation.token_ids) == count
    assert_conserved(generation)


@EVERY
def test_a_generation_ends_at_its_end_token(make: Callable[..., ToyEngine]) -> None:
    for prompt in PROMPTS[:3]:
        whole = text(prompt)
        for eos in set(whole):
            (generation,) = make().engine.generate([prompt], NEW, eos=eos)
            assert generation.token_ids == whole[: whole.index(eos) + 1]
            assert_conserved(generation)


def assert_draft_is_fed(toy: ToyEngine, prompt: list[int], generation: Generation) -> None:
    """The draft reads what was generated, one token ahead of the target."""
    tokens = generation.token_ids
    (prefill,) = toy.trace.of("draft_prefill")
    *shifted, last = prefill.input_ids.tolist()
    assert shifted == prompt[1:], "the draft is prefilled with the prompt, shifted by one token"
    assert last == tokens[0], "the draft's prefill ends with the first token of the target"
    extends = [batch for batch in toy.trace.of("draft_extend") if batch.batch_size]
    begin = 1
    for extend, length in zip(extends, generation.accept_lengths, strict=True):
        emitted = tokens[begin : begin + length]
        fed = extend.input_ids.tolist()[: len(emitted)]
        assert fed == emitted, "draft extend is fed the tokens that the verify has emitted"
        begin += length


def test_tokens_and_rounds_are_counted() -> None:
    generation = Generation(token_ids=[1] * 6, accept_lengths=[3, 1, 2], prefills=1, cut=1)
    assert (generation.completion_tokens, generation.spec_verify_ct) == (6, 3)
    assert generation.cached_tokens == 0, "where there is no prefix cache nobody sets it"


@EVERY
def test_a_text_may_fill_the_context(make: Callable[..., ToyEngine]) -> None:
    toy = make(max_context_len=20, max_bs=1)
    (generation,) = toy.engine.generate([PROMPTS[0]], 13)
    assert generation.token_ids == text(PROMPTS[0])
