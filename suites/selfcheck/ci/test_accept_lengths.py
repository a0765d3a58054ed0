"""Texts and accept lengths of servers beside the oracle's, along the servers' own texts."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fixtures import accept_lengths
from fixtures.accept_lengths import (
    Answered,
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


def along_itself(ids: tuple[int, ...]) -> FollowedText:
    """The oracle along a text that is its own, of one step."""
    return FollowedText(
        shortfalls=(0,) * len(ids), best_ids=ids, accept_lengths=(3,), step_shortfalls=(0,)
    )


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
    assert judged(7, Answered((10, 5, 9), 3), due, 3) == Judged(7, counts, 3, 2, said)


def test_a_token_without_judgement_is_counted() -> None:
    due = FollowedText(
        shortfalls=(0, 0), best_ids=(10, 5), accept_lengths=(1,), step_shortfalls=(0,)
    )
    found = judged(7, Answered((10, 5, 9), 3), due, 3)
    assert found.tokens == TokenCounts(judged=2, unjudged=1)
    assert found.wrong.startswith("prompt 7: tokens: 2 judged, 0 tied, 1 unjudged of 3")


@pytest.mark.parametrize("ids", [(), (10, 20)])
def test_a_text_that_ends_before_it_is_due_is_wrong(ids: tuple[int, ...]) -> None:
    due = along_itself(ids)
    found = judged(7, Answered(ids, 1), due, 3)
    said = "a server that gave up in the middle of a right text has given a wrong answer"
    assert found.wrong == f"prompt 7: tokens: {len(ids)} came, expected 3", said


def test_texts_without_a_verify_step_are_no_speculation() -> None:
    shown, good = row(ARM, [text(0, steps=0), text(1, steps=0, wrong="token 5 of prompt 1")])
    told = "10 judged, 0 tied, 0 unjudged; 1 of 2 texts wrong: token 5 of prompt 1"
    assert shown[3:] == ["2", told, "no verify steps", "", ""]
    assert not good, "a server that never verified a draft has no accept length"
    of_it, _, high = share([text(0, steps=0), text(1, steps=4)])
    assert (of_it, high) == (1.0, 4.0), "an answer without a step is drawn like any other"


def test_tokens_without_judgement_were_drafted_too() -> None:
    counts = TokenCounts(judged=5, unjudged=2)
    shown, _ = row(ARM, [Judged(0, counts, steps=2, due=2, wrong="")])
    assert shown[5] == "3.000", "seven tokens, the prefill's aside, came in two steps"


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
            [
                "2",
                "10 judged, 0 tied, 0 unjudged; 1 of 2 texts wrong: token 5 of prompt 1",
                "2.667",
                "2.000",
            ],
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


class Slow:
    """A client of a server that takes a while for a request, longer for a longer one."""

    def __init__(self, url: str, timeout_s: float) -> None:
        pass

    def generate(self, text: Sequence[int], tokens: int) -> Any:
        time.sleep(len(text) / 1000)
        return SimpleNamespace(output_ids=(len(text),) * tokens, spec_verify_ct=len(text))


def test_an_answer_has_its_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = Unreachable(tmp_path / "0.log", "", alive=True)
    monkeypatch.setattr(server, "wait_ready", lambda: time.sleep(0.5))
    monkeypatch.setattr(Arm, "start", lambda *_: server)
    monkeypatch.setattr(accept_lengths, "Client", Slow)
    texts = accept_lengths.ask(ARM, server.log, 3, Load(prompts=2, times=2, concurrency=1)).texts
    lengths = [*map(len, asked("gqa", 2))] * 2
    assert [(text.ids, text.steps) for text in texts] == [((n,) * 3, n) for n in lengths]
    for text, after, length in zip(texts, [*texts[1:], None], lengths, strict=True):
        assert text.ended_s - text.began_s >= length / 1000
        assert after is None or after.began_s >= text.ended_s, "one at a time"
    assert texts[0].began_s < 0.5, "times count from the first request, not from a server's start"
    assert server.stopped


def test_a_backend_of_sglang_may_not_serve_this_gpu_but_ours_do() -> None:
    ended = Outcome(ended="ValueError: on SM100 alone")
    arms = [parse(f"sglang:backend={name}", {}) for name in ("trtllm_mha", "specgate_mha")]
    assert [accept_lengths.row(arm, [], ended, may_end=True)[1] for arm in arms] == [True, False]
    hung = Outcome(failed="ServerError: no answer")
    told = "a server that started and then gave no answer is red, whosever its backend is"
    assert [accept_lengths.row(arm, [], hung, may_end=True)[1] for arm in arms] == [False] * 2, told


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
    tmp_path: Path,
    verified: int | None,
    code: int,
) -> None:
    goldens = [load_prompt("gqa", i) for i in range(2)]
    due = [(golden.token_ids, verified or len(golden.accept_lengths)) for golden in goldens]
    own = [Answered(*both, began_s=i + 0.5, ended_s=i + 2.0) for i, both in enumerate(due)]
    ids = own[1].ids
    own[1] = own[1]._replace(ids=(ids[0] + 1, *ids[1:])) if verified else own[1]

    def answered(arm: Arm, log: Path, tokens: int, load: Load) -> Outcome:
        assert (load.concurrency, tokens) == (32, 24)
        return Outcome(own * load.times)

    monkeypatch.setattr(accept_lengths, "ask", answered)
    if not code:  # the other one starts its processes as the command does, and imports torch there
        monkeypatch.setattr(accept_lengths, "get_context", lambda _: get_context("fork"))
    arm = "sglang:pair=gqa,backend=triton,num_steps=3,num_draft_tokens=4"
    given = ["--arm", arm, "--prompts", "2", "--tokens", "24", "--times", "3"]
    given += ["--concurrency", "32", "--answers", str(tmp_path / "answers.jsonl")]
    assert accept_lengths.main(given) == code
    said = capsys.readouterr()
    assert ("3 of 6 texts wrong: prompt 1: tokens: item 0 is" in said.err) is bool(code)
    assert " | 6 | " in said.err
    lines = [*map(json.loads, (tmp_path / "answers.jsonl").read_text().splitlines())]
    assert [(line["arm"], line["prompt"]) for line in lines] == [(arm, 0), (arm, 1)] * 3
    assert lines[0]["oracle_instead"] == []
    assert (lines[4]["ids"], lines[4]["steps"]) == ([*goldens[0].token_ids], own[0].steps)
    assert [lines[5][key] for key in ("began_s", "ended_s")] == [1.5, 3.0]
    if code:
        instead = lines[5]["oracle_instead"][0]
        assert (instead["item"], instead["expected"]) == (0, goldens[1].token_ids[0])
        assert instead["shortfall"] > TIE
    else:
        assert lines[5]["oracle_instead"] == []
    with pytest.raises(SystemExit):
        accept_lengths.main(given)
    told = f"--answers = '{tmp_path}/answers.jsonl' is not accepted; accepted: a file"
    assert told in capsys.readouterr().err


def test_every_arm_is_followed_at_its_own_steps_and_its_answers_are_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked_at: list[tuple[str, int]] = []

    def followed(pair: str, steps: int, request: tuple[tuple[int, ...], ...]) -> FollowedText:
        asked_at.append((pair, steps))
        return along_itself(request[1])

    monkeypatch.setattr(accept_lengths, "along", followed)
    monkeypatch.setattr(accept_lengths, "ProcessPoolExecutor", lambda **_: ThreadPoolExecutor(1))
    monkeypatch.setattr(accept_lengths, "ask", lambda *_: Outcome([Answered((7, 8, 9, 10), 1)]))
    steps = ("triton,num_steps=10", "flashinfer,num_steps=10", "fa3,num_steps=5")
    words = (*(f"gqa,backend={of}" for of in steps), "mla")
    arms = [parse(f"sglang:pair={word}") for word in words]
    file = tmp_path / "answers.jsonl"
    assert accept_lengths.compare(arms, tmp_path, 4, Load(prompts=1), 1, False, file) == 0
    due = [("gqa", 5), ("gqa", 10), ("gqa", 10), ("mla", 3)]
    assert sorted(asked_at) == due, "the oracle drafts as the arm"
    kept = sorted(json.loads(line)["arm"] for line in file.read_text().splitlines())
    assert kept == sorted(arm.spec for arm in arms), "the answers of every arm are kept"
    shown = capsys.readouterr().out
    places = [shown.index(name) for name in ("fa3", "triton", "flashinfer")]
    told = "arms are listed by their number of steps, and equal ones as they came"
    assert places == sorted(places), f"{told}: {shown}"


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
    told = "runs of two processes ask the same prompts, so that they can be compared"
    assert [len(prompt) for prompt in made[32:36]] == [82, 177, 32, 31], told


def test_equal_answers_to_two_prompts_are_followed_along_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def along_prompt(_: str, __: int, request: tuple[tuple[int, ...], ...]) -> FollowedText:
        return along_itself(request[0])

    monkeypatch.setattr(accept_lengths, "along", along_prompt)
    texts = [Answered((7, 8), 1)] * 3
    with ThreadPoolExecutor(1) as threads:
        due = accept_lengths.every_followed(ARM, [1, 0, 1], texts, Load(prompts=2), threads)
    first, second = asked("gqa", 2)
    told = "the oracle follows an answer behind the prompt that it is an answer to"
    assert [followed.best_ids for followed in due] == [second, first, second], told


def test_an_arm_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        accept_lengths.main(["--arm", "vllm:x"])
    assert ended.value.code == 2
    assert "arm = 'vllm:x' is not accepted" in capsys.readouterr().err


def test_an_arm_without_a_shipped_pair_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        accept_lengths.main(["--arm", "url:http://127.0.0.1:9"])
    assert ended.value.code == 2, "whose prompts have no oracle is refused before a server starts"
    told = "--arm = 'url:http://127.0.0.1:9' is not accepted; accepted: an arm of a shipped pair"
    assert told in capsys.readouterr().err


def test_answers_find_their_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[bool] = []
    file = tmp_path / "new" / "answers.jsonl"
    monkeypatch.setattr(accept_lengths, "compare", lambda *_: made.append(file.parent.is_dir()))
    accept_lengths.main(["--arm", "sglang:pair=gqa", "--answers", str(file)])
    assert made == [True], "the folder of the answers is there before the first server starts"
    assert not file.exists(), "a command that has no answer leaves no file in the way of the next"


def test_answers_that_cannot_be_kept_are_refused_before_a_server_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(accept_lengths, "compare", lambda *_: pytest.fail("a server starts"))
    with pytest.raises(SystemExit):
        accept_lengths.main(["--arm", "sglang:pair=gqa", "--answers", "/proc/answers.jsonl"])
    told = "--answers = '/proc/answers.jsonl' is not accepted; accepted: a file that can be written"
    assert told in capsys.readouterr().err
