"""Over HTTP a prompt gets the oracle's text, however many others are served with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fixtures.drivers.crowd import settled, together
from fixtures.models import shipped
from fixtures.pytest_plugin.goldens import prompts
from fixtures.pytest_plugin.servers import FreshServer, Served
from harness.core.case import Dtype
from harness.core.paths import MODELS
from harness.core.record import Verdict
from harness.core.tolerance import tie_margin
from harness.differential.compare import compare_tokens
from harness.server.client.flush import flush
from harness.server.client.sglang import Answer, Client

WAYS = ("generate", "stream")
DRAFT_TIES = 0.05


def ask(client: Client, prompt: tuple[int, ...], way: str) -> Answer:
    if way == "generate":
        return client.generate(prompt, shipped.NEW)
    *_, last = client.stream(prompt, shipped.NEW)
    return last.answer


def tie(server: Served) -> float:
    return tie_margin(Dtype.FP32 if server.kind == "embedded" else Dtype.BF16)


@pytest.mark.parametrize("at_once", [1, 8, 32])
def test_tokens_and_accept_lengths(server, at_once):
    flush(server.url)
    texts = prompts(server.pair)
    due = [shipped.expected(shipped.Setup(pair=server.pair), i) for i in range(len(texts))]
    # One request asks for the whole response, the next for a stream.
    calls = [
        lambda text=text, way=WAYS[i % 2]: ask(server.client, text, way)
        for i, text in enumerate(texts[: 8 if at_once == 1 else 32])
    ]
    answers = together(at_once, calls)
    rounds = [len(expected.accept_lengths) for expected in due[: len(answers)]]
    for answer, expected in zip(answers, due, strict=False):
        found = compare_tokens(answer.output_ids, expected.token_ids, expected.margins, tie(server))
        assert found.verdict is Verdict.PASSED, found.message
        assert answer.completion_tokens == len(answer.output_ids) == shipped.NEW
        assert answer.finish_reason == "length"
    verified = [answer.spec_verify_ct for answer in answers]
    if server.kind == "embedded":
        assert [answer.output_ids for answer in answers] == [
            d.token_ids for d in due[: len(answers)]
        ]
        assert verified == rounds
    else:
        # A draft that ties in bfloat16 moves a round, not a token.
        assert sum(verified) == pytest.approx(sum(rounds), rel=DRAFT_TIES)


@pytest.mark.parametrize(
    ("pair", "spec"), [("mla", "v2"), ("mla", "v1"), ("gqa", "v1"), ("gqa", "none")]
)
def test_other_pairs_and_versions(fresh_server: FreshServer, pair: str, spec: str) -> None:
    served = fresh_server(pair, spec=spec)
    texts = prompts(pair)[:4]
    calls = [lambda text=text: served.client.generate(text, shipped.NEW) for text in texts]
    for index, answer in enumerate(together(4, calls)):
        expected = shipped.expected(shipped.Setup(pair=pair), index)
        assert answer.output_ids == expected.token_ids
        rounds = 0 if spec == "none" else len(expected.accept_lengths)
        assert answer.spec_verify_ct == rounds
    settled(served)


def test_the_end_token_ends_an_answer(fresh_server: FreshServer, tmp_path: Path) -> None:
    prompt, expected = prompts("gqa")[0], shipped.expected(shipped.Setup(pair="gqa"), 0)
    shutil.copytree(MODELS / "gqa", tmp_path / "gqa")
    end = {"eos_token_id": expected.token_ids[5]}
    (tmp_path / "gqa" / "target" / "generation_config.json").write_text(json.dumps(end))
    served = fresh_server(models=tmp_path)
    answer = served.client.generate(prompt, shipped.NEW, ignore_eos=False)
    stop = expected.token_ids.index(end["eos_token_id"])
    assert answer.output_ids == expected.token_ids[: stop + 1]
    assert answer.finish_reason == "stop"
    assert served.client.generate(prompt, shipped.NEW).output_ids == expected.token_ids
    settled(served)


def test_one_round_emits_what_it_accepted(server):
    prompt = prompts(server.pair)[3]
    lengths = [len(chunk.answer.output_ids) for chunk in server.client.stream(prompt, shipped.NEW)]
    expected = shipped.expected(shipped.Setup(pair=server.pair), 3)
    if server.kind == "embedded":
        # The prefill emits one token; the last round may reach past the end.
        sums = [1 + sum(expected.accept_lengths[:n]) for n in range(len(expected.accept_lengths))]
        # A stream may join its first chunks, never reorder or lose one.
        assert lengths == sorted(lengths)
        assert set(lengths) <= {*sums, shipped.NEW}
        assert lengths[-1] == shipped.NEW
    settled(server)


def test_text_and_batches(server):
    texts = prompts(server.pair)[4:7]
    batch = server.client.generate_batch(texts, 7)
    alone = [server.client.generate(prompt, 7) for prompt in texts]
    for answers in (batch, alone):
        for index, answer in enumerate(answers, start=4):
            expected = shipped.expected(shipped.Setup(pair=server.pair), index)
            due = expected.token_ids[:7], expected.margins[:7]
            found = compare_tokens(answer.output_ids, *due, tie(server))
            assert found.verdict is Verdict.PASSED, found.message
    assert [a.prompt_tokens for a in batch] == [len(prompt) for prompt in texts]
    assert all(a.text for a in batch)


def test_a_flush_is_seen_by_the_next_request(server):
    prompt = prompts(server.pair)[9]
    server.client.generate(prompt, 3)
    assert server.client.generate(prompt, 3).cached_tokens > 0
    assert flush(server.url).tries >= 1
    assert server.client.generate(prompt, 3).cached_tokens == 0
