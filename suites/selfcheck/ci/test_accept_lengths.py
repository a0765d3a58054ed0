"""Texts and accept lengths of servers beside the oracle's, along the servers' own texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures import accept_lengths
from fixtures.accept_lengths import (
    Judged,
    Load,
    Outcome,
    along,
    asked,
    default_arms,
    judged,
    row,
    share,
)
from fixtures.models.held_out import held_out
from fixtures.pytest_plugin.goldens import PAIRS, load_prompt, prompts
from harness.bench.arms import Arm, parse
from harness.core.case import Dtype
from harness.core.paths import MODELS
from harness.core.record import TokenCounts
from harness.core.tolerance import tie_margin
from harness.errors import NotReady
from harness.oracle import FollowedText

pytestmark = pytest.mark.untraced
ARM = parse("sglang:pair=gqa,backend=triton,num_steps=5,num_draft_tokens=6")
TIE = tie_margin(Dtype.BF16)


def text(prompt: int, steps: int, due: int = 2, ties: int = 0, wrong: str = "") -> Judged:
    counts = TokenCounts(judged=5, tied=ties)
    return Judged(prompt, counts, steps=steps, due=due, wrong=wrong)


def test_the_oracle_along_its_own_golden_counts_as_that_does() -> None:
    due = load_prompt("gqa", 0)
    found = along("gqa", 3, (prompts("gqa")[0], due.token_ids))
    assert len(found.accept_lengths) == len(due.accept_lengths)
    assert found.shortfalls == (0,) * len(due.token_ids)


@pytest.mark.parametrize(
    ("shortfalls", "ties", "wrong"),
    [
        ((0, 0, 0), 0, ""),
        ((0, 0.9 * TIE, 0.1 * TIE), 2, ""),
        ((0.5 * TIE, 0, 4 * TIE), 1, "item 2 is 9, expected 30; it falls short by 0.18 RMS"),
    ],
)
def test_a_token_is_the_oracles_or_ties_with_it_or_is_wrong(
    shortfalls: tuple[float, ...], ties: int, wrong: str
) -> None:
    due = FollowedText(
        shortfalls=shortfalls, best_ids=(10, 20, 30), accept_lengths=(1, 1), step_shortfalls=(0, 0)
    )
    said = f"prompt 7: tokens: {wrong}, a tie by 0.045 at most" if wrong else ""
    counts = TokenCounts(judged=3, tied=ties)
    assert judged(7, ((10, 5, 9), 3), due) == Judged(7, counts, 3, 2, said)


def test_a_token_without_judgement_is_counted() -> None:
    due = FollowedText(
        shortfalls=(0, 0), best_ids=(10, 5), accept_lengths=(1,), step_shortfalls=(0,)
    )
    found = judged(7, ((10, 5, 9), 3), due)
    assert found.tokens == TokenCounts(judged=2, unjudged=1)
    assert found.wrong.startswith("prompt 7: tokens: 2 judged, 0 tied, 1 unjudged of 3")


@pytest.mark.parametrize(
    ("texts", "cells", "fine"),
    [
        (
            [text(0, 2), text(1, 2, ties=3)],
            [
                "2",
                "10 judged, 3 tied, 0 unjudged",
                "2.000",
                "2.000",
                "100.00% (100.00% to 100.00%)",
            ],
            True,
        ),
        (
            [text(0, 4), text(1, 4)],
            ["2", "10 judged, 0 tied, 0 unjudged", "1.000", "2.000", "50.00% (50.00% to 50.00%)"],
            False,
        ),
        (
            [text(0, 1), text(1, 2, wrong="token 5 of prompt 1")],
            ["2", "10 judged, 0 tied, 0 unjudged; 1 wrong: token 5 of prompt 1", "2.667", "2.000"],
            False,
        ),
    ],
)
def test_tokens_and_drafts_are_judged_along_the_servers_text(
    texts: list[Judged], cells: list[str], fine: bool
) -> None:
    shown, good = row(ARM, texts)
    assert (shown[: 3 + len(cells)], good) == (["gqa", "5", "triton", *cells], fine)


def test_an_accept_length_is_short_where_its_interval_is() -> None:
    """One prompt of 64 that took twice as long is luck; a fifth of the steps everywhere is not."""
    luck = [text(i, steps=40 if i else 80, due=40) for i in range(64)]
    of_it, low, high = share(luck)
    assert of_it == pytest.approx(64 / 65)
    assert low < of_it < high == 1
    assert row(ARM, luck)[1]
    assert share([text(i, steps=50, due=40) for i in range(64)]) == pytest.approx((0.8, 0.8, 0.8))


def test_answers_to_one_prompt_are_drawn_together() -> None:
    """Asked four times, 16 prompts say no more than once."""
    once = [text(i, steps=40 + i % 5, due=42) for i in range(16)]
    assert share(once * 4) == share(once)


def test_an_interval_leaves_out_a_fortieth_on_either_side() -> None:
    # All three draws are the slow prompt in 1 of 27, which is more than a fortieth.
    found = [text(0, 2), text(1, 2), text(2, 4)]
    told = "half the accept length comes up in 3.7 % of the draws, so that 95 % reach down to it"
    assert share(found) == (0.75, 0.5, 1.0), told


class Unreachable:
    """A server that starts, ends or hangs, and answers nothing."""

    url = "http://127.0.0.1:9"

    def __init__(self, log: Path, said: str, alive: bool) -> None:
        self.log, self.said, self.alive, self.stopped = log, said, alive, False

    def wait_ready(self) -> None:
        self.log.write_text("loading\n" + self.said)
        if self.said:
            raise NotReady("not ready after 300 s" if self.alive else "ended with 1")

    def stop(self) -> None:
        self.stopped = True


@pytest.mark.parametrize(
    ("said", "alive", "code", "told"),
    [
        ("ValueError: on SM100 alone", False, 1, "ValueError: on SM100 alone"),
        ("capturing", True, 1, "NotReady: not ready after 300 s"),
        ("", True, 1, "ServerError: http://127.0.0.1:9"),
    ],
)
def test_a_server_that_ends_says_why_and_one_that_hangs_or_fails_to_answer_is_red(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    said: str,
    alive: bool,
    code: int,
    told: str,
) -> None:
    started: list[Unreachable] = []

    def start(_: Arm, log: Path) -> Unreachable:
        started.append(Unreachable(log, said, alive))
        return started[-1]

    monkeypatch.setattr(Arm, "start", start)
    arm = "sglang:pair=gqa,backend=triton"
    assert accept_lengths.main(["--arm", arm, "--prompts", "2", "--logs", str(tmp_path)]) == code
    assert f"gqa | 3 | triton | {told}" in capsys.readouterr().err
    assert [server.stopped for server in started] == [True]


def test_a_backend_of_sglang_may_not_serve_this_gpu_but_ours_do() -> None:
    ended = Outcome(ended="ValueError: on SM100 alone")
    arms = [parse(f"sglang:backend={name}", {}) for name in ("trtllm_mha", "specgate_mha")]
    assert [accept_lengths.row(arm, [], ended, may_end=True)[1] for arm in arms] == [True, False]


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


@pytest.mark.parametrize(("verified", "code"), [(None, 0), (60, 1)])
def test_the_command_ends_with_1_below_the_oracle(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verified: int | None,
    code: int,
) -> None:
    goldens = [load_prompt("gqa", i) for i in range(2)]
    own = [(golden.token_ids, verified or len(golden.accept_lengths)) for golden in goldens]
    ids, steps = own[1]
    own[1] = ((ids[0] + 1, *ids[1:]), steps) if verified else own[1]

    def answered(arm: Arm, log: Path, tokens: int, load: Load) -> Outcome:
        assert (load.concurrency, tokens) == (32, 24)
        return Outcome(own * load.times)

    monkeypatch.setattr(accept_lengths, "ask", answered)
    arm = "sglang:pair=gqa,backend=triton,num_steps=3,num_draft_tokens=4"
    given = ["--arm", arm, "--prompts", "2", "--tokens", "24", "--times", "3"]
    assert accept_lengths.main([*given, "--concurrency", "32"]) == code
    said = capsys.readouterr()
    assert ("prompt 1: tokens: item 0 is" in said.err) is bool(code)
    assert " | 6 | " in said.err


@pytest.mark.parametrize("backends", [("specgate_mha", "triton"), ("triton", "specgate_mha")])
def test_one_arm_that_is_not_good_ends_the_command_with_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, backends: tuple[str, str]
) -> None:
    monkeypatch.setattr(accept_lengths, "ask", lambda *_: Outcome(ended="no such GPU"))
    monkeypatch.setattr(accept_lengths, "as_completed", list)  # one after another, as given
    arms = [parse(f"sglang:pair=gqa,backend={name}") for name in backends]
    told = f"our backend must start where sglang's need not, and whichever of {backends} comes last"
    assert accept_lengths.compare(arms, tmp_path, 24, Load(), 1, may_end=True) == 1, told


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
