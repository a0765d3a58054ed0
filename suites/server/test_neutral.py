"""A neutral field is accepted at a value that changes nothing and refused by name at another."""

from __future__ import annotations

import json

import pytest
import requests
from pydantic import ValidationError

from harness.server.http import neutral_fields, protocol

PROMPT = {"input_ids": [5, 6, 7]}
FEW = {"max_new_tokens": 4, "ignore_eos": True}
SEND_ONE = PROMPT | {
    "image_data": None,
    "sampling_params": FEW
    | {
        "sampling_seed": None,
        "temperature": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "json_schema": None,
        "stop": None,
    },
    "return_logprob": False,
    "stream": False,
}
BENCH_SERVING = PROMPT | {
    "sampling_params": FEW | {"temperature": 0.0},
    "stream": False,
    "lora_path": None,
    "return_logprob": False,
    "return_routed_experts": False,
    "logprob_start_len": -1,
}
MODELS = {
    "generate": (protocol.GenerateRequest, neutral_fields.GENERATE, {"text": "def"}),
    "sampling": (protocol.SamplingParams, neutral_fields.SAMPLING, {}),
    "completion": (protocol.CompletionRequest, neutral_fields.COMPLETION, {"prompt": "def"}),
    "chat": (
        protocol.ChatCompletionRequest,
        neutral_fields.CHAT,
        {"messages": [{"role": "user", "content": "def"}]},
    ),
    "message": (protocol.Message, neutral_fields.MESSAGE, {"role": "user", "content": "def"}),
    "stream_options": (protocol.StreamOptions, neutral_fields.STREAM_OPTIONS, {}),
}
ROWS = [
    pytest.param(model, least, name, values, id=f"{kind}-{name}")
    for kind, (model, table, least) in MODELS.items()
    for name, values in table.items()
]
ANY = ((str, "any"), (int, 7))


@pytest.mark.parametrize(("model", "least", "name", "values"), ROWS)
def test_every_row_takes_its_values_and_no_other(model, least, name, values):
    for value in values:
        [given] = [example for kind, example in ANY if value is kind] or [value]
        model.model_validate({**least, name: given})
    for other in ("unheard-of", 0.37, {"un": "known"}):
        if isinstance(other, str) and str in values:
            continue
        with pytest.raises(ValidationError) as refused:
            model.model_validate({**least, name: other})
        [error] = refused.value.errors()
        assert (error["type"], error["loc"][-1]) == (neutral_fields.NOT_NEUTRAL, name)


def test_every_field_at_another_value_is_named():
    others = {"lora_path": "a", "log_metrics": True, "return_logprob": True}
    with pytest.raises(ValidationError) as refused:
        protocol.GenerateRequest.model_validate({"text": "def"} | others)
    found = [error["loc"][-1] for error in refused.value.errors()]
    told = "who mends what one refusal names is not refused again for another field"
    assert found == ["lora_path", "return_logprob"], told


def test_a_field_that_takes_the_number_0_refuses_false():
    with pytest.raises(ValidationError) as refused:
        protocol.GenerateRequest.model_validate({"text": "def", "top_logprobs_num": False})
    [error] = refused.value.errors()
    assert (error["type"], error["loc"][-1]) == (neutral_fields.NOT_NEUTRAL, "top_logprobs_num")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"lora_path": "a"}, "lora_path = 'a' is not accepted; accepted: null"),
        ({"return_logprob": True}, "return_logprob = True is not accepted; accepted: null, false"),
        # To Python, true is 1 and false is 0.
        ({"return_logprob": 0}, "return_logprob = 0 is not accepted; accepted: null, false"),
        (
            {"top_logprobs_num": False},
            "top_logprobs_num = False is not accepted; accepted: null, 0",
        ),
        ({"image_data": ["a"]}, "image_data = ['a'] is not accepted; accepted: null, []"),
        ({"return_logprob": [False, True]}, "return_logprob = [False, True] is not accepted; "),
        ({"topk": None}, "topk = None is not accepted"),
    ],
    ids=json.dumps,
)
def test_another_value_is_refused_in_one_line(embedded_server, body, message):
    answer = requests.post(f"{embedded_server.url}/generate", json=PROMPT | body, timeout=10)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, next(iter(body)))
    assert error["message"].startswith(message)
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        SEND_ONE,
        BENCH_SERVING,
        PROMPT | {"sampling_params": FEW, "image_data": [], "stream": False},
        PROMPT | {"sampling_params": FEW | {"stop": [], "top_k": -1, "top_p": 1.0, "n": 1}},
        {"input_ids": [[5, 6, 7]], "sampling_params": FEW, "lora_path": [None]},
    ],
    ids=["send_one", "bench_serving", "no_images", "no_stops", "batch"],
)
def test_what_changes_nothing_changes_no_answer(embedded_server, body):
    found = requests.post(f"{embedded_server.url}/generate", json=body, timeout=30).json()
    found = found[0] if isinstance(found, list) else found
    assert tuple(found["output_ids"]) == embedded_server.client.generate([5, 6, 7], 4).output_ids


def test_no_parameters_are_the_usual_ones(embedded_server):
    answer = requests.post(
        f"{embedded_server.url}/generate", json=PROMPT | {"sampling_params": None}, timeout=60
    ).json()
    expected = embedded_server.client.generate([5, 6, 7], 128, ignore_eos=False)
    assert tuple(answer["output_ids"]) == expected.output_ids
