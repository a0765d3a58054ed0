"""A recorded round's metadata follows every batch, and takes a GPU two launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fixtures.latency.latency_arms import OwnIteration
from fixtures.latency.latency_scene import set_scene
from fixtures.tables.latency import NUM_DRAFT_TOKENS, PAGE_SIZE, Point
from harness.graphs.effects import observe
from harness.graphs.factory import new_graph

POINT = Point(context=40_000, bs=5, max_context_len=48_000)
REPLAYS = {"cpu": 20, "cuda": 500}


@pytest.mark.parametrize("mla", [False, True], ids=["mha", "mla"])
def test_a_round_follows_every_batch(mla: bool, device: torch.device) -> None:
    scene = set_scene(POINT, device)
    ours, graph, draw = OwnIteration(scene, mla), new_graph(device)(), torch.Generator()
    graph.warm_up(ours.record)
    graph.capture(ours.record)
    pages = scene.table.req_to_token[:, ::PAGE_SIZE] // PAGE_SIZE
    for replay in range(REPLAYS[device.type]):
        longest = (POINT.context, 3 * PAGE_SIZE)[replay % 2]
        lens = torch.randint(longest, (POINT.bs,), generator=draw).to(device)
        scene.seq_lens.copy_(lens)
        scene.rows.copy_(torch.randint(POINT.bs + 1, (POINT.bs,), generator=draw))
        ours.batches[2].seq_lens.copy_(scene.advanced)
        graph.replay()
        for part, offset in zip(
            ours.parts(), (1, 2, NUM_DRAFT_TOKENS, NUM_DRAFT_TOKENS), strict=True
        ):
            assert part.lengths.tolist() == (lens + offset).tolist()
            own = pages[scene.rows, : part.table.shape[1]]
            first = torch.arange(own.shape[1], device=device) * PAGE_SIZE
            held = own.where(first < (lens + NUM_DRAFT_TOKENS)[:, None], 0)
            assert torch.equal(part.table[:, : own.shape[1]], held)
            assert not part.table[:, own.shape[1] :].any()


@pytest.mark.parametrize("mla", [False, True], ids=["mha", "mla"])
def test_a_round_is_two_launches(mla: bool, cuda: torch.device) -> None:
    ours, graph = OwnIteration(set_scene(POINT, cuda), mla), new_graph(cuda)()
    graph.warm_up(ours.record)
    graph.capture(ours.record)
    graph.replay()
    recorded: Any = graph
    assert recorded.node_counts() == {"kernel": 2}
    with observe(cuda) as effects:
        ours.plan()
        graph.replay()
    assert effects.activity.kernels == {"fill_metadata": 2}
    assert not effects.activity.launched
