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
        seq_lens_cpu=lens.clone(),
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
    given = batch()
    graph_planning.plan_out_of_graph(theirs, given, in_capture)
    graph_planning.plan_in_graph(theirs, given)
    [(asked, handed, _)] = theirs.method_calls
    assert asked == PAIR.format(hook), f"a {hook} is planned by the pair's {hook}, not by {asked}"
    rows, lens = given.req_pool_indices, given.seq_lens
    wanted = {
        "capture": (2, 8, rows, lens, None, "mode", "spec"),
        "replay": (2, rows, lens, 2, None, "mode", "spec", given.seq_lens_cpu),
    }[hook]
    assert len(handed) == len(wanted), f"the pair's {hook} takes {len(wanted)}, not {len(handed)}"
    told = "a replay of the pair is handed seq_lens_cpu last, which lies on the host"
    assert in_capture or handed[-1] is given.seq_lens_cpu, told
    for obtained, expected in zip(handed, wanted, strict=True):
        told = "the pair takes positions, not names: 8 query tokens, lengths on the host last"
        assert obtained is expected or obtained == expected, told
    # Only what a warm-up runs on is filled; a replay's lengths are the release's own.
    assert plan.cache_seqlens_int32.tolist() == ([4, 4] if in_capture else [0, 0])
    assert plan.cu_seqlens_k.tolist() == ([0, 4, 8] if in_capture else [0, 0, 0])


@pytest.mark.parametrize(("in_capture", "hook"), [(True, "capture"), (False, "replay")])
def test_a_draft_of_the_oldest_release_is_asked_for_the_pair(
    monkeypatch: pytest.MonkeyPatch, in_capture: bool, hook: str
) -> None:
    monkeypatch.setattr(graph_planning, "active", lambda: RELEASES["0.5.12"])
    steps = []
    for lens in ([0, 9], [3, 0]):
        plan = SimpleNamespace(
            cache_seqlens_int32=torch.tensor(lens, dtype=torch.int32),
            cu_seqlens_k=torch.zeros(3, dtype=torch.int32),
        )
        steps.append(SimpleNamespace(forward_metadata=plan))
    hooks = [PAIR.format("capture"), PAIR.format("replay")]
    theirs, given = Mock(spec=hooks, attn_backends=steps), batch()
    graph_planning.plan_out_of_graph(theirs, given, in_capture)
    [(asked, handed, _)] = theirs.method_calls
    told = f"a draft's {hook} is planned by the pair's {hook}, not by {asked}"
    assert asked == PAIR.format(hook), told
    told = (
        f"a draft's {hook} is handed the batch{'' if in_capture else ' and batch_size'}: {handed}"
    )
    assert handed == ((given,) if in_capture else (given, 2)), told
    filled = [step.forward_metadata.cache_seqlens_int32.tolist() for step in steps]
    # A step has one query of each request, which a warm-up gives one key at least.
    told = f"a capture fills lengths of 0 with 1, a replay leaves the release's own, not {filled}"
    assert filled == ([[1, 9], [3, 1]] if in_capture else [[0, 9], [3, 0]]), told
