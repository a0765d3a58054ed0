"""Over HTTP a prompt gets the oracle's text, however many others are served with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import requests

from fixtures.drivers.crowd import settled, text, together
from fixtures.drivers.threaded_server import threaded_server
from fixtures.models import shipped
from fixtures.pytest_plugin.answers import judge_answer
from fixtures.pytest_plugin.followed import followed
from fixtures.pytest_plugin.goldens import load_prompt, prompts
from fixtures.pytest_plugin.servers import Served
from harness.core.case import Dtype
from harness.core.paths import MODELS
from harness.server.client.flush import flush
from harness.server.client.sglang import Answer, Client

WAYS = ("generate", "stream")
DRAFT_TIES = 0.05


def ask(client: Client, prompt: tuple[int, ...], way: str) -> Answer:
    if way == "generate":
        return client.generate(prompt, shipped.NEW)
    *_, last = client.stream(prompt, shipped.NEW)
    return last.answer


def dtype(server: Served) -> Dtype:
    return Dtype.FP32 if server.kind == "embedded" else Dtype.BF16


@pytest.mark.parametrize("at_once", [1, 8, 32])
def test_tokens_and_accept_lengths(server, at_once):
    flush(server.url)
    texts = prompts(server.pair)
    # One request asks for the whole response, the next for a stream.
    calls = [
        lambda prompt=prompt, way=WAYS[i % 2]: ask(server.client, prompt, way)
        for i, prompt in enumerate(texts[: 8 if at_once == 1 else 32])
    ]
    answers = together(at_once, calls)
    for index, answer in enumerate(answers):
        found = judge_answer(server.pair, index, answer.output_ids, dtype(server))
        assert found.passed, found.message
        assert answer.completion_tokens == len(answer.output_ids) == shipped.NEW
        assert answer.finish_reason == "length"
    verified = [answer.spec_verify_ct for answer in answers]
    if server.kind == "embedded":
        due = [load_prompt(server.pair, index) for index in range(len(answers))]
        assert [answer.output_ids for answer in answers] == [d.token_ids for d in due]
        assert verified == [len(d.accept_lengths) for d in due]
    else:
        along = [followed(server.pair, i, a.output_ids) for i, a in enumerate(answers)]
        rounds = sum(len(expected.accept_lengths) for expected in along)
        # A draft that ties in bfloat16 moves a round, not a token.
        assert sum(verified) == pytest.approx(rounds, rel=DRAFT_TIES)


@pytest.mark.untraced
@pytest.mark.parametrize(
    ("pair", "spec"), [("mla", "v2"), ("mla", "v1"), ("gqa", "v1"), ("gqa", "none")]
)
def test_other_pairs_and_versions(pair: str, spec: str) -> None:
    texts = prompts(pair)[:4]
    with threaded_server(pair, spec=spec) as served:
        ask = served.client.generate
        answers = together(4, [lambda prompt=prompt: ask(prompt, shipped.NEW) for prompt in texts])
        settled(served)
    for index, answer in enumerate(answers):
        expected = load_prompt(pair, index)
        count = len(answer.output_ids)
        assert count == shipped.NEW, f"no chunk of a stream leaves out a token: {count} came"
        assert answer.output_ids == expected.token_ids
        rounds = 0 if spec == "none" else len(expected.accept_lengths)
        said = "spec_verify_ct of meta_info counts the verifies of the request"
        assert answer.spec_verify_ct == rounds, said


def test_the_end_token_ends_an_answer(tmp_path: Path) -> None:
    prompt, expected = prompts("gqa")[0], load_prompt("gqa", 0)
    shutil.copytree(MODELS / "gqa", tmp_path / "gqa")
    end = {"eos_token_id": expected.token_ids[5]}
    (tmp_path / "gqa" / "target" / "generation_config.json").write_text(json.dumps(end))
    with threaded_server(models=tmp_path) as served:
        answer = served.client.generate(prompt, shipped.NEW, ignore_eos=False)
        whole = served.client.generate(prompt, shipped.NEW)
        settled(served)
    stop = expected.token_ids.index(end["eos_token_id"])
    due = expected.token_ids[: stop + 1]
    said = f"an answer has every token up to the end token: {due}, not {answer.output_ids}"
    assert answer.output_ids == due, said
    assert answer.finish_reason == "stop"
    assert whole.output_ids == expected.token_ids


def test_one_round_emits_what_it_accepted(server):
    prompt = prompts(server.pair)[3]
    lengths = [len(chunk.answer.output_ids) for chunk in server.client.stream(prompt, shipped.NEW)]
    expected = load_prompt(server.pair, 3)
    if server.kind == "embedded":
        # The prefill emits one token; the last round may reach past the end.
        sums = [1 + sum(expected.accept_lengths[:n]) for n in range(len(expected.accept_lengths))]
        # A stream may join its first chunks, never reorder or lose one.
        assert lengths == sorted(lengths)
        assert set(lengths) <= {*sums, shipped.NEW}
        assert lengths[-1] == shipped.NEW
    settled(server)


def test_every_chunk_tells_the_accept_length_since_its_request_began(embedded_server):
    body = {"input_ids": [*prompts(embedded_server.pair)[3]], "stream": True}
    body["sampling_params"] = {"max_new_tokens": shipped.NEW, "ignore_eos": True}
    answer = requests.post(f"{embedded_server.url}/generate", json=body, timeout=60)
    *chunks, _ = (line[6:] for line in answer.text.splitlines() if line)
    told = [json.loads(chunk)["meta_info"] for chunk in chunks]
    assert len(told) > 2
    for meta in told:
        rounds = max(meta["spec_verify_ct"], 1)
        assert meta["spec_accept_length"] == meta["completion_tokens"] / rounds


def test_text_and_batches(server):
    texts = prompts(server.pair)[4:13]  # more than run at a time
    batch = server.client.generate_batch(texts, 7)
    told = "a batch has an answer for each of its prompts"
    assert len(batch) == len(texts), f"{told}, {len(texts)}, not {len(batch)}"
    alone = [server.client.generate(prompt, 7) for prompt in texts[:3]]
    for answers in (batch, alone):
        for index, answer in enumerate(answers, start=4):
            found = judge_answer(server.pair, index, answer.output_ids, dtype(server), count=7)
            assert found.passed, found.message
    counts, due = [a.prompt_tokens for a in batch], [len(prompt) for prompt in texts]
    assert counts == due, f"prompt_tokens of an answer are its own prompt's: {due}, not {counts}"
    assert all(a.text for a in batch), "each answer of a batch has text"


def test_a_flush_is_seen_by_the_next_request(server):
    prompt = text(9, 150)  # longer than a page of any backend
    server.client.generate(prompt, 3)
    said = "cached_tokens of meta_info counts the cached tokens of a prompt sent before"
    assert server.client.generate(prompt, 3).cached_tokens > 0, said
    assert flush(server.url).tries >= 1
    assert server.client.generate(prompt, 3).cached_tokens == 0
