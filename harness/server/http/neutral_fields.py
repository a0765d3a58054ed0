"""Neutral request fields: known, not implemented, accepted at the values that change nothing.

The fields are those of sglang 0.5.14 to 0.5.23 and of OpenAI. A row's values are JSON values; a
type among them stands for every value of it. Decoding is greedy, so no seed changes an answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

NeutralValues: TypeAlias = tuple[Any, ...]
NeutralFields: TypeAlias = Mapping[str, NeutralValues]

NOT_NEUTRAL = "not_neutral"
"""The type of pydantic's error; its context holds what is accepted."""
UNSET: NeutralValues = (None,)
EMPTY: NeutralValues = (None, [])
BLANK: NeutralValues = (None, "")
NO_MAP: NeutralValues = (None, {})
OFF: NeutralValues = (None, False)
ON: NeutralValues = (None, True)
ZERO: NeutralValues = (None, 0)
ONE: NeutralValues = (None, 1)
ANY_INTEGER: NeutralValues = (None, int)
ANY_TEXT: NeutralValues = (None, str)
ONLY_WORKER: NeutralValues = (None, 0)
WHOLE_VOCABULARY, GREEDY = (-1, 1 << 30), 1

DECODING: NeutralFields = {
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
SAMPLING: NeutralFields = {
    **DECODING,
    "beam_width": ONE,
    "json_schema": BLANK,
    "min_new_tokens": ZERO,
    "sampling_seed": ANY_INTEGER,
    "spaces_between_special_tokens": ON,
    "stream_interval": ONE,
    "structural_tag": BLANK,
}
ROUTING: NeutralFields = {
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
GENERATE: NeutralFields = {
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
OPENAI: NeutralFields = {
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
COMPLETION: NeutralFields = {
    **OPENAI,
    "best_of": ONE,
    "custom_labels": NO_MAP,
    "echo": OFF,
    "json_schema": BLANK,
    "logprobs": UNSET,
    "suffix": BLANK,
}
CHAT: NeutralFields = {
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
MESSAGE: NeutralFields = {
    "annotations": EMPTY,
    "audio": UNSET,
    "function_call": UNSET,
    "name": ANY_TEXT,
    "reasoning_content": BLANK,
    "refusal": UNSET,
    "tool_calls": EMPTY,
}
STREAM_OPTIONS: NeutralFields = {"continuous_usage_stats": OFF, "include_obfuscation": OFF}


def without_neutral(
    given: Mapping[str, Any], fields: NeutralFields, *, batched: bool, title: str
) -> dict[str, Any]:
    """A request body without its neutral fields.

    Args:
        given: names and values of the body.
        fields: which names are neutral, at which values.
        batched: whether a list of such values, one per prompt, is accepted too.
        title: the body's, for the error.

    Raises:
        ValidationError: of type ``NOT_NEUTRAL``; a field has any other value.
    """
    errors: list[InitErrorDetails] = []
    rest = {}
    for name, value in given.items():
        values = fields.get(name)
        if values is None:
            rest[name] = value
        elif not _is_neutral(value, values, batched=batched):
            error = PydanticCustomError(
                NOT_NEUTRAL, "accepted: {accepted}", {"accepted": _accepted(values)}
            )
            errors.append({"type": error, "loc": (name,), "input": value})
    if errors:
        raise ValidationError.from_exception_data(title, errors)
    return rest


def json_schemas(fields: NeutralFields, *, batched: bool) -> dict[str, Any]:
    """The JSON schema of each field."""
    return {name: _schema(values, batched=batched) for name, values in fields.items()}


def _schema(values: NeutralValues, *, batched: bool) -> dict[str, Any]:
    names = {str: "string", int: "integer"}
    forms: list[dict[str, Any]] = [
        {"type": names[value]} if isinstance(value, type) else {"enum": [value]} for value in values
    ]
    batch = [{"type": "array", "items": {"anyOf": forms}}] if batched else []
    return {"anyOf": forms + batch}


def _accepted(values: NeutralValues) -> str:
    words = {str: "any text", int: "any integer"}
    return ", ".join(
        words[value] if isinstance(value, type) else json.dumps(value) for value in values
    )


def _is_neutral(given: Any, values: NeutralValues, *, batched: bool) -> bool:
    each = given if batched and isinstance(given, list) and given not in values else [given]
    return all(any(_same(one, value) for value in values) for one in each)


def _same(given: Any, value: Any) -> bool:
    """As JSON values: to Python, true is 1."""
    if isinstance(value, type):
        return isinstance(given, value) and not isinstance(given, bool)
    return isinstance(given, bool) == isinstance(value, bool) and bool(given == value)
