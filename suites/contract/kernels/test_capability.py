"""A capability refuses a row for the first of its limits that the row is beyond, or for the GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.core.capability import (
    FLASH_MLA,
    REFERENCE,
    TRTLLM_GEN_MHA,
    TRTLLM_GEN_MLA,
    XQA,
    Capability,
    refusal,
)
from harness.core.case import Case, Dtype, Family, KVDtype, Mode

MHA = Case(id="mha", family=Family.MHA, mode=Mode.DECODE, prefix_lens=(5, 9), page_size=64)
VERIFY = replace(MHA, mode=Mode.TARGET_VERIFY)
CATCH_UP = replace(MHA, mode=Mode.DRAFT_EXTEND_V2, accept_lens=(1, 3))
MLA = replace(MHA, family=Family.MLA, kv_lora_rank=512, qk_rope_head_dim=64, num_kv_heads=1)
HALVES = "['bfloat16', 'float16']"
ROWS: tuple[tuple[Capability, Case, str | None], ...] = (
    (REFERENCE, replace(MHA, head_dim=7, page_size=5), None),
    (XQA, MHA, None),
    (XQA, MLA, "refuses family mla: accepts ['mha']"),
    (XQA, replace(MHA, head_dim=80), "refuses head_dim 80: accepts ['128', '256', '64']"),
    (XQA, replace(MHA, page_size=8), "refuses page_size 8: accepts ['128', '16', '32', '64']"),
    (XQA, replace(MHA, dtype=Dtype.FP32), f"refuses dtype float32: accepts {HALVES}"),
    (XQA, replace(MHA, num_q_heads=66), "refuses group_size 33: accepts <= 32"),
    (XQA, replace(MHA, num_q_heads=64, head_dim=256), None),
    (XQA, replace(MHA, num_q_heads=60, head_dim=256, kv_dtype=KVDtype.FP8), None),
    (
        XQA,
        replace(MHA, num_q_heads=62, head_dim=256, kv_dtype=KVDtype.FP8),
        "refuses group_size * head_dim 7936: accepts <= 7680 over an FP8 cache",
    ),
    (XQA, replace(VERIFY, num_draft_tokens=17), "refuses q_len 17: accepts <= 16"),
    (XQA, replace(CATCH_UP, num_draft_tokens=17), "refuses q_len 17: accepts <= 16"),
    # The steps of a draft are calls of one query token each; ragged queries have no such limit.
    (XQA, replace(MHA, mode=Mode.MULTI_STEP_DRAFT, num_steps=19, window_left=8), None),
    (XQA, replace(MHA, mode=Mode.EXTEND, extend_lens=(40, 3), window_left=8), None),
    (XQA, replace(MHA, window_left=8), None),
    (
        XQA,
        replace(VERIFY, window_left=8),
        "refuses window_left 8: accepts -1 where a request has more than 1 query tokens",
    ),
    # Its own key alone is a window, too.
    (
        XQA,
        replace(VERIFY, window_left=0),
        "refuses window_left 0: accepts -1 where a request has more than 1 query tokens",
    ),
    (TRTLLM_GEN_MHA, replace(VERIFY, window_left=8), None),
    (
        replace(XQA, window=False),
        replace(MHA, window_left=8),
        "refuses window_left 8: accepts -1",
    ),
    (replace(XQA, sinks=False), replace(MHA, sinks=True), "refuses sinks True: accepts False"),
    (FLASH_MLA, MLA, None),
    (
        FLASH_MLA,
        replace(MLA, kv_lora_rank=256),
        "refuses kv_lora_rank, qk_rope_head_dim (256, 64): accepts ['(512, 64)']",
    ),
    (TRTLLM_GEN_MLA, replace(MLA, kv_lora_rank=256), None),
    (
        FLASH_MLA,
        replace(MLA, kv_dtype=KVDtype.FP8),
        "refuses kv_dtype float8_e4m3fn: accepts ['auto']",
    ),
)


@pytest.mark.parametrize(("capability", "case", "text"), ROWS)
def test_limits(capability: Capability, case: Case, text: str | None) -> None:
    assert refusal(case, capability) == (text and f"{capability.name} {text}")


@pytest.mark.parametrize(
    ("capability", "gpu", "text"),
    [
        (XQA, (9, 0), None),
        (XQA, (12, 1), None),
        (REFERENCE, (7, 5), None),
        (TRTLLM_GEN_MHA, None, None),
        (
            TRTLLM_GEN_MHA,
            (9, 0),
            "trtllm_gen needs compute capability 10.0 or 10.3, this device has 9.0",
        ),
    ],
)
def test_a_gpu_comes_before_every_limit(
    capability: Capability, gpu: tuple[int, int] | None, text: str | None
) -> None:
    assert refusal(MHA, capability, gpu) == text
    if text is not None:
        assert refusal(replace(MHA, head_dim=80), capability, gpu) == text
