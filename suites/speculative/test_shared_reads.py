"""The scheduler waits until forwards have read what it writes: as long as their backends say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fixtures.toys.tiny_engine import BACKENDS, PROMPTS, TinyPair
from fixtures.toys.toy_attention import swa_pool
from fixtures.toys.toy_engine import PROMPTS as TOY_PROMPTS
from fixtures.toys.toy_engine import spec_config, toy_engine
from harness.attention.paged_backend import PagedBackend
from harness.engine.hazards import Hazard, Operation, Queue
from harness.engine.kv_lease import SlotTable
from harness.engine.kv_manager import KVCacheManager
from harness.engine.plan_stream import RecordedStreams
from harness.engine.request import Request
from harness.engine.shared_reads import observed
from harness.graphs.draft_extend_runner import DraftExtendRunner
from harness.subjects import SUBJECTS
from harness.upstream.allocator import PagedAllocator, ReqToTokenPool
from harness.upstream.base_attn_backend import AttentionBackend, SharedReadEnds
from harness.upstream.forward_batch_info import ForwardBatch, LogitsProcessorOutput

TABLE = "req_to_token"
each_family = pytest.mark.parametrize("family", sorted(BACKENDS))


def recorded(
    family: str, *, graphs: bool = True, streams: type[RecordedStreams] = RecordedStreams
) -> RecordedStreams:
    """The queues of an overlapping engine that has generated."""
    recorded = streams()
    engine = TinyPair(family).engine(spec_config(3, 4), graphs=graphs, streams=recorded)
    engine.generate(PROMPTS[:2], 6)
    return recorded


def backend_of(family: str) -> type[PagedBackend]:
    kind: type[PagedBackend] = SUBJECTS[BACKENDS[family]].backend
    return kind


def waited_for(streams: RecordedStreams) -> set[str]:
    """The last main operations that writes of the scheduler, once it runs, waited for."""
    main = [operation for operation in streams.issued if operation.queue is Queue.MAIN]
    writes = [operation for operation in streams.issued if operation.queue is Queue.SCHEDULE]
    return {main[operation.after[Queue.MAIN] - 1].name for operation in writes}


def operations(streams: RecordedStreams, name: str) -> list[Operation]:
    return [operation for operation in streams.issued if operation.name == name]


@each_family
def test_an_extend_that_shares_its_rounds_table_is_not_waited_for(family: str) -> None:
    streams = recorded(family)
    assert streams.hazards() == []
    assert all(TABLE not in operation.reads for operation in operations(streams, "draft extend"))
    assert waited_for(streams) == {"plan prefill", "plan draft extend", "prefill"}


@each_family
def test_an_eager_extend_of_a_backend_that_shares_is_waited_for(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a backend says is said of its graphs; three requests exceed the largest."""
    streams, replayed = RecordedStreams(), []
    run = DraftExtendRunner.run

    def counted(self: DraftExtendRunner, batch: ForwardBatch) -> LogitsProcessorOutput:
        replayed.append(batch.batch_size)
        return run(self, batch)

    monkeypatch.setattr(DraftExtendRunner, "run", counted)
    engine = TinyPair(family).engine(spec_config(3, 4), graphs=True, streams=streams)
    engine.generate(PROMPTS[:3], 6)
    assert streams.hazards() == []
    assert replayed, "a draft extend that fits into a captured batch size replays its graph"
    assert "draft extend" in waited_for(streams), "an eager draft extend is waited for"
    said = "of a replayed draft extend that shares its round's table only the plan is waited for"
    assert "plan draft extend" in waited_for(streams), said


@each_family
@pytest.mark.parametrize("graphs", [True, False], ids=["graph", "eager"])
def test_any_other_extend_is_waited_for(
    family: str, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_of(family), "shares_rounds", False)
    streams = recorded(family, graphs=graphs)
    races = {str(hazard) for hazard in streams.hazards()}
    said = "the scheduler waits for a draft extend that reads req_to_token before it writes there"
    assert not races, f"{said}: {races}"
    # An eager forward, whatever its backend, reads what it has planned; nobody tells the scheduler.
    reads = any(TABLE in operation.reads for operation in operations(streams, "draft extend"))
    said = "a draft extend reads req_to_token while it runs exactly where its graph is replayed"
    assert reads is graphs, said
    waited = waited_for(streams)
    said = "only the plan is waited for of a prefill whose reads of req_to_token end before it runs"
    assert "plan prefill" in waited, said
    said = "a prefill is waited for unless its backend tells that its reads end before it runs"
    assert "prefill" in waited, f"{said}: waited for are {sorted(waited)}"
    said = "a draft extend is waited for unless its graph shares its round's table"
    assert waited == {"plan prefill", "draft extend", "prefill"}, f"{said}: {waited}"


@each_family
def test_reads_that_end_later_than_told_are_a_race(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As SGLang's draft extend told from 0.5.16 to 0.5.20, whose graph reads the table."""
    monkeypatch.setattr(backend_of(family), "shares_rounds", False)
    monkeypatch.setattr(PagedBackend, "shared_read_ends", lambda *_: SharedReadEnds.PRE_REPLAY)
    streams = recorded(family)
    replayed = any(TABLE in operation.reads for operation in operations(streams, "draft extend"))
    said = "a draft extend that fits a captured batch size replays its graph, which reads the table"
    assert replayed, said
    said = "the scheduler does not wait for a draft extend whose reads end before its replay"
    assert "draft extend" not in waited_for(streams), said
    found = set(streams.hazards())
    said = "a draft extend whose graph reads req_to_token later than told is a race with reserve"
    assert found == {Hazard("WAR", "draft extend", "reserve", TABLE)}, f"{said}: {found}"


@each_family
def test_a_prefill_that_reads_while_it_runs_is_a_race(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = backend_of(family)
    original: Callable[..., torch.Tensor] = kind.forward_extend

    def late(self: PagedBackend, *given: Any, **options: Any) -> torch.Tensor:
        self.req_to_token_pool.req_to_token.clone()
        return original(self, *given, **options)

    monkeypatch.setattr(kind, "forward_extend", late)
    found = recorded(family, graphs=False).hazards()
    assert found, "the scheduler does not wait for a prefill that tells of no reads while it runs"
    assert set(found) == {Hazard("WAR", "prefill", "reserve", TABLE)}


def test_a_backend_is_told_of_a_prefills_query_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 7, 1 and 12 tokens: chunks of five have 5 + 1 + 5, 2 + 5 and 2."""
    toy, told = toy_engine(chunk_size=5), list[int]()
    resolve = AttentionBackend.resolve_prefill_shared_read_ends

    def noted(self: AttentionBackend, batch: ForwardBatch, *, num_qo_tokens: int) -> SharedReadEnds:
        told.append(num_qo_tokens)
        return resolve(self, batch, num_qo_tokens=num_qo_tokens)

    monkeypatch.setattr(AttentionBackend, "resolve_prefill_shared_read_ends", noted)
    toy.engine.generate(TOY_PROMPTS[:3], 2)
    assert told == [11, 7, 2], f"num_qo_tokens are a chunk's query tokens of all requests: {told}"


class SchedulerRuns(RecordedStreams):
    """A scheduler that waits for nobody."""

    def wait_for_shared_reads(self) -> None:
        """Forgotten."""


class NobodyWaitsForIt(RecordedStreams):
    """Forwards that do not wait for the scheduler."""

    def wait(self, queue: Queue, other: Queue) -> None:
        """Forgotten where it is the scheduler that is to be waited for."""
        if other is not Queue.SCHEDULE:
            super().wait(queue, other)


def test_a_scheduler_that_runs_ahead_is_reported() -> None:
    streams = SchedulerRuns()
    toy_engine(spec_config(4, 3), streams=streams).engine.generate(TOY_PROMPTS[:2], 6)
    readers = (
        "plan prefill",
        "lay out verify",
        "plan verify",
        "draft",
        "verify",
        "plan draft extend",
    )
    assert set(streams.hazards()) == {Hazard("WAR", name, "reserve", TABLE) for name in readers}


def test_forwards_that_run_ahead_of_the_scheduler_are_reported() -> None:
    streams = NobodyWaitsForIt()
    toy_engine(spec_config(4, 3), streams=streams).engine.generate(TOY_PROMPTS[:2], 6)
    raws = {hazard for hazard in streams.hazards() if hazard.kind == "RAW"}
    readers = (
        "plan prefill",
        "lay out verify",
        "plan verify",
        "draft",
        "verify",
        "plan draft extend",
    )
    others = sorted(str(hazard) for hazard in raws if hazard.resource != TABLE)
    assert not others, f"a plan waits until its batch is laid out: {others}"
    assert raws == {Hazard("RAW", "reserve", name, TABLE) for name in readers}


def test_window_slots_are_given_back_behind_the_forward_that_reads_their_mapping() -> None:
    pool, streams = swa_pool(), RecordedStreams()
    pool.full_to_swa_index_mapping.zero_()
    allocators = [PagedAllocator(pool.num_pages, pool.page_size) for _ in range(2)]
    slots = SlotTable(ReqToTokenPool(2, 16), allocators[0], pool, allocators[1])
    manager, request = KVCacheManager(slots, streams, None), Request([1, 2, 3], 4, None)
    manager.admit(request, 4)
    said = "full_to_swa_index_mapping maps the slots of an admitted request"
    assert pool.full_to_swa_index_mapping.any(), said
    streams.main("prefill", lambda: pool.full_to_swa_index_mapping.sum())
    manager.release(request)
    names = [operation.name for operation in streams.issued]
    said = "a release unmaps window slots as an operation of the scheduler, which waits for readers"
    assert names == ["reserve", "prefill", "release"], f"{said}: issued are {names}"
    reserve, prefill, release = streams.issued
    mapping = "full_to_swa_index_mapping"
    writes = reserve.writes, release.writes
    said = "reserve writes req_to_token and the mapping of window slots, release the mapping"
    assert writes == ({TABLE, mapping}, {mapping}), f"{said}: {writes}"
    assert prefill.reads == {mapping}, f"a forward's reads of {mapping} are seen: {prefill.reads}"
    after = release.after[Queue.MAIN]
    assert after == 1, f"release waits for the one forward that reads {mapping}, not for {after}"
    assert not pool.full_to_swa_index_mapping.any(), f"a release clears {mapping}"


def test_an_operation_reads_what_it_is_given_and_a_view_is_no_read() -> None:
    table, other = torch.arange(12).view(3, 4), torch.zeros(4, dtype=torch.int64)
    shared = {"table": table, "other": other}
    cases: dict[str, tuple[Callable[[], object], set[str]]] = {
        "a row that is copied is read": (lambda: table[1].clone(), {"table"}),
        "rows taken by index are read": (lambda: table[torch.tensor([0, 2])], {"table"}),
        "a view is no read": (lambda: table[1:, 2:].T, set()),
        "an operation that writes in place accesses what it writes, beside what it reads": (
            lambda: other.copy_(table[2]),
            {"table", "other"},
        ),
        "what is given neither reads neither": (lambda: torch.ones(3) + 1, set()),
    }
    for said, (work, names) in cases.items():
        result, read = observed(shared, work)
        assert isinstance(result, torch.Tensor)
        assert read == names, said


def test_a_table_given_by_name_is_read_too() -> None:
    library = torch.library.Library("toys", "DEF")
    library.define("gather(*, Tensor table, Tensor rows) -> Tensor")
    library.impl("gather", lambda *, table, rows: table[rows], "CPU")
    table, rows = torch.arange(6).view(3, 2), torch.tensor([1])
    gather = torch.ops.toys.gather
    found, reads = observed({TABLE: table}, lambda: gather(table=table, rows=rows))
    assert found.tolist() == [[2, 3]]
    assert reads == {TABLE}
