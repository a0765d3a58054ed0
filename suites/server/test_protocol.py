"""What a request may say: the edges of its values, and what of it the engine is asked."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from harness.server.http.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerateRequest,
    SlowDownRequest,
    Strict,
)


def chat(*roles: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": "a"} for role in roles], **more}


@pytest.mark.parametrize(
    ("model", "accepted", "refused"),
    [
        (GenerateRequest, {"input_ids": [0]}, {"input_ids": [-1]}),
        (GenerateRequest, {"input_ids": [2**31 - 1]}, {"input_ids": [2**31]}),
        (GenerateRequest, {"input_ids": [[5]] * 64}, {"input_ids": [[5]] * 65}),
        (GenerateRequest, {"text": ["a"] * 64}, {"text": ["a"] * 65}),
        (GenerateRequest, {"text": "a" * 100_000}, {"text": "a" * 100_001}),
        (GenerateRequest, {"text": "a", "rid": "r" * 128}, {"text": "a", "rid": "r" * 129}),
        (GenerateRequest, {"text": "a", "rid": "r"}, {"text": "a", "rid": ""}),
        (CompletionRequest, {"prompt": ["a"] * 64}, {"prompt": ["a"] * 65}),
        (CompletionRequest, {"prompt": [[0]] * 64}, {"prompt": [[0]] * 65}),
        (CompletionRequest, {"prompt": "a", "max_tokens": 1}, {"prompt": "a", "max_tokens": 0}),
        (ChatCompletionRequest, chat("system", "developer", "assistant", "user"), chat("tool")),
        (ChatCompletionRequest, chat(*["user"] * 256), chat(*["user"] * 257)),
        (CompletionRequest, {"prompt": "a", "n": 1}, {"prompt": "a", "n": [1]}),
        (CompletionRequest, {"prompt": "a", "seed": 7}, {"prompt": "a", "seed": True}),
        (CompletionRequest, {"prompt": "a", "user": "u"}, {"prompt": "a", "user": 7}),
        (SlowDownRequest, {"forward_sleep_time": 1.0}, {"forward_sleep_time": 1.01}),
        (SlowDownRequest, {"forward_sleep_time": 0.0}, {"forward_sleep_time": -0.01}),
        (SlowDownRequest, {"forward_sleep_time": None}, {}),
        (ChatCompletionRequest, chat("user", max_tokens=1), chat("user", max_tokens=0)),
    ],
)
def test_a_value_is_accepted_up_to_its_edge(
    model: type[Strict], accepted: dict[str, Any], refused: dict[str, Any]
) -> None:
    model.model_validate(accepted)
    with pytest.raises(ValidationError):
        model.model_validate(refused)


@pytest.mark.parametrize(
    ("options", "includes"),
    [
        (None, False),
        ({}, False),
        ({"include_usage": False}, False),
        ({"include_usage": True}, True),
    ],
)
def test_a_stream_ends_with_counts_only_where_asked(
    options: dict[str, bool] | None, includes: bool
) -> None:
    asked = {"prompt": "a", "stream": True, "stream_options": options}
    assert CompletionRequest.model_validate(asked).includes_usage is includes


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({}, "max_tokens"),
        ({"max_tokens": 9}, "max_tokens"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"max_tokens": 9, "max_completion_tokens": 5}, "max_completion_tokens"),
    ],
)
def test_a_limit_that_does_not_fit_is_refused_by_the_name_of_the_one_that_holds(
    limits: dict[str, int], field: str
) -> None:
    found = ChatCompletionRequest.model_validate(chat("user", **limits)).to_input()
    assert found.limit_field == field
    assert found.max_new_tokens == limits.get(field)


def test_a_completion_is_sixteen_tokens_where_nothing_is_said() -> None:
    assert CompletionRequest.model_validate({"prompt": "a"}).to_input().max_new_tokens == 16
