"""Three phases and the older pair of hooks: which one a release is asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from harness.sglang import graph_planning
from harness.sglang.releases import RELEASES

PAIR = "init_forward_metadata_{}_cuda_graph"


def batch() -> Any:
    """Two requests of four queries each."""
    lens = torch.tensor([1, 1])
    return SimpleNamespace(
        batch_size=2,
        positions=torch.arange(8),
        req_pool_indices=torch.arange(2),
        seq_lens=lens,
        seq_lens_sum=2,
        seq_lens_cpu=lens,
        forward_mode="mode",
        spec_info="spec",
    )


@pytest.mark.parametrize("in_capture", [True, False])
def test_releases_with_phases_are_asked_for_them(
    monkeypatch: pytest.MonkeyPatch, in_capture: bool
) -> None:
    monkeypatch.setattr(graph_planning, "active", lambda: RELEASES["0.5.13"])
    theirs, given = Mock(), batch()
    graph_planning.plan_out_of_graph(theirs, given, in_capture)
    graph_planning.plan_in_graph(theirs, given)
    theirs.init_forward_metadata_out_graph.assert_called_once_with(given, in_capture=in_capture)
    theirs.init_forward_metadata_in_graph.assert_called_once_with(given)


@pytest.mark.parametrize(("in_capture", "hook"), [(True, "capture"), (False, "replay")])
def test_the_oldest_release_is_asked_for_the_pair(
    monkeypatch: pytest.MonkeyPatch, in_capture: bool, hook: str
) -> None:
    monkeypatch.setattr(graph_planning, "active", lambda: RELEASES["0.5.12"])
    plan = SimpleNamespace(
        cache_seqlens_int32=torch.zeros(2, dtype=torch.int32),
        cu_seqlens_k=torch.zeros(3, dtype=torch.int32),
    )
    theirs = Mock(spec=[PAIR.format("capture"), PAIR.format("replay")], forward_metadata=plan)
    graph_planning.plan_out_of_graph(theirs, batch(), in_capture)
    graph_planning.plan_in_graph(theirs, batch())
    assert [call[0] for call in theirs.method_calls] == [PAIR.format(hook)]
    # Only what a warm-up runs on is filled; a replay's lengths are the release's own.
    assert plan.cache_seqlens_int32.tolist() == ([4, 4] if in_capture else [0, 0])
    assert plan.cu_seqlens_k.tolist() == ([0, 4, 8] if in_capture else [0, 0, 0])
