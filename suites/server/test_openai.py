"""OpenAI's endpoints return the text of ``/generate`` in OpenAI's format."""

from __future__ import annotations

import asyncio
import json

import pytest
import requests

from fixtures.drivers.crowd import settled
from harness.server.http import openai
from harness.server.http.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerateRequest,
)

PROMPT = "def first(items):\n    if items:\n        return"
NEW = 12
CHAT = [
    {"role": "system", "content": "def first(items):"},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "    if items:"},
            {"type": "text", "text": "        return"},
        ],
    },
]
PATHS = {"/v1/completions": {"prompt": PROMPT}, "/v1/chat/completions": {"messages": CHAT}}
WHOLE = {
    "/v1/completions": ("text_completion", lambda choice: choice["text"]),
    "/v1/chat/completions": ("chat.completion", lambda choice: choice["message"]["content"]),
}
CHUNK = {
    "/v1/completions": ("text_completion", lambda choice: choice["text"]),
    "/v1/chat/completions": (
        "chat.completion.chunk",
        lambda choice: choice["delta"]["content"],
    ),
}
LIMITED = {"max_tokens": NEW, "ignore_eos": True}
each_path = pytest.mark.parametrize("path", PATHS)


def post(server, path, body, **options):
    return requests.post(f"{server.url}{path}", json=body, timeout=60, **options)


def generated(server, prompt=PROMPT, new=NEW):
    sampling = {"max_new_tokens": new, "ignore_eos": True}
    return post(server, "/generate", {"text": prompt, "sampling_params": sampling}).json()


def events(answer):
    lines = [line.decode() for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]


@each_path
def test_a_whole_answer(embedded_server, path):
    answer = post(embedded_server, path, PATHS[path] | LIMITED).json()
    expected, (name, text) = generated(embedded_server), WHOLE[path]
    [choice] = answer["choices"]
    said = "the text is that of /generate, to which a chat is all parts of its messages"
    assert text(choice) == expected["text"], said
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    assert (answer["object"], answer["model"]) == (name, embedded_server.pair)
    prompt = expected["meta_info"]["prompt_tokens"]
    counted = {key: answer["usage"][key] for key in ("prompt_tokens", "total_tokens")}
    assert counted == {"prompt_tokens": prompt, "total_tokens": prompt + NEW}
    assert answer["usage"]["completion_tokens"] == NEW


@each_path
@pytest.mark.parametrize("usage", [False, True])
def test_a_stream(embedded_server, path, usage):
    body = PATHS[path] | LIMITED | {"stream": True}
    if usage:
        body["stream_options"] = {"include_usage": True}
    *sent, done = events(post(embedded_server, path, body, stream=True))
    assert done == "[DONE]"
    chunks = [json.loads(one) for one in sent]
    if usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == NEW
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert not any("usage" in chunk for chunk in chunks)
    name, text = CHUNK[path]
    assert {chunk["object"] for chunk in chunks} == {name}
    assert len({chunk["id"] for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(map(text, choices)) == generated(embedded_server)["text"]
    assert len(choices) > 2
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [
        "length"
    ]
    if "delta" in choices[0]:
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}


def test_a_batch_has_a_choice_for_each_prompt(embedded_server):
    prompts = [PROMPT, "import os\n"]
    answer = post(embedded_server, "/v1/completions", {"prompt": prompts} | LIMITED).json()
    expected = [generated(embedded_server, prompt)["text"] for prompt in prompts]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 2 * NEW


def test_the_usage_of_a_batch_is_the_sum_of_its_prompts():
    counts = ("prompt_tokens", "completion_tokens", "cached_tokens")
    responses = [
        {"text": "a", "meta_info": dict(zip(counts, row, strict=True)) | {"finish_reason": None}}
        for row in [(40, 3, 32), (21, 2, 16), (9, 4, 0)]
    ]
    expected = {
        "prompt_tokens": 70,
        "completion_tokens": 9,
        "total_tokens": 79,
        "prompt_tokens_details": {"cached_tokens": 48},
    }
    found = openai.completion(openai.COMPLETION, "gqa", responses)["usage"]
    assert found == expected, "usage has the sums over all prompts of a batch"


def test_a_completion_of_tokens_has_16_by_default(embedded_server):
    body = {"prompt": [5, 6, 7], "ignore_eos": True}
    answer = post(embedded_server, "/v1/completions", body).json()
    expected = embedded_server.client.generate([5, 6, 7], 16)
    assert answer["choices"][0]["text"] == expected.text
    assert answer["usage"]["completion_tokens"] == 16


def test_a_chat_goes_on_to_the_end_of_the_context(embedded_server):
    body = {"messages": [{"role": "user", "content": "a b " * 230}], "ignore_eos": True}
    usage = post(embedded_server, "/v1/chat/completions", body).json()["usage"]
    assert usage["total_tokens"] == embedded_server.client.server_info()["context_length"]
    assert usage["prompt_tokens"] > 400


@pytest.mark.parametrize(
    ("model", "least"),
    [
        (CompletionRequest, {"prompt": PROMPT}),
        (ChatCompletionRequest, {"messages": CHAT}),
        (GenerateRequest, {"text": PROMPT}),
    ],
)
def test_an_answer_goes_on_after_the_end_token_only_where_asked(model, least):
    asked = {"ignore_eos": True}
    if model is GenerateRequest:
        asked = {"sampling_params": asked}
    said = "the end token ends an answer unless ignore_eos is true"
    found = [model.model_validate(least | more).to_input().ignore_eos for more in ({}, asked)]
    assert found == [False, True], said


def test_of_both_limits_of_a_chat_the_newer_holds():
    asked = {"messages": CHAT, "max_tokens": 9, "max_completion_tokens": 5}
    found = ChatCompletionRequest.model_validate(asked).to_input()
    said = "max_completion_tokens is taken before max_tokens, which OpenAI has deprecated"
    assert found.max_new_tokens == 5, said


def test_a_message_without_text_is_a_line_of_its_own():
    silent = {"role": "assistant", "content": None}
    parts = [{"type": "text", "text": text} for text in ("b", "", "c")]
    messages = [{"role": "user", "content": "a"}, silent, {"role": "user", "content": parts}]
    found = ChatCompletionRequest.model_validate({"messages": messages}).prompt
    assert found == "a\n\nb\n\nc", "contents are joined by newlines, empty ones as well"


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/completions", {}, "prompt", "Field required"),
        ("/v1/completions", {"prompt": ""}, "prompt", "prompt = '' is not accepted"),
        (
            "/v1/completions",
            {"prompt": "a", "n": 2},
            "n",
            "n = 2 is not accepted; accepted: null, 1",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "temperature": 0.7},
            "temperature",
            "temperature = 0.7 is not accepted; accepted: null, 0",
        ),
        ("/v1/completions", {"prompt": "a", "top": 1}, "top", "top = 1 is not accepted"),
        ("/v1/completions", {"prompt": ["a", "b"], "stream": True}, None, "stream: one prompt"),
        (
            "/v1/completions",
            {"prompt": "a", "max_tokens": 600},
            "max_tokens",
            "max_tokens = 600 is not accepted; accepted: 1 … 511 after 1 prompt tokens",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "max_tokens": 600, "stream": True},
            "max_tokens",
            "1 … 511 after 1 prompt tokens",
        ),
        ("/v1/chat/completions", {"messages": []}, "messages", "at least 1 item"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": ""}]},
            None,
            "messages: some text is accepted",
        ),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "tools": [{"type": "function"}]},
            "tools",
            "accepted: null, []",
        ),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "max_tokens": 600, "stream": True},
            "max_tokens",
            "max_tokens = 600",
        ),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "max_completion_tokens": 600},
            "max_completion_tokens",
            "max_completion_tokens = 600",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a b " * 300}]},
            "messages",
            "accepted: at most 511",
        ),
    ],
)
def test_refusals_are_in_openais_format(embedded_server, path, body, param, words):
    answer = post(embedded_server, path, body)
    assert answer.status_code == 400, f"a refusal is answered 400, not {answer.status_code}"
    told = f"a refusal is an error of message, type, param and code, not {answer.text}"
    assert set(answer.json()) == {"error"}, told
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, told
    told = f"param of an error is the field that the client sent, {param}, not {error['param']}"
    assert error["param"] == param, told
    told = f"message of an error says {words!r} in one line, not {error['message']!r}"
    assert words in error["message"], told
    assert "\n" not in error["message"], told


def test_a_character_is_sent_when_it_is_whole():
    def body(text, finish=None):
        reason = finish and {"type": finish}
        return {"text": text, "meta_info": {"finish_reason": reason}}

    async def chunks():
        for text in ("a", "a\ufffd", "a\ufffd\ufffd", "aé"):
            yield body(text)
        yield body("aé\ufffd", "length")

    async def collect():
        stream = openai.completion_chunks(openai.COMPLETION, "gqa", chunks(), include_usage=False)
        return [chunk["choices"][0]["text"] async for chunk in stream]

    found = asyncio.run(collect())
    told = f"a chunk has the text since the chunk before alone, in whole characters: {found}"
    assert found == ["a", "é", "\ufffd"], told


@pytest.mark.parametrize("form", [openai.COMPLETION, openai.CHAT], ids=["completion", "chat"])
def test_an_end_without_new_text_is_a_chunk_with_its_reason(form):
    async def chunks():
        for reason in (None, {"type": "stop"}):
            yield {"text": "a", "meta_info": {"finish_reason": reason}}

    async def collect():
        stream = openai.completion_chunks(form, "gqa", chunks(), include_usage=False)
        return [chunk["choices"][0]["finish_reason"] async for chunk in stream]

    *before, last = asyncio.run(collect())
    assert before
    assert set(before) == {None}
    assert last == "stop"


def test_what_the_model_is(embedded_server):
    for path in ("/model_info", "/get_model_info"):
        said = requests.get(embedded_server.url + path, timeout=5).json()
        assert said["served_model_name"] == embedded_server.pair
        assert said["is_generation"] is True
        assert said["tokenizer_path"].endswith(f"{embedded_server.pair}/target")
        assert said["chat_template"] == "contents joined by newlines"
        assert said["default_temperature"] == 0
        most, rule = said["max_model_len"], "max_model_len is the server's own context_length"
        assert most == 512, f"{rule}, 512, not its weights' {most}"
    [model] = requests.get(f"{embedded_server.url}/v1/models", timeout=5).json()["data"]
    assert model["id"] == embedded_server.pair, f"a model's id is its pair, not {model['id']}"
    assert model["max_model_len"] == 512, f"{rule}, 512, not {model['max_model_len']}"


def test_both_names_of_the_servers_facts(embedded_server):
    new, old = (
        requests.get(embedded_server.url + path, timeout=5).json()
        for path in ("/server_info", "/get_server_info")
    )
    assert new.keys() == old.keys()
    assert old["context_length"] == 512


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_no_page_needs_a_network(embedded_server, path):
    assert requests.get(embedded_server.url + path, timeout=5).status_code == 404
    assert requests.get(f"{embedded_server.url}/openapi.json", timeout=5).ok


def test_nothing_is_left_behind(embedded_server):
    settled(embedded_server)
