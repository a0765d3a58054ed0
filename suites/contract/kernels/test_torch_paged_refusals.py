"""The reference kernel refuses, before launch, whatever the kernel it stands in for refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.attention.metadata import packed_causal_mask
from harness.core.capability import (
    FLASH_MLA,
    REFERENCE,
    SGLANG_CAPABILITIES,
    TRTLLM_GEN_MHA,
    TRTLLM_GEN_MLA,
    XQA,
    Capability,
)
from harness.core.case import Family
from harness.errors import KernelRefusal
from harness.kernels import checked
from harness.kernels.interface import ContextCall, DecodeCall
from harness.kernels.reference import TorchPaged

FP8 = torch.float8_e4m3fn
Arguments = dict[str, Any]
Change = Callable[[Arguments], Arguments]


def int32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def decode_call() -> Arguments:
    """Two requests of 20 and 5 keys, two queries each, accepted by every MHA kernel."""
    cache = torch.zeros(6, 16, 2, 64, dtype=torch.bfloat16)
    return {
        "q": torch.zeros(4, 8, 64, dtype=torch.bfloat16),
        "caches": (cache, cache),
        "block_tables": int32([3, 1], [5, 0]),
        "seq_lens": int32(20, 5),
        "q_len_per_req": 2,
        "max_seq_len": 32,
        "bmm1_scale": 1.0,
        "bmm2_scale": 1.0,
        "out_dtype": torch.bfloat16,
        "packed_mask": packed_causal_mask(2, 2, "cpu"),
    }


def context_call() -> Arguments:
    call = decode_call()
    for name in ("q_len_per_req", "packed_mask"):
        del call[name]
    cut = {"cu_seqlens_q": int32(0, 1, 4), "cu_seqlens_k": int32(0, 20, 25)}
    return call | cut | {"max_q_len": 3}


def mla_call() -> Arguments:
    """Two requests on pages of 64, whose table is two pages wide as trtllm-gen wants it."""
    return {
        "q": torch.zeros(4, 8, 576, dtype=torch.bfloat16),
        "caches": (torch.zeros(6, 64, 576, dtype=torch.bfloat16),),
        "kv_lora_rank": 512,
        "block_tables": int32([3, 1], [5, 0]),
        "seq_lens": int32(70, 5),
        "q_len_per_req": 2,
        "max_seq_len": 128,
        "bmm1_scale": 1.0,
        "bmm2_scale": 1.0,
        "out_dtype": torch.bfloat16,
    }


def fp8_cache(call: Arguments) -> Arguments:
    return {"caches": tuple(cache.to(FP8) for cache in call["caches"])}


def page_size_8(call: Arguments) -> Arguments:
    cache = torch.zeros(12, 8, 2, 64, dtype=torch.bfloat16)
    return {"caches": (cache, cache)}


def many_heads(call: Arguments) -> Arguments:
    return {"q": torch.zeros(4, 130, 64, dtype=torch.bfloat16)}


def many_wide_heads(call: Arguments) -> Arguments:
    cache = torch.zeros(6, 16, 2, 256).to(FP8)
    return {"q": torch.zeros(4, 64, 256, dtype=torch.bfloat16), "caches": (cache, cache)}


def head_dim_80(call: Arguments) -> Arguments:
    cache = torch.zeros(6, 16, 2, 80, dtype=torch.bfloat16)
    q = torch.zeros(4, 8, 80, dtype=torch.bfloat16)
    return {"q": q, "caches": (cache, cache)}


def head_dim_80_of_keys_alone(call: Arguments) -> Arguments:
    given = head_dim_80(call)
    return given | {"caches": (given["caches"][0], call["caches"][1])}


def strided_query(call: Arguments) -> Arguments:
    return {"q": torch.zeros(4, 8, 128, dtype=torch.bfloat16)[..., :64]}


def other(name: str, **how: Any) -> Change:
    """The named tensor in another dtype, or cut."""

    def change(call: Arguments) -> Arguments:
        return {name: altered(call[name], **how)}

    return change


def other_cache(index: int, **how: Any) -> Change:
    """One of the caches in another dtype, or cut."""

    def change(call: Arguments) -> Arguments:
        caches = list(call["caches"])
        caches[index] = altered(caches[index], **how)
        return {"caches": tuple(caches)}

    return change


def altered(tensor: torch.Tensor, **how: Any) -> torch.Tensor:
    tensor = tensor[how["cut"]] if "cut" in how else tensor
    return tensor.to(how.get("dtype", tensor.dtype))


def one_value_head(call: Arguments) -> Arguments:
    keys, values = call["caches"]
    return {"caches": (keys, values[:, :, :1].contiguous())}


def given(**values: Any) -> Change:
    return lambda call: values


def float32_query(call: Arguments) -> Arguments:
    return {"q": call["q"].float(), "caches": tuple(cache.float() for cache in call["caches"])}


NO_WINDOW = replace(REFERENCE, name="plain", window=False, sinks=False)
SINKS = torch.zeros(8)
T = slice(None)
DECODE_ROWS: tuple[tuple[Capability, Change, str], ...] = (
    (FLASH_MLA, given(), r"family = 'mha'"),
    (XQA, strided_query, r"q.stride = .* contiguous query"),
    (XQA, other("q", cut=0), r"q.dim = 2"),
    (XQA, other("q", cut=slice(0, 3)), r"q rows = 3 .* 4 = 2 rows of block_tables x 2"),
    (XQA, other("q", dtype=FP8), r"q.dtype = torch.float8_e4m3fn"),
    (XQA, float32_query, r"q.dtype = torch.float32"),
    (XQA, other("q", dtype=torch.float16), r"k_cache.dtype = torch.bfloat16"),
    (XQA, lambda c: fp8_cache(c) | other("q", dtype=FP8)(c), r"q.dtype .* with an FP8 cache"),
    (TRTLLM_GEN_MHA, fp8_cache, r"q.dtype = torch.bfloat16 .* with an FP8 cache"),
    (replace(XQA, kv_dtypes=FLASH_MLA.kv_dtypes), fp8_cache, r"k_cache.dtype = .*float8"),
    (XQA, other_cache(0, cut=0), r"cache.dim = 3"),
    (XQA, other_cache(1, cut=slice(0, 5)), r"v_cache.shape = \(5, 16, 2, 64\) .* \(6, 16, 2\) "),
    (XQA, one_value_head, r"v_cache.shape = \(6, 16, 1, 64\)"),
    (XQA, other_cache(1, dtype=torch.float16), r"v_cache.dtype = torch.float16"),
    (XQA, other_cache(0, cut=(T, slice(0, 8))), r"cache.stride"),
    (XQA, page_size_8, r"page_size = 8 .* \[16, 32, 64, 128\] on xqa"),
    (XQA, head_dim_80, r"q.head_dim = 80 .* \[64, 128, 256\] on xqa"),
    (XQA, head_dim_80_of_keys_alone, r"q.head_dim = 80 .* \[64, 128, 256\] on xqa"),
    (XQA, other("q", cut=(T, T, slice(0, 32))), r"q.stride"),
    (REFERENCE, given(q=torch.zeros(4, 8, 32, dtype=torch.bfloat16)), r"q.head_dim = 32 .* 64"),
    (REFERENCE, given(q=torch.zeros(4, 7, 64, dtype=torch.bfloat16)), r"q.heads = 7"),
    (XQA, many_heads, r"group_size = 65 .* <= 32 on xqa"),
    (XQA, many_wide_heads, r"group_size \* q.head_dim = 8192 .* <= 7680 on xqa with an FP8 cache"),
    (XQA, given(window_left=8), r"window_left = 8 .* -1 on xqa where q_len_per_req > 1"),
    (XQA, given(q_len_per_req=0), r"q_len_per_req = 0 .* 1 … 16"),
    (XQA, given(q_len_per_req=17), r"q_len_per_req = 17 .* 1 … 16"),
    (XQA, given(packed_mask=None), r"packed_mask = None .* q_len_per_req = 2"),
    (XQA, other("packed_mask", dtype=torch.int32), r"packed_mask.dtype = torch.int32"),
    (XQA, other("packed_mask", cut=slice(0, 1)), r"packed_mask.shape = \(1, 2, 2\)"),
    (
        XQA,
        given(packed_mask=packed_causal_mask(2, 33, "cpu")[:, :2, :2]),
        r"packed_mask.stride",
    ),
    (XQA, other("seq_lens", dtype=torch.int64), r"seq_lens.dtype = torch.int64 .* torch.int32"),
    (XQA, other("seq_lens", cut=None), r"seq_lens.dim = 2"),
    (XQA, other("seq_lens", cut=slice(0, 1)), r"seq_lens rows = 1 .* 2, the rows"),
    (XQA, other("block_tables", dtype=torch.int64), r"block_tables.dtype = torch.int64"),
    (XQA, other("block_tables", cut=(T, slice(0, 1))), r"block_tables.stride"),
    (XQA, given(block_tables=int32([], [])), r"block_tables width = 0"),
    (XQA, given(out_dtype=torch.float32), r"out_dtype = torch.float32"),
    (REFERENCE, given(window_left=-2), r"window_left = -2"),
    (NO_WINDOW, given(window_left=0), r"window_left = 0 .* -1 on plain"),
    (NO_WINDOW, given(sinks=SINKS), r"sinks = \(8,\) .* None on plain"),
    (XQA, given(sinks=SINKS.bfloat16()), r"sinks.dtype = torch.bfloat16"),
    (XQA, given(sinks=SINKS[:4]), r"sinks.shape = \(4,\)"),
    # By value, inside the operation.
    (XQA, given(seq_lens=int32(20, 1)), r"seq_lens = \[20, 1\] .* at least the queries, \[2, 2\]"),
    (XQA, given(seq_lens=int32(20, -1)), r"seq_lens = \[20, -1\] .* >= 0"),
    (XQA, given(max_seq_len=19), r"max_seq_len = 19 .* >= 20"),
    (XQA, given(seq_lens=int32(33, 5), max_seq_len=40), r"seq_lens = \[33, 5\] .* <= 32"),
    (XQA, given(block_tables=int32([3, 6], [5, 0])), r"block_tables pages = \(3, 6\) .* 0 … 5"),
    (XQA, given(block_tables=int32([3, 1], [-1, 0])), r"block_tables pages = \(-1, 3\)"),
)
CONTEXT_ROWS: tuple[tuple[Arguments, str], ...] = (
    ({"cu_seqlens_q": int32(0, 4)}, r"cu_seqlens_q length = 2 .* 3 = batch_size \+ 1"),
    ({"cu_seqlens_k": int32(0, 25)}, r"cu_seqlens_k length = 2"),
    ({"cu_seqlens_q": torch.tensor([0, 1, 4])}, r"cu_seqlens_q.dtype = torch.int64"),
    ({"cu_seqlens_q": int32(1, 2, 4)}, r"cu_seqlens_q = \[1, 2, 4\] .* starting at 0"),
    ({"cu_seqlens_q": int32(0, 3, 2)}, r"cu_seqlens_q = \[0, 3, 2\] .* never decreasing"),
    ({"cu_seqlens_q": int32(0, 2, 5)}, r"cu_seqlens_q = \[0, 2, 5\] .* within 4 query rows"),
    ({"max_q_len": 2}, r"max_q_len = 2 .* >= 3"),
    ({"cu_seqlens_k": int32(0, 20, 26)}, r"cu_seqlens_k = \[0, 20, 26\] .* \[0, 20, 25\]"),
    ({"cu_seqlens_k": int32(0, 5, 25)}, r"cu_seqlens_k = \[0, 5, 25\] .* \[0, 20, 25\]"),
    (
        {"seq_lens": int32(20, 2), "cu_seqlens_k": int32(0, 20, 22)},
        r"seq_lens = \[20, 2\] .* at least the queries, \[1, 3\]",
    ),
    ({"max_seq_len": 19}, r"max_seq_len = 19"),
    ({"sinks": SINKS[:4]}, r"sinks.shape"),
    ({"sinks": SINKS[None]}, r"sinks.shape = \(1, \d+\)"),
)
MLA_ROWS: tuple[tuple[Capability, Change, str], ...] = (
    (XQA, given(), r"family = 'mla'"),
    (TRTLLM_GEN_MLA, other("block_tables", cut=(T, slice(0, 1))), r"block_tables.stride"),
    (TRTLLM_GEN_MLA, given(block_tables=int32([3], [5])), r"width = 1 .* a multiple of 2"),
    (TRTLLM_GEN_MLA, given(block_tables=int32([3, 1, 0], [5, 0, 0])), r"a multiple of 2"),
    (FLASH_MLA, other_cache(0, dtype=FP8), r"k_cache.dtype"),
    (FLASH_MLA, given(caches=(torch.zeros(6, 32, 576).bfloat16(),)), r"page_size = 32"),
    (FLASH_MLA, given(caches=(torch.zeros(6, 64, 1, 576).bfloat16(),)), r"cache.dim = 4"),
    (FLASH_MLA, given(q=torch.zeros(4, 129, 576).bfloat16()), r"group_size = 129"),
    (FLASH_MLA, given(seq_lens=int32(70, 0)), r"at least the queries"),
    (FLASH_MLA, given(kv_lora_rank=256), r"kv_lora_rank, .* = \(256, 320\) .* \[\(512, 64\)\]"),
    (
        FLASH_MLA,
        given(q=torch.zeros(4, 8, 544).bfloat16(), caches=(torch.zeros(6, 64, 544).bfloat16(),)),
        r"kv_lora_rank, .* = \(512, 32\) .* \[\(512, 64\)\]",
    ),
    (REFERENCE, given(window_left=8), r"window_left = 8 .* -1 for MLA"),
    (REFERENCE, given(sinks=SINKS), r"sinks = 'a tensor' .* None for MLA"),
    (REFERENCE, given(kv_lora_rank=577), r"kv_lora_rank = 577 .* 1 … 576"),
)


def row_id(value: object) -> str | None:
    """The kernel and the refusal name a row; a change to the call has no name of its own."""
    if isinstance(value, Capability):
        return value.name
    return value[:40] if isinstance(value, str) else "call"


@pytest.mark.parametrize(("capability", "change", "text"), DECODE_ROWS, ids=row_id)
def test_decode(capability: Capability, change: Change, text: str) -> None:
    call, kernel = decode_call(), TorchPaged(capability)
    with pytest.raises(KernelRefusal, match=text):
        kernel.decode(DecodeCall(**call | change(call)))


@pytest.mark.parametrize(("change", "text"), CONTEXT_ROWS, ids=row_id)
def test_context(change: Arguments, text: str) -> None:
    with pytest.raises(KernelRefusal, match=text):
        TorchPaged(XQA).context(ContextCall(**context_call() | change))


@pytest.mark.parametrize(("capability", "change", "text"), MLA_ROWS, ids=row_id)
def test_mla_decode(capability: Capability, change: Change, text: str) -> None:
    call = mla_call()
    with pytest.raises(KernelRefusal, match=text):
        TorchPaged(capability).mla_decode(DecodeCall(**call | change(call)))


def test_mla_context() -> None:
    call = mla_call()
    del call["q_len_per_req"]
    cut = {"cu_seqlens_q": int32(0, 1, 4), "cu_seqlens_k": int32(0, 70, 75)}
    call |= cut | {"max_q_len": 3}
    TorchPaged(FLASH_MLA).mla_context(ContextCall(**call))
    with pytest.raises(KernelRefusal, match=r"flash_mla mla_context: cu_seqlens_q length = 2"):
        TorchPaged(FLASH_MLA).mla_context(ContextCall(**call | {"cu_seqlens_q": int32(0, 4)}))


@pytest.mark.parametrize("capability", [REFERENCE, XQA, TRTLLM_GEN_MHA], ids=lambda c: c.name)
def test_what_is_accepted(capability: Capability) -> None:
    kernel = TorchPaged(capability)
    kernel.decode(DecodeCall(**decode_call()))
    kernel.context(ContextCall(**context_call()))
    assert kernel.calls == ["decode", "context"]


def test_a_kernel_of_a_long_life_remembers_its_last_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked, "KEPT_CALLS", 4)
    kernel = TorchPaged(REFERENCE)
    for _ in range(9):
        kernel.decode(DecodeCall(**decode_call()))
    kernel.context(ContextCall(**context_call()))
    kept = kernel.calls
    assert len(kept) <= 4, f"of 10 calls a kernel remembers 4 at most, not {len(kept)}"
    assert kept[-2:] == ["decode", "context"], (
        f"a kernel remembers its last calls, in order: {kept}"
    )


def test_a_refused_call_is_not_logged() -> None:
    kernel = TorchPaged(XQA)
    with pytest.raises(KernelRefusal):
        kernel.decode(DecodeCall(**decode_call() | {"packed_mask": None, "window_left": -2}))
    assert kernel.calls == []


def test_fp8_query_where_the_kernel_wants_one() -> None:
    call = decode_call()
    call |= fp8_cache(call)
    TorchPaged(TRTLLM_GEN_MHA).decode(DecodeCall(**call | {"q": call["q"].to(FP8)}))
    TorchPaged(XQA).decode(DecodeCall(**call))


def test_the_unlimited_kernel_of_sglang_s_backends_reads_a_query_by_its_strides() -> None:
    call = decode_call()
    strided = call | strided_query(call)
    assert not strided["q"].is_contiguous()
    kernel = TorchPaged(SGLANG_CAPABILITIES[Family.MHA, REFERENCE.name])
    try:
        kernel.decode(DecodeCall(**strided))
    except KernelRefusal as error:
        pytest.fail(f"sglang hands trtllm-gen a slice of its projection, and no kernel {error}")
