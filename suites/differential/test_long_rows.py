"""Rows of production length: what they are, and that their judge answers the same on a GPU."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from fixtures.plan import long_trials, trials
from fixtures.tables import CASES, LONG, find
from fixtures.tables.long_rows import MODES, MOST_TOKENS
from harness.core.case import Case, Execution, Family
from harness.differential.expected import expect
from harness.differential.inputs import make_trial_inputs
from harness.differential.pool_state import make_pool_state
from harness.subjects import GRAPH_MODES

SM90, SM100 = (9, 0), (10, 0)


def test_they_are_as_long_and_as_wide_as_production() -> None:
    assert not LONG.keys() & CASES.keys()
    assert all(find(name) is case for name, case in LONG.items())
    for mode in MODES:
        rows = [case for case in LONG.values() if case.mode is mode]
        assert {case.family for case in rows} == set(Family)
        longest = {max(case.prefix_lens) for case in rows}
        assert longest >= {4096, 32768, 81920}
        assert max(longest) > 130_000
        assert max(case.bs for case in rows) == 64
        assert max(sum(case.total_lens) for case in rows) in range(MOST_TOKENS // 2, MOST_TOKENS)


@pytest.mark.parametrize("case", [c for c in LONG.values() if c.bs > 1], ids=lambda case: case.id)
def test_their_lengths_are_ragged_around_the_edges_of_pages(case: Case) -> None:
    assert len(set(case.prefix_lens)) > case.bs // 2
    assert {(n + 1) % case.page_size for n in case.prefix_lens} >= {0, 1, 2}
    assert max(case.total_lens) <= case.max_context_len


def test_a_gpu_runs_them_on_its_own_kernels_and_a_cpu_does_not() -> None:
    assert not {case.id for case, _, _ in trials()} & LONG.keys()
    for gpu, kernels in ((SM90, {"xqa", "flash_mla"}), (SM100, {"trtllm_gen"})):
        planned = [*long_trials(gpu)]
        assert {s.kernel for _, s, _ in planned} == kernels
        assert Counter(c.id for c, _, e in planned if e is Execution.EAGER) == Counter([*LONG])
        graphs = {c.id for c, _, e in planned if e is Execution.GRAPH}
        assert graphs == {c.id for c in LONG.values() if c.mode in GRAPH_MODES}
        assert planned == [*trials(gpu=gpu)][-len(planned) :]


@pytest.mark.parametrize(
    "name", ["mha-target_verify-fp8_cache_window", "mla-draft_extend_v2-fp8_cache"]
)
def test_the_oracle_and_the_pools_are_the_same_on_a_gpu(name: str, cuda: torch.device) -> None:
    inputs = make_trial_inputs(find(name))
    here, there = expect(inputs), expect(inputs, device=cuda)
    for kind in ("oracle", "unrounded"):
        for quantity in ("hidden_states", "logits"):
            ours, theirs = (getattr(getattr(side, kind), quantity) for side in (here, there))
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-12 * float(ours.norm()))
    assert torch.equal(here.keys, there.keys)
    assert torch.equal(here.values, there.values)
    pools = [make_pool_state(inputs, device).buffers() for device in ("cpu", cuda)]
    for own, other in zip(*(side.values() for side in pools), strict=True):
        assert torch.equal(own.view(torch.uint8), other.cpu().view(torch.uint8))
