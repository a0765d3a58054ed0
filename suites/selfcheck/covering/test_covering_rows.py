"""Covering rows have every feasible combination, as cases whose ids follow from their values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from fixtures.covering import arrays, generate, rows
from fixtures.covering.arrays import STRENGTHS, covered, load
from fixtures.covering.counted import count
from fixtures.covering.feasible import Feasibility
from fixtures.covering.rows import (
    MARK,
    case_id,
    case_of,
    values_of_trial,
)
from fixtures.plan import covering_trials, trials
from fixtures.tables import CASES
from fixtures.tables.axes import AXES, CPU, MACHINES, RULES, Machine
from harness.core.capability import CAPABILITIES as KERNELS
from harness.core.capability import refusal
from harness.core.case import Case, Execution, Family, KVDtype, Layout, Mode
from harness.errors import UsageError

pytestmark = pytest.mark.untraced
KEPT = [(m, s) for m in MACHINES for s in STRENGTHS]
BY_NAME = pytest.mark.parametrize(
    ("machine", "strength"), KEPT, ids=[f"{machine.name}-{strength}" for machine, strength in KEPT]
)
VALUES: dict[str, Any] = {
    "family": Family.MHA,
    "mode": Mode.DRAFT_EXTEND_V2,
    "kv": KVDtype.FP8,
    "page": 16,
    "dim": 128,
    "group": 8,
    "window": 20,
    "width": 5,
    "batch": 5,
    "length": 256,
    "accept": "ragged",
    "padding": "bucket",
    "scale": "fraction",
}
ID = (
    "mha-draft_extend_v2-with-kv_float8_e4m3fn-page_16-dim_128-group_8-window_20-width_5-batch_5"
    "-length_256-accept_ragged-padding_bucket-scale_fraction"
)


def test_a_case_is_what_its_values_say() -> None:
    # 256 less 0, 5, 10 - 8, 15 - 8 and 20 - 16 pages of 16; 1 more, 1 less or on the edge; turned.
    assert case_of(VALUES) == Case(
        id=ID,
        family=Family.MHA,
        mode=Mode.DRAFT_EXTEND_V2,
        prefix_lens=(145, 191, 257, 175, 224),
        accept_lens=(2, 4, 1, 3, 5),
        num_draft_tokens=5,
        num_steps=4,
        page_size=16,
        layout=Layout.CONTIGUOUS,
        num_q_heads=8,
        num_kv_heads=1,
        head_dim=128,
        kv_dtype=KVDtype.FP8,
        k_scale=0.25,
        v_scale=0.5,
        window_left=20,
        max_context_len=512,
        capture_bs=(8, 13),
    )


def test_an_id_tells_its_values_and_outlives_new_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    grown = {"sliced": ("no", "yes"), **AXES, "page": (*AXES["page"], 256), "tree": ("1", "4")}
    monkeypatch.setattr(rows, "AXES", grown)
    assert case_id(VALUES) == ID
    assert case_id(VALUES | {"tree": "4"}) == f"{ID}-tree_4"


@BY_NAME
def test_rows_are_cases_that_their_kernel_serves(machine: Machine, strength: int) -> None:
    for row in load(machine, strength):
        case = case_of(row)
        assert refusal(case, KERNELS[case.family, row["kernel"]], machine.gpu) is None
        found = values_of_trial(case, str(row["kernel"]), Execution(row["execution"]))
        assert found == row, case.id
        assert case.bs * max(case.prefix_lens) <= machine.most_tokens + case.bs
        assert case.id not in CASES


@pytest.mark.parametrize(("bs", "padding"), [(5, "bucket"), (8, "none"), (13, "none")])
def test_a_batch_of_any_captured_size_is_not_padded(bs: int, padding: str) -> None:
    case = replace(case_of(VALUES), prefix_lens=(40,) * bs, accept_lens=(1,) * bs)
    assert case.capture_bs == (8, 13)
    found = values_of_trial(case, "trtllm_gen", Execution.GRAPH)["padding"]
    assert found == padding, f"{bs} requests in graphs of 8 and 13: {found}"


def test_a_cache_that_nothing_is_scaled_for_has_no_scale() -> None:
    case = replace(case_of(VALUES), kv_dtype=KVDtype.AUTO)
    assert case.k_scale == 0.25
    found = values_of_trial(case, "trtllm_gen", Execution.EAGER)["scale"]
    assert found == "unit", f"a cache of the activations' dtype ran no scale: {found}"


@BY_NAME
def test_rows_have_every_feasible_combination(machine: Machine, strength: int) -> None:
    kept = [row for s in STRENGTHS if s <= strength for row in load(machine, s)]
    counted = count(Feasibility(machine), kept, strength)
    assert counted.missed == ()
    assert counted.run > len(kept)
    sizes = map(len, AXES.values())
    asked = sum(product for product in map(_product, combinations(sizes, strength)))
    assert counted.feasible + sum(counted.infeasible.values()) == asked


def _product(sizes: tuple[int, ...]) -> int:
    first, *rest = sizes
    return first * (_product(tuple(rest)) if rest else 1)


@BY_NAME
def test_kept_rows_are_of_the_axes_and_rules_of_today(machine: Machine, strength: int) -> None:
    assert covered(machine, strength) == Feasibility(machine).digest, (
        "python -m fixtures.covering.generate writes them anew"
    )


def test_a_digest_tells_axes_and_rules_apart() -> None:
    digest = Feasibility(CPU).digest
    assert digest == Feasibility(CPU).digest
    wider = AXES | {"page": (*AXES["page"], 256)}
    assert Feasibility(CPU, axes=wider).digest != digest
    assert Feasibility(CPU, rules=RULES[:-1]).digest != digest
    assert Feasibility(replace(CPU, most_tokens=2**15)).digest != digest
    reworded = tuple(replace(rule, reason="because") for rule in RULES)
    assert Feasibility(CPU, rules=reworded).digest == digest


def test_what_is_generated_is_written_and_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list(load(CPU, 2))[:5]
    monkeypatch.setattr(arrays, "FOLDER", tmp_path)
    monkeypatch.setattr(generate, "FOLDER", tmp_path)
    monkeypatch.setattr(generate, "rows", lambda feasible, strength: made[:strength])
    assert generate.main(["--machine", "cpu"]) == 0
    arrays.load.cache_clear()
    assert [list(load(CPU, strength)) for strength in STRENGTHS] == [made[:2], made[:3]]
    assert {covered(CPU, strength) for strength in STRENGTHS} == {Feasibility(CPU).digest}
    arrays.load.cache_clear()


def test_only_the_arrays_that_are_named_are_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "FOLDER", tmp_path)
    monkeypatch.setattr(generate, "FOLDER", tmp_path)
    monkeypatch.setattr(generate, "rows", lambda *_: [])
    assert generate.main(["--machine", "sm90", "--strength", "3"]) == 0
    written = [path.name for path in tmp_path.iterdir()]
    assert written == ["sm90-3.txt"], f"--machine sm90 --strength 3 names one array: {written}"


def test_lengths_are_ragged_around_the_edges_of_pages() -> None:
    for row in load(CPU, 2):
        case = case_of(row)
        assert len(set(case.prefix_lens)) > 1 or case.bs == 1, case.id
        beside = {(n + 1) % case.page_size for n in case.prefix_lens}
        if case.bs > 2 and case.page_size * 2 <= row["length"]:
            assert {0, 1, 2} <= beside, case.id


def test_each_row_is_planned_once_on_its_kernel() -> None:
    planned = [(c.id, s.name, e) for c, s, e in covering_trials(None, 2)]
    wanted = [(case_of(row).id, row["kernel"], row["execution"]) for row in load(CPU, 2)]
    assert [(name, s.partition("/")[2], e) for name, s, e in planned] == wanted
    assert len(set(planned)) == len(planned)
    everything = [(c.id, s.name, e) for c, s, e in trials()]
    assert everything[-len(planned) :] == planned
    assert not any(MARK in name for name, _, _ in everything[: -len(planned)])


@pytest.mark.parametrize(("asked", "many"), [({}, 63), ({"covering": 0}, 0), ({"covering": 2}, 63)])
def test_a_gpu_runs_pairs_unless_it_is_asked_otherwise(asked: dict[str, int], many: int) -> None:
    rows = [case.id for case, _, _ in trials(gpu=(9, 0), **asked)]
    assert sum(MARK in name for name in rows) == many


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(arrays, "FOLDER", tmp_path)
    load.cache_clear()
    yield tmp_path
    load.cache_clear()


def test_triples_are_planned_beside_pairs_and_not_twice(folder: Path) -> None:
    (folder / "cpu-2.txt").write_text("digest\nkernel family page\nxqa mha 64\nxqa mha 16\n")
    (folder / "cpu-3.txt").write_text("digest\nkernel family page\nxqa mha 16\ntrtllm_gen mha 16\n")
    planned = [(c.id, s.name) for c, s, _ in covering_trials(None, 3)]
    assert planned == [
        ("mha-extend-with", "trtllm_mha/xqa"),
        ("mha-extend-with-page_16", "trtllm_mha/xqa"),
        ("mha-extend-with-page_16", "trtllm_mha/trtllm_gen"),
    ]


def test_rows_that_nobody_kept_are_refused(folder: Path) -> None:
    (folder / "cpu-2.txt").write_text("digest\nkernel family\nxqa mha\n")
    with pytest.raises(UsageError, match="'cpu-3' is not accepted; accepted: cpu-2"):
        list(covering_trials(None, 3))


def test_a_gpu_runs_rows_of_its_own_kernels_and_an_unknown_one_none() -> None:
    hopper = list(covering_trials((9, 0), 2))
    assert {s.kernel for _, s, _ in hopper} == {"xqa", "flash_mla"}
    assert max(max(c.prefix_lens) for c, _, _ in hopper) >= 131072
    assert list(covering_trials((8, 9), 2)) == []
