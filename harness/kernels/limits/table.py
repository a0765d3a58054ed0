"""Probe rows of ``limits``: calls within and beyond every field of the capabilities."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from harness.core.capability import (
    FLASH_MLA,
    TRTLLM_GEN_MHA,
    TRTLLM_GEN_MLA,
    XQA,
    Capability,
)
from harness.core.case import Dtype, KVDtype
from harness.core.numerics import LARGE
from harness.kernels.limits.random_calls import Shape


@dataclass(frozen=True)
class LimitProbe:
    """One call.

    Args:
        capability: of the kernel asked.
        what: the field and its value.
        is_within: whether the table says that the kernel serves it.
        shape: of the call.
    """

    capability: Capability
    what: str
    is_within: bool
    shape: Shape


FP16, FP32, FP8_KV = {"dtype": Dtype.FP16}, {"dtype": Dtype.FP32}, {"kv_dtype": KVDtype.FP8}
FP8_QUERY = {"fp8_query": True}
WINDOWED, SINKS = {"window_left": 20}, {"sinks": True}
NAN = {"poison": float("nan")}
WIDE = {"head_dim": 256}
CONTEXT = {"entry": "context", "q_len": 37}
MLA_DECODE, MLA_CONTEXT = {"entry": "mla_decode"}, {"entry": "mla_context", "q_len": 37}
LimitRow = tuple[str, dict[str, Any]]

MHA_WITHIN: tuple[LimitRow, ...] = (
    ("head_dim 64", {}),
    ("head_dim 128", {"head_dim": 128}),
    ("head_dim 256", {"head_dim": 256}),
    ("page_size 16", {"page_size": 16}),
    ("page_size 32", {"page_size": 32}),
    ("dtype float16", FP16),
    ("group_size 1", {"heads": 2}),
    ("kv_heads 1", {"kv_heads": 1}),
    ("sinks", SINKS),
    ("sinks, window_left 20", SINKS | WINDOWED),
    ("q_len 2", {"q_len": 2}),
    ("q_len 4", {"q_len": 4}),
    ("q_len 4, sinks", {"q_len": 4} | SINKS),
    ("q_len 8", {"q_len": 8}),
    ("q_len 16", {"q_len": 16}),
    ("window_left 20", WINDOWED),
    ("bmm2_scale 3", {"bmm2_scale": 3.0}),
    ("NaN in unread slots", NAN),
    ("NaN in unread slots, q_len 4", NAN | {"q_len": 4}),
    ("context", CONTEXT),
    ("context, head_dim 128", CONTEXT | {"head_dim": 128}),
    ("context, window_left 20", CONTEXT | WINDOWED),
    ("context, sinks", CONTEXT | SINKS),
    ("context, NaN in unread slots", CONTEXT | NAN),
)
MHA_BEYOND: tuple[LimitRow, ...] = (
    ("head_dim 80", {"head_dim": 80}),
    ("head_dim 512", {"head_dim": 512}),
    ("page_size 8", {"page_size": 8}),
    ("page_size 256", {"page_size": 256}),
    ("dtype float32", FP32),
    ("q_len 17", {"q_len": 17}),
)
MLA_WITHIN: tuple[LimitRow, ...] = (
    ("mla_dims 512, 64", {}),
    ("group_size 1", {"heads": 1}),
    ("group_size 128", {"heads": 128}),
    ("q_len 2", {"q_len": 2}),
    ("q_len 4", {"q_len": 4}),
    ("q_len 8", {"q_len": 8}),
    ("q_len 16", {"q_len": 16}),
    ("bmm2_scale 3", {"bmm2_scale": 3.0}),
    ("NaN in unread slots", NAN),
    ("NaN in unread slots, q_len 4", NAN | {"q_len": 4}),
    ("context", MLA_CONTEXT),
    ("context, NaN in unread slots", MLA_CONTEXT | NAN),
)
MLA_BEYOND: tuple[LimitRow, ...] = (
    ("mla_dims 64, 16", {"mla_dims": (64, 16)}),
    ("page_size 16", {"page_size": 16}),
    ("page_size 128", {"page_size": 128}),
    ("dtype float32", FP32),
    ("q_len 17", {"q_len": 17}),
)
TABLE: tuple[tuple[Capability, dict[str, Any], bool, tuple[LimitRow, ...]], ...] = (
    (XQA, {"entry": "decode"}, True, MHA_WITHIN),
    (
        XQA,
        {"entry": "decode"},
        True,
        (
            ("page_size 128", {"page_size": 128}),
            ("group_size 32, head_dim 256", {"heads": 64, "head_dim": 256}),
            ("kv_dtype float8_e4m3fn", FP8_KV),
            ("kv_dtype float8_e4m3fn, q_len 4", FP8_KV | {"q_len": 4}),
            ("kv_dtype float8_e4m3fn, q_len 16", FP8_KV | {"q_len": 16}),
            ("kv_dtype float8_e4m3fn, q_len 4, sinks", FP8_KV | SINKS | {"q_len": 4}),
            ("kv_dtype float8_e4m3fn, window_left 20", FP8_KV | WINDOWED),
            ("kv_dtype float8_e4m3fn, bmm2_scale 3", FP8_KV | {"bmm2_scale": 3.0}),
            ("kv_dtype float8_e4m3fn, 400 in unread slots", FP8_KV | {"poison": LARGE}),
            ("kv_dtype float8_e4m3fn, context", FP8_KV | CONTEXT),
            ("kv_dtype float8_e4m3fn, group_size 30, head_dim 256", FP8_KV | WIDE | {"heads": 60}),
        ),
    ),
    (XQA, {"entry": "decode"}, False, MHA_BEYOND),
    (
        XQA,
        {"entry": "decode"},
        False,
        (
            ("group_size 64, head_dim 256", {"heads": 128, "head_dim": 256}),
            ("kv_dtype float8_e4m3fn, group_size 31, head_dim 256", FP8_KV | WIDE | {"heads": 62}),
            ("kv_dtype float8_e4m3fn, group_size 32, head_dim 256", FP8_KV | WIDE | {"heads": 64}),
            ("window_left 20, q_len 4", {"q_len": 4} | WINDOWED),
            ("packed_mask None, q_len 4", {"q_len": 4, "masked": False}),
            ("query float8_e4m3fn", FP8_KV | FP8_QUERY),
        ),
    ),
    (FLASH_MLA, MLA_DECODE, True, MLA_WITHIN),
    (FLASH_MLA, MLA_DECODE, True, (("dtype float16", FP16),)),
    (FLASH_MLA, MLA_DECODE, False, MLA_BEYOND),
    (
        FLASH_MLA,
        MLA_DECODE,
        False,
        (
            ("mla_dims 256, 64", {"mla_dims": (256, 64)}),
            ("page_size 32", {"page_size": 32}),
            ("kv_dtype float8_e4m3fn", FP8_KV),
        ),
    ),
    (TRTLLM_GEN_MHA, {"entry": "decode"}, True, MHA_WITHIN),
    (
        TRTLLM_GEN_MHA,
        {"entry": "decode"},
        True,
        (("kv_dtype float8_e4m3fn", FP8_KV | FP8_QUERY),),
    ),
    (TRTLLM_GEN_MHA, {"entry": "decode"}, False, MHA_BEYOND),
    (TRTLLM_GEN_MHA, {"entry": "decode"}, False, (("page_size 128", {"page_size": 128}),)),
    (TRTLLM_GEN_MLA, MLA_DECODE, True, MLA_WITHIN),
    (TRTLLM_GEN_MLA, MLA_DECODE, True, (("kv_dtype float8_e4m3fn", FP8_KV | FP8_QUERY),)),
    (TRTLLM_GEN_MLA, MLA_DECODE, False, (*MLA_BEYOND, ("dtype float16", FP16))),
)


def probes(capabilities: tuple[Capability, ...]) -> tuple[LimitProbe, ...]:
    """The probes of these kernels, in the table's order."""
    return tuple(
        LimitProbe(capability, what, is_within, replace(Shape(**base), **changes))
        for capability, base, is_within, rows in TABLE
        if capability in capabilities
        for what, changes in rows
    )
