"""Known request fields that are not carried out, and the values of each that change nothing.

The fields are those of sglang 0.5.14 to 0.5.23 and of OpenAI. A row's values are JSON values; a
type among them stands for every value of it. Decoding is greedy, so no seed changes an answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, PlainValidator, WithJsonSchema, create_model
from pydantic_core import PydanticCustomError

Values: TypeAlias = tuple[Any, ...]
Table: TypeAlias = Mapping[str, Values]
Model = TypeVar("Model", bound=type[BaseModel])

NOT_NEUTRAL = "not_neutral"
"""The type of pydantic's error; its context says what is accepted."""
UNSET: Values = (None,)
EMPTY: Values = (None, [])
BLANK: Values = (None, "")
NO_MAP: Values = (None, {})
OFF: Values = (None, False)
ON: Values = (None, True)
ZERO: Values = (None, 0)
ONE: Values = (None, 1)
ANY_INTEGER: Values = (None, int)
ANY_TEXT: Values = (None, str)
ONLY_WORKER: Values = (None, 0)
WHOLE_VOCABULARY, GREEDY = (-1, 1 << 30), 1

DECODING: Table = {
    "temperature": ZERO,
    "top_p": ONE,
    "top_k": (None, *WHOLE_VOCABULARY, GREEDY),
    "min_p": ZERO,
    "frequency_penalty": ZERO,
    "presence_penalty": ZERO,
    "repetition_penalty": ONE,
    "n": ONE,
    "stop": (*EMPTY, ""),
    "stop_token_ids": EMPTY,
    "stop_regex": (*EMPTY, ""),
    "no_stop_trim": OFF,
    "regex": BLANK,
    "ebnf": BLANK,
    "skip_special_tokens": ON,
    "logit_bias": NO_MAP,
    "custom_params": NO_MAP,
    "watermark": UNSET,
}
SAMPLING: Table = {
    **DECODING,
    "beam_width": ONE,
    "json_schema": BLANK,
    "min_new_tokens": ZERO,
    "sampling_seed": ANY_INTEGER,
    "spaces_between_special_tokens": ON,
    "stream_interval": ONE,
    "structural_tag": BLANK,
}
ROUTING: Table = {
    "bootstrap_host": UNSET,
    "bootstrap_port": UNSET,
    "bootstrap_room": UNSET,
    "cache_salt": BLANK,
    "custom_logit_processor": UNSET,
    "data_parallel_rank": ONLY_WORKER,
    "disagg_prefill_dp_rank": UNSET,
    "extra_key": BLANK,
    "images_config": UNSET,
    "lora_path": UNSET,
    "mm_processor_kwargs": UNSET,
    "priority": UNSET,
    "return_hidden_states": OFF,
    "return_routed_experts": OFF,
    "routed_dp_rank": ONLY_WORKER,
    "routed_experts_start_len": ZERO,
    "session_id": UNSET,
    "session_params": UNSET,
}
GENERATE: Table = {
    **ROUTING,
    "audio_data": EMPTY,
    "background": OFF,
    "bootstrap_pair_key": UNSET,
    "conversation_id": ANY_TEXT,
    "custom_labels": NO_MAP,
    "decode_tp_size": UNSET,
    "encoder_urls": UNSET,
    "external_trace_header": UNSET,
    "http_worker_ipc": UNSET,
    "image_data": EMPTY,
    "image_max_dynamic_patch": UNSET,
    "input_embeds": UNSET,
    "kv_hints": UNSET,
    "log_metrics": ON,
    "logprob_start_len": (None, -1, 0),
    "lora_id": UNSET,
    "max_dynamic_patch": UNSET,
    "max_thinking_tokens": UNSET,
    "min_dynamic_patch": UNSET,
    "mm_content_hashes": EMPTY,
    "mm_data_mooncake": UNSET,
    "mm_hashes": EMPTY,
    "modalities": EMPTY,
    "multi_item_delimiter_indices": UNSET,
    "need_wait_for_mm_inputs": OFF,
    "no_logs": (None, False, True),
    "num_items_assigned": UNSET,
    "positional_embed_overrides": UNSET,
    "received_time": UNSET,
    "require_reasoning": OFF,
    "return_bytes": OFF,
    "return_entropy": OFF,
    "return_flat_raw_output_top_logprobs": OFF,
    "return_flat_raw_top_logprobs": OFF,
    "return_flat_raw_top_logprobs_b64": OFF,
    "return_indexer_topk": OFF,
    "return_logprob": OFF,
    "return_prompt_token_ids": OFF,
    "return_sampling_mask": OFF,
    "return_text_in_logprobs": OFF,
    "routing_key": ANY_TEXT,
    "sampling_logprobs_mode": UNSET,
    "token_ids_logprob": EMPTY,
    "token_indices_to_pool": UNSET,
    "top_logprobs_num": ZERO,
    "use_audio_in_video": OFF,
    "video_config": UNSET,
    "video_data": EMPTY,
    "video_max_dynamic_patch": UNSET,
    "watermark": UNSET,
}
OPENAI: Table = {
    **DECODING,
    **ROUTING,
    "metadata": NO_MAP,
    "min_tokens": ZERO,
    "model": ANY_TEXT,
    "response_format": (None, {"type": "text"}),
    "return_cached_tokens_details": OFF,
    "return_spec_tokens_details": OFF,
    "return_token_ids": OFF,
    "rid": UNSET,
    "seed": ANY_INTEGER,
    "user": ANY_TEXT,
}
COMPLETION: Table = {
    **OPENAI,
    "best_of": ONE,
    "custom_labels": NO_MAP,
    "echo": OFF,
    "json_schema": BLANK,
    "logprobs": UNSET,
    "suffix": BLANK,
}
CHAT: Table = {
    **OPENAI,
    "chat_template_kwargs": NO_MAP,
    "continue_final_message": OFF,
    "input_ids": UNSET,
    "logprobs": OFF,
    "max_dynamic_patch": UNSET,
    "min_dynamic_patch": UNSET,
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, False, True),
    "reasoning_effort": UNSET,
    "return_flat_raw_output_top_logprobs": OFF,
    "return_flat_raw_top_logprobs_b64": (None, False, True),
    "return_input_ids_in_sglext": OFF,
    "return_meta_info": OFF,
    "return_output_ids_in_sglext": OFF,
    "return_prompt_token_ids": OFF,
    "return_sampling_mask": OFF,
    "sampling_logprobs_mode": UNSET,
    "separate_reasoning": (None, False, True),
    "store": OFF,
    "stream_reasoning": (None, False, True),
    "task": UNSET,
    "thinking": UNSET,
    "tool_choice": (None, "none", "auto"),
    "tools": EMPTY,
    "top_logprobs": ZERO,
    "use_audio_in_video": OFF,
    "video_config": UNSET,
}
MESSAGE: Table = {
    "annotations": EMPTY,
    "audio": UNSET,
    "function_call": UNSET,
    "name": ANY_TEXT,
    "reasoning_content": BLANK,
    "refusal": UNSET,
    "tool_calls": EMPTY,
}
STREAM_OPTIONS: Table = {"continuous_usage_stats": OFF, "include_obfuscation": OFF}


def accepting(table: Table, *, batched: bool = False) -> Callable[[Model], Model]:
    """Give a model the fields of a table; any other value is an error of type ``NOT_NEUTRAL``.

    Args:
        table: names and the values that change nothing.
        batched: whether a list of such values, one for each prompt, is accepted too.
    """

    def extend(model: Model) -> Model:
        fields: dict[str, Any] = {
            name: (_only(values, batched=batched), None) for name, values in table.items()
        }
        return create_model(  # type: ignore[return-value]
            model.__name__,
            __base__=model,
            __module__=model.__module__,
            __doc__=model.__doc__,
            **fields,
        )

    return extend


def _only(values: Values, *, batched: bool) -> Any:
    """A type of which only these values are."""
    schema: dict[str, Any] = {"anyOf": [_schema(value) for value in values]}
    if batched:
        schema["anyOf"].append({"type": "array", "items": {"anyOf": [*schema["anyOf"]]}})
    check = PlainValidator(partial(_checked, values=values, batched=batched))
    return Annotated[Any, check, WithJsonSchema(schema)]


def _checked(given: Any, *, values: Values, batched: bool) -> Any:
    each = given if batched and isinstance(given, list) and given not in values else [given]
    if all(any(_same(one, value) for value in values) for one in each):
        return given
    words = {str: "any text", int: "any integer"}
    accepted = ", ".join(
        words[value] if isinstance(value, type) else json.dumps(value) for value in values
    )
    raise PydanticCustomError(NOT_NEUTRAL, "accepted: {accepted}", {"accepted": accepted})


def _same(given: Any, value: Any) -> bool:
    """As JSON values: to Python, true is 1."""
    if isinstance(value, type):
        return isinstance(given, value) and not isinstance(given, bool)
    return isinstance(given, bool) == isinstance(value, bool) and bool(given == value)


def _schema(value: Any) -> dict[str, Any]:
    names = {str: "string", int: "integer"}
    return {"type": names[value]} if isinstance(value, type) else {"enum": [value]}
