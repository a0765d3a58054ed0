"""The choice of graph or eager forward, and whose lengths the host must know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fixtures.toys.toy_attention import make_batch, mha_pool, request_table
from harness.engine.phases import EaglePhases, GraphPhase, TargetOnlyPhases
from harness.upstream.base_attn_backend import decide_needs_cpu_seq_lens
from harness.upstream.forward_batch_info import ForwardBatch, ForwardMode


@dataclass
class Noting:
    """A phase, or a runner of up to two requests, that records its calls."""

    name: str
    backend: Any = None
    asked: list[str] = field(default_factory=list)

    def can_run(self, batch: ForwardBatch) -> bool:
        return batch.batch_size <= 2

    def bucket(self, bs: int) -> int:
        return 2

    def graph_bs(self, batch: ForwardBatch) -> int | None:
        return None

    def prepare(self, batch: ForwardBatch) -> None:
        self.asked.append(f"prepare {batch.batch_size}")

    def run(self, batch: ForwardBatch) -> str:
        self.asked.append(f"run {batch.batch_size}")
        return self.name


def batch_of(bs: int) -> ForwardBatch:
    lens, rows = [*range(1, bs + 1)], tuple(range(bs))
    table, locations = request_table(), torch.arange(bs)
    return make_batch(ForwardMode.DECODE, table, mha_pool(), lens, locations, rows)


def test_a_graph_serves_what_it_holds_and_the_eager_phase_the_rest() -> None:
    eager, runner = Noting("eager", backend="the eager phase's"), Noting("graph")
    phase = GraphPhase(eager, runner)
    served = []
    for bs in (1, 3, 2):
        phase.prepare(batch_of(bs))
        served.append((bs, phase.run(batch_of(bs)), phase.graph_bs(batch_of(bs))))
    said = "batches of 1 and 2 replay the graph of 2, one of 3 runs eagerly and has graph_bs None"
    due = [(1, "graph", 2), (3, "eager", None), (2, "graph", 2)]
    assert served == due, f"{said}: (bs, served by, graph_bs) are {served}"
    asked = runner.asked
    said = "the runner prepares and runs the batches that fit"
    assert asked == ["prepare 1", "run 1", "prepare 2", "run 2"], f"{said}: {asked}"
    asked = eager.asked
    assert asked == ["prepare 3", "run 3"], f"the eager phase prepares and runs the rest: {asked}"
    assert phase.backend == "the eager phase's", "a phase's backend is the eager phase's"


READERS = [(kind, each.name) for kind in (EaglePhases, TargetOnlyPhases) for each in fields(kind)]


@pytest.mark.parametrize(
    ("kind", "reader"), READERS, ids=lambda part: getattr(part, "__name__", part)
)
def test_one_reader_of_host_lengths_is_enough(kind: Callable[..., Any], reader: str) -> None:
    names = [name for each, name in READERS if each is kind]
    readers = {name: SimpleNamespace(needs_cpu_seq_lens=name == reader) for name in names}
    phases = kind(**{name: Noting(name, backend) for name, backend in readers.items()})
    said = f"seq_lens_cpu is kept where the backend of {reader} alone has needs_cpu_seq_lens"
    assert decide_needs_cpu_seq_lens(phases.backends()), said
    readers[reader].needs_cpu_seq_lens = False
    said = "no seq_lens_cpu is kept where no backend has needs_cpu_seq_lens"
    assert not decide_needs_cpu_seq_lens(phases.backends()), said
