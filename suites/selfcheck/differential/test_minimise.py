"""A red trial is shrunk to the smallest case that is red for the same cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures import minimise as verb
from fixtures.fakes.sample_records import trial
from fixtures.minimise import find_trial, main, row
from fixtures.plan import DRAW, covering_trials
from fixtures.tables import CASES
from harness.core.case import Case, Dtype, Execution, Family, KVDtype, Layout, Mode
from harness.core.record import Record, Verdict
from harness.differential.minimise import cause, minimise, reductions
from harness.errors import UsageError
from harness.sglang.backend import Classes
from harness.sglang.releases import NEWEST

RAGGED = CASES["mha-target_verify-bs8_ragged"]


MESSAGE = "logits: 3 of 8 rows wrong"


def judged(is_red: Callable[[Case], bool]) -> Callable[[Case], Record]:
    def run(case: Case) -> Record:
        verdict = Verdict.WRONG_NUMBERS if is_red(case) else Verdict.PASSED
        return trial(case.id, verdict, message=MESSAGE)

    return run


def test_a_step_leaves_a_request_and_narrows() -> None:
    single = replace(CASES["mha-target_verify-bs1_longest"], num_draft_tokens=6)
    steps = list(reductions(single))
    assert {case.bs for case in steps} == {1}
    assert [c.num_draft_tokens for c in steps if c.num_draft_tokens != 6] == [1, 2, 5]
    assert sorted({case.bs for case in reductions(RAGGED)}) == [7, 8]


def test_a_length_is_tried_from_the_shortest_to_one_less() -> None:
    case = replace(CASES["mha-target_verify-bs1_longest"], prefix_lens=(100,), page_size=32)
    tried = [c.prefix_lens for c in reductions(case) if c.prefix_lens != case.prefix_lens]
    assert tried == [(0,), (1,), (50,), (68,), (99,)]


def test_a_prefill_of_more_requests_than_any_graph_is_made_smaller() -> None:
    case = Case(
        id="large-prefill",
        family=Family.MHA,
        mode=Mode.EXTEND,
        prefix_lens=(3,) * 9,
        extend_lens=(2,) * 9,
        capture_bs=(1, 8),
    )
    try:
        captured = {step.capture_bs for step in reductions(case)}
    except ValueError as error:
        pytest.fail(f"nine requests where eight are captured end with no {error!r}")
    assert captured == {(1, 8), (9,)}


def test_only_what_the_fault_needs_is_left() -> None:
    def is_red(case: Case) -> bool:
        return case.bs >= 2 and max(case.prefix_lens) > case.page_size

    smallest, record = minimise(RAGGED, judged(is_red))
    assert record.verdict is Verdict.WRONG_NUMBERS
    assert smallest.bs == 2
    assert sorted(smallest.prefix_lens) == [0, smallest.page_size + 1]
    assert (smallest.page_size, smallest.num_draft_tokens) == (16, 1)
    assert (smallest.num_q_heads, smallest.num_kv_heads) == (1, 1)
    assert smallest.layout is Layout.CONTIGUOUS
    assert smallest.capture_bs == (2,)


@pytest.mark.parametrize("mode", [Mode.EXTEND, Mode.DRAFT_EXTEND_V2])
def test_a_fault_that_needs_nothing_leaves_the_plainest_case(mode: Mode) -> None:
    lens = (9, 2) if mode is Mode.EXTEND else (3, 2)
    new = "extend_lens" if mode is Mode.EXTEND else "accept_lens"
    plainest = Case(
        id="special",
        family=Family.MHA,
        mode=mode,
        prefix_lens=(0,),
        num_draft_tokens=1,
        num_q_heads=1,
        num_kv_heads=1,
        layout=Layout.CONTIGUOUS,
        max_context_len=1,
        capture_bs=(1,),
        **{new: (1,)},
    )
    special = replace(
        plainest,
        prefix_lens=(70, 33),
        num_draft_tokens=4,
        page_size=64,
        layout=Layout.INTERLEAVED,
        num_q_heads=8,
        num_kv_heads=2,
        dtype=Dtype.FP16,
        kv_dtype=KVDtype.FP8,
        k_scale=0.25,
        v_scale=0.5,
        window_left=20,
        sinks=True,
        max_context_len=128,
        capture_bs=(2, 4),
        padded_rows=3,
        pads_before_plan=True,
        **{new: lens},
    )
    smallest, _ = minimise(special, judged(lambda case: True))
    assert smallest == plainest


def test_a_fault_of_whole_chains_keeps_them_whole_as_they_become_shorter() -> None:
    case = Case(
        id="whole-chain",
        family=Family.MHA,
        mode=Mode.DRAFT_EXTEND_V2,
        prefix_lens=(70, 33),
        accept_lens=(2, 4),
        num_draft_tokens=4,
    )
    smallest, _ = minimise(case, judged(lambda c: c.num_draft_tokens in c.accept_lens))
    said = "a narrower chain cuts the accept lengths that are longer"
    assert (smallest.accept_lens, smallest.num_draft_tokens) == ((1,), 1), said


def test_the_record_is_the_smallest_case_s() -> None:
    def run(case: Case) -> Record:
        verdict = Verdict.WRONG_NUMBERS if case.bs > 2 else Verdict.PASSED
        return trial(case.id, verdict, message=f"logits: {case.bs} rows wrong")

    smallest, record = minimise(RAGGED, run)
    assert smallest.bs == 3
    assert record.message == "logits: 3 rows wrong", "the record is that of the case it comes with"


def test_another_cause_is_not_followed() -> None:
    def run(case: Case) -> Record:
        message = MESSAGE if case.bs == 8 else "max_seq_len = 3 is not accepted"
        return trial(case.id, Verdict.WRONG_NUMBERS, message=message)

    smallest, _ = minimise(RAGGED, run)
    assert smallest.bs == 8


def test_a_green_trial_cannot_be_made_smaller() -> None:
    with pytest.raises(UsageError, match="mha-target_verify-bs8_ragged is passed: only a red"):
        minimise(RAGGED, judged(lambda case: False))


def test_numbers_and_lists_are_no_part_of_a_cause() -> None:
    one = trial("a", Verdict.ERROR, message="cache_seqlens_int32[0] = 40, expected 41; more")
    other = trial("b", Verdict.ERROR, message="cache_seqlens_int32[3] = 7, expected 9")
    pages = trial(
        "c", Verdict.ERROR, message="page_table[0] has live pages [3, 4], expected [3, 5]"
    )
    assert cause(one) == cause(other) != cause(pages)
    assert cause(one) != cause(replace(one, verdict=Verdict.BROKEN_INVARIANT))


def test_every_reduction_is_a_smaller_case() -> None:
    for case in CASES.values():
        for smaller in reductions(case):
            assert smaller != case
            assert smaller.id == case.id
            assert smaller.num_tokens <= case.num_tokens, case.id
            assert sum(smaller.prefix_lens) <= sum(case.prefix_lens), case.id


def test_a_row_shows_what_is_not_the_default() -> None:
    shown = row(CASES["mha-decode-fp8_cache"])
    assert shown.startswith("Case(id='mha-decode-fp8_cache', family=")
    assert f"kv_dtype={KVDtype.FP8!r}" in shown
    assert "window_left" not in shown


def test_a_trial_is_found_by_the_id_that_a_red_one_prints() -> None:
    case, subject, execution = find_trial("mha-decode-bs1_short-sglang-0.5.16/trtllm_mha/xqa-graph")
    assert (case.id, execution) == ("mha-decode-bs1_short", Execution.GRAPH)
    assert subject.name == "sglang-0.5.16/trtllm_mha/xqa"
    _, ours, _ = find_trial("mha-decode-bs1_short-trtllm_mha/xqa-eager")
    assert ours.name == "trtllm_mha/xqa"


@pytest.mark.parametrize("strength", [2, 3])
def test_a_covering_trial_is_found_by_its_id(strength: int) -> None:
    *_, (covering, on, how) = covering_trials(None, strength)
    found = find_trial(f"{covering.id}-{on.name}-{how}")
    assert found == (covering, on, how), f"a covering row is no named edge, and can be red: {found}"


def test_a_trial_of_drawn_inputs_is_found_with_its_own_inputs() -> None:
    drawn = f"mha-decode-bs1_short{DRAW}7"
    case, subject, _ = find_trial(f"{drawn}-trtllm_mha/xqa-eager")
    told = f"inputs are drawn from the id, {drawn}, not {case.id}"
    assert case == replace(CASES["mha-decode-bs1_short"], id=drawn), told
    assert subject.name == "trtllm_mha/xqa"


@pytest.mark.parametrize("name", ["", "mha-decode-bs1_short", "nothing-trtllm_mha/xqa-eager"])
def test_an_unknown_trial_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"{UsageError(verb.rejected('trial', name, verb.FORM))}\n"


def test_the_script_is_of_the_smallest_case(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(verb, "install", lambda release: None)
    monkeypatch.setattr(verb, "activate", lambda release: None)
    monkeypatch.setattr(Classes, "load", lambda self: None)
    monkeypatch.setattr(
        verb.TrialProcess, "run", lambda self, case, *_: judged(lambda c: c.bs > 1)(case)
    )
    path, trial = (
        tmp_path / "made" / "script.py",
        f"mha-decode-bs2_ragged-sglang-{NEWEST}/trtllm_mha/xqa",
    )
    assert main([f"{trial}-eager", "--script", str(path)]) == 0
    written = path.read_text(encoding="utf-8").splitlines()
    (committed,) = (line for line in written if line.startswith("COMMITTED, WIDTH, STEPS = "))
    told = f"a script has the lengths of the smallest case, [0, 0], not {committed}"
    assert committed.startswith("COMMITTED, WIDTH, STEPS = [0, 0], "), told


def test_the_verb_prints_the_smallest_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        verb.TrialProcess, "run", lambda self, case, *_: judged(lambda c: c.bs > 1)(case)
    )
    assert main(["mha-decode-bs3_ragged_padded_to_4-trtllm_mha/xqa-eager"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("Case(id='mha-decode-bs3_ragged_padded_to_4'")
    assert "prefix_lens=(0, 0)" in first
    assert rest[-1] == MESSAGE
