"""An invalid body is refused by field, value and what is accepted."""

from __future__ import annotations

import pytest
import requests

from fixtures.drivers.crowd import settled
from fixtures.drivers.threaded_server import threaded_server

PROMPT = {"input_ids": [5, 6, 7]}
CONTEXT = 512
"""Tokens of the embedded server's."""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "exactly one of text and input_ids"),
        (PROMPT | {"text": "def"}, "exactly one of text and input_ids"),
        (PROMPT | {"topk": 4}, "topk = 4"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [5, -1]}, "-1"),
        ({"input_ids": [5, 2048]}, "input_ids = 2048 is not accepted; accepted: tokens < 2048"),
        # The first of the unknown tokens, neither the last nor the largest or smallest.
        ({"input_ids": [5, 2049, 2050, 2048]}, "input_ids = 2049 is not accepted"),
        (
            {"input_ids": [5] * CONTEXT},
            "tokens of input_ids = 512 is not accepted; accepted: at most 511",
        ),
        ({"input_ids": ["5"]}, "'5'"),
        ({"input_ids": [5.5]}, "5.5"),
        ({"text": ""}, "text"),
        ({"text": 7}, "7"),
        ({"input_ids": [[5]] * 65}, "64"),
        (PROMPT | {"stream": "yes"}, "stream = 'yes'"),
        ({"input_ids": [[5], [6]], "stream": True}, "stream: one prompt"),
        (PROMPT | {"rid": ["a"]}, "rid: one for each prompt"),
        ({"input_ids": [[5], [6]], "rid": ["a", "a"]}, "rid: different ids"),
        ({"input_ids": [[5], [6]], "rid": "a"}, "rid: a list"),
        (PROMPT | {"sampling_params": {"max_new_tokens": 0}}, "max_new_tokens = 0"),
        (
            PROMPT | {"sampling_params": {"max_new_tokens": 510}},
            "sampling_params.max_new_tokens = 510 is not accepted; accepted: 1 … 509 after 3",
        ),
        (PROMPT | {"sampling_params": {"temperature": 0.7}}, "temperature = 0.7"),
        (PROMPT | {"sampling_params": {"top_p": 0.9}}, "top_p = 0.9"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_refused_by_name(embedded_server, body, words):
    answer = requests.post(f"{embedded_server.url}/generate", json=body, timeout=10)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, 400), error
    said = f"the first value that is not accepted is named by {words!r}, not {error['message']!r}"
    assert words in error["message"], said


def test_every_prompt_of_a_batch_has_the_rid_that_was_sent_for_it(embedded_server):
    sampling = {"max_new_tokens": 2, "ignore_eos": True}
    asked = {"input_ids": [[5], [6, 7]], "rid": ["one", "two"], "sampling_params": sampling}
    answer = requests.post(f"{embedded_server.url}/generate", json=asked, timeout=60)
    told = f"the n-th answer of a batch has the n-th rid: {answer.text}"
    assert answer.status_code == 200, told
    found = [(own["meta_info"]["id"], own["meta_info"]["prompt_tokens"]) for own in answer.json()]
    assert found == [("one", 1), ("two", 2)], told


def test_a_prompt_may_leave_room_for_one_token(embedded_server):
    asked = {"input_ids": [5] * (CONTEXT - 1), "sampling_params": {"max_new_tokens": 1}}
    answer = requests.post(f"{embedded_server.url}/generate", json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["meta_info"]["completion_tokens"] == 1


def test_of_many_mistakes_five_are_told(embedded_server):
    asked = PROMPT | {f"unknown_{number}": number for number in range(7)}
    answer = requests.post(f"{embedded_server.url}/generate", json=asked, timeout=10)
    told = answer.json()["error"]["message"].split("; ")
    assert len(told) == 5, f"a body with 7 mistakes is refused by the first 5: {told}"
    assert told[4].startswith("unknown_4 = 4 is not accepted")


@pytest.mark.parametrize(
    ("verb", "path", "data", "status"),
    [
        ("POST", "/generate", b"{nope", 400),
        ("POST", "/generate", b"[" * 50_000, 400),
        ("POST", "/generate", b"\xff\xfe", 400),
        ("POST", "/generate", b" " * (3 << 20), 413),
        ("PUT", "/generate", b"{}", 405),
        ("GET", "/nothing", b"", 404),
        ("POST", "/flush_cache?timeout=never", b"", 400),
        ("POST", "/flush_cache?timeout=-1", b"", 400),
        ("POST", "/abort_request", b"{}", 400),
        ("POST", "/abort_request", b'{"rid": "a", "abort_all": true}', 400),
    ],
)
def test_refused_by_status(embedded_server, verb, path, data, status):
    headers = {"Content-Type": "application/json"}
    answer = requests.request(
        verb, embedded_server.url + path, data=data, headers=headers, timeout=10
    )
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


def test_nothing_is_left_behind(embedded_server):
    settled(embedded_server)


def test_a_key_is_asked_for():
    with threaded_server(api_key="open sesame", context_length=64) as served:
        for headers in ({}, {"Authorization": "Bearer open"}):
            answer = requests.get(f"{served.url}/server_info", headers=headers, timeout=10)
            said = f"another API key than the server's, or none, is answered 401: {headers}"
            assert answer.status_code == 401, said
            assert answer.json()["error"]["type"] == "Unauthorized"
        assert requests.get(f"{served.url}/health", timeout=10).ok, "/health asks for no API key"
        status = requests.get(f"{served.url}/health_generate", timeout=10).status_code
        assert status == 401, f"/health_generate without the API key is answered 401, not {status}"
        assert served.client.generate([5, 6], 2).completion_tokens == 2
