"""Accept lengths of servers beside the oracle's, on requests that have one text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fixtures import accept_lengths
from fixtures.accept_lengths import (
    Load,
    Outcome,
    Texts,
    accept_length,
    asked,
    continued,
    default_arms,
    row,
)
from fixtures.models.held_out import held_out
from fixtures.pytest_plugin.goldens import PAIRS, load_prompt, prompts
from harness.bench.arms import Arm, parse
from harness.core.paths import MODELS

ARM = parse("sglang:pair=gqa,backend=triton,num_steps=5,num_draft_tokens=6")
SAME, OTHER = (4, 5, 6, 7, 8), (4, 5, 9, 9, 9)
DUE: Texts = [(SAME, 2), (SAME, 2), (SAME, 1)]


def test_an_accept_length_leaves_the_token_of_the_prefill_out() -> None:
    assert accept_length([(SAME, 2)]) == 2
    assert accept_length([(SAME, 2), (SAME, 1)]) == pytest.approx(8 / 3)


def test_the_oracle_counts_as_its_golden_does() -> None:
    due = load_prompt("gqa", 0)
    assert continued("gqa", 3, 24, 0) == (due.token_ids, len(due.accept_lengths))


@pytest.mark.parametrize(
    ("texts", "cells", "fine"),
    [
        ([(SAME, 2), (SAME, 2), (SAME, 1)], ["2.400", "2.400", "3 of 3", "2.400", "2.400"], True),
        ([(SAME, 2), (SAME, 2), (OTHER, 4)], ["1.500", "2.400", "2 of 3", "2.000", "2.000"], True),
        ([(SAME, 2), (SAME, 4), (SAME, 1)], ["1.714", "2.400", "3 of 3", "1.714", "2.400"], False),
        ([(OTHER, 4)] * 3, ["1.000", "2.400", "0 of 3", "nan", "nan"], True),
    ],
)
def test_drafts_are_compared_on_equal_texts(texts: Texts, cells: list[str], fine: bool) -> None:
    assert row(ARM, Outcome(texts), DUE) == (["gqa", "5", "triton", *cells], fine)


def test_a_server_that_does_not_start_shows_why() -> None:
    cells, fine = row(ARM, Outcome([], "ValueError: no"), DUE)
    assert cells[:4] == ["gqa", "5", "triton", "ValueError: no"]
    assert fine


@pytest.mark.parametrize(
    ("log", "told"),
    [
        (
            "loading\nTraceback:\n  ValueError: on SM100 alone\nkilled\n",
            "ValueError: on SM100 alone",
        ),
        ("a.b.FooError: first\nImportError: last\n\n", "ImportError: last"),
        ("starting\nno module\n", "no module"),
        ("", ""),
    ],
)
def test_the_line_that_a_log_ended_with(tmp_path: Path, log: str, told: str) -> None:
    file = tmp_path / "0.log"
    file.write_text(log)
    assert accept_lengths.ending(file) == told


def test_every_arm_of_the_table_is_one() -> None:
    arms = [parse(spec, {pair: MODELS / pair for pair in PAIRS}) for spec in default_arms()]
    tried = {(arm.pair, accept_lengths.steps_of(arm), arm.options["backend"]) for arm in arms}
    assert {("mla", steps, "flashmla") for steps in (3, 5)} <= tried
    assert {("gqa", 3, "fa3"), ("gqa", 3, "trtllm_mha")} <= tried
    for arm in arms:
        assert arm.options["num_draft_tokens"] == str(accept_lengths.steps_of(arm) + 1)


@pytest.mark.parametrize(("verified", "code"), [(2, 0), (4, 1)])
def test_the_command_ends_with_1_below_the_oracle(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    verified: int,
    code: int,
) -> None:
    def answered(arm: Arm, log: Path, tokens: int, load: Load) -> Outcome:
        assert load.concurrency == 32
        return Outcome([(SAME, verified)] * load.prompts * load.times)

    known = tmp_path / "oracle.json"
    known.write_text(json.dumps({"gqa 5": [(SAME, 2)] * 3}))
    monkeypatch.setattr(accept_lengths, "ask", answered)
    given = ["--arm", ARM.spec, "--prompts", "2", "--oracle", str(known)]
    given += ["--times", "3", "--concurrency", "32"]
    assert accept_lengths.main(given) == code
    assert "6 of 6" in capsys.readouterr().out


def test_prompts_after_the_shipped_ones_are_slices_of_held_out_text() -> None:
    made = asked("gqa", 256)
    assert made[:32] == prompts("gqa")
    assert (asked("gqa", 40), asked("gqa", 7)) == (made[:40], made[:7])
    text = " ".join(map(str, held_out()))
    assert all(" ".join(map(str, prompt)) in text for prompt in made[32:])
    lengths = sorted(len(prompt) for prompt in made[32:])
    assert 8 <= lengths[0] < 16 < 180 < lengths[-1] <= 192
    assert asked("mla", 64)[32:] != made[32:64]


def test_an_arm_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        accept_lengths.main(["--arm", "vllm:x"])
    assert ended.value.code == 2
    assert "arm = 'vllm:x' is not accepted" in capsys.readouterr().err
