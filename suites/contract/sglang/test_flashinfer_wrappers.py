"""The stand-ins of FlashInfer's wrappers: right, as strict as the real ones, and graph-safe."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from harness.errors import KernelRefusal
from harness.graphs.tape import Tape
from harness.sglang.stubs.mla_wrapper import BatchMLAPagedAttentionWrapper
from harness.sglang.stubs.ragged import (
    BatchPrefillWithRaggedKVCacheWrapper,
    merge_state,
    trtllm_ragged_attention_deepseek,
)
from harness.sglang.stubs.wrappers import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    fast_decode_plan,
)

HEADS, KV_HEADS, DIM, SLOTS = 4, 2, 64, 40
WORKSPACE = torch.zeros(16)
BF16 = torch.bfloat16
SCALE = 0.2


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


KEYS, VALUES = drawn(SLOTS, KV_HEADS, DIM).to(BF16), drawn(SLOTS + 1, KV_HEADS, DIM).to(BF16)[1:]


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def dense(
    q: torch.Tensor, slots: list[int], *, window: int = -1, causal: bool = True
) -> torch.Tensor:
    """Query by query and head by head in float64; queries are the last of ``slots``."""
    out = torch.zeros(*q.shape, dtype=torch.float64)
    for i, row in enumerate(q):
        position = len(slots) - len(q) + i
        seen = [
            slot
            for j, slot in enumerate(slots)
            if (j <= position or not causal) and (window < 0 or j >= position - window)
        ]
        for head in range(q.shape[1]):
            kv_head = head * KV_HEADS // q.shape[1]
            scores = torch.tensor(
                [float(row[head].double() @ KEYS[s, kv_head].double()) * SCALE for s in seen]
            )
            weights = scores.double().softmax(0)
            out[i, head] = weights @ VALUES[seen, kv_head].double()
    return out


def planned_decode(*, wrapper: Any = None, **changes: Any) -> Any:
    wrapper = wrapper or BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NHD")
    arguments: dict[str, Any] = {
        "indptr": int32(0, 3, 8),
        "indices": int32(7, 1, 9, 30, 2, 11, 12, 5),
        "last_page_len": int32(1, 1),
        "num_qo_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": DIM,
        "page_size": 1,
        "q_data_type": BF16,
        "data_type": BF16,
    }
    wrapper.begin_forward(**arguments | changes)
    return wrapper


def planned_prefill(*, wrapper: Any = None, **changes: Any) -> Any:
    wrapper = wrapper or BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD")
    arguments: dict[str, Any] = {
        "qo_indptr": int32(0, 2, 5),
        "paged_kv_indptr": int32(0, 4, 9),
        "paged_kv_indices": int32(7, 1, 9, 30, 2, 11, 12, 5, 6),
        "paged_kv_last_page_len": int32(1, 1),
        "num_qo_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim_qk": DIM,
        "page_size": 1,
        "q_data_type": BF16,
    }
    wrapper.begin_forward(**arguments | changes)
    return wrapper


def close(obtained: torch.Tensor, expected: torch.Tensor, said: str = "as in float64") -> None:
    torch.testing.assert_close(
        obtained.double(), expected, rtol=0.01, atol=0.01, msg=lambda found: f"{said}\n{found}"
    )


def test_decode_reads_the_slots_of_each_request() -> None:
    q = drawn(2, HEADS, DIM).to(BF16)
    out = planned_decode().forward(q, (KEYS, VALUES), sm_scale=SCALE)
    close(out[:1], dense(q[:1], [7, 1, 9]))
    close(out[1:], dense(q[1:], [30, 2, 11, 12, 5]))


@pytest.mark.parametrize("window", [-1, 0, 2])
def test_prefill_is_causal_within_a_window_that_was_planned(window: int) -> None:
    q = drawn(5, HEADS, DIM).to(BF16)
    options = {"causal": True, "sm_scale": SCALE, "window_left": window}
    out = planned_prefill(window_left=window).forward(q, (KEYS, VALUES), **options)
    close(out[:2], dense(q[:2], [7, 1, 9, 30], window=window))
    close(out[2:], dense(q[2:], [2, 11, 12, 5, 6], window=window))


def test_a_window_that_was_not_planned_is_no_window() -> None:
    q = drawn(5, HEADS, DIM).to(BF16)
    options = {"causal": True, "sm_scale": SCALE, "window_left": 1}
    out = planned_prefill().forward(q, (KEYS, VALUES), **options)
    close(out[2:], dense(q[2:], [2, 11, 12, 5, 6]))


def test_a_custom_mask_replaces_causality() -> None:
    q = drawn(5, HEADS, DIM).to(BF16)
    everything = torch.ones(2 * 4 + 3 * 5, dtype=torch.bool)
    wrapper = planned_prefill(custom_mask=everything)
    out = wrapper.forward(q, (KEYS, VALUES), causal=True, sm_scale=SCALE)
    close(out[:2], dense(q[:2], [7, 1, 9, 30], causal=False))
    everything[8 + 5 :: 5] = False  # later queries of request 1 lose its first key
    wrapper = planned_prefill(custom_mask=everything)
    out = wrapper.forward(q, (KEYS, VALUES), causal=True, sm_scale=SCALE)
    close(out[3:4], dense(q[3:4], [11, 12, 5, 6], causal=False))


def test_a_plan_without_a_mask_keeps_none_of_the_plan_before() -> None:
    q = drawn(5, HEADS, DIM).to(BF16)
    wrapper = planned_prefill(custom_mask=torch.ones(2 * 4 + 3 * 5, dtype=torch.bool))
    out = planned_prefill(wrapper=wrapper).forward(q, (KEYS, VALUES), causal=True, sm_scale=SCALE)
    close(out[:2], dense(q[:2], [7, 1, 9, 30]), "a mask is of one plan")


def test_keys_and_values_are_multiplied_by_their_scales() -> None:
    q = drawn(2, HEADS, DIM).to(BF16)
    scales = {"sm_scale": SCALE / 4, "k_scale": 4.0}
    out = planned_decode().forward(q, (KEYS, VALUES), **scales)
    close(out[:1], dense(q[:1], [7, 1, 9]), "keys are multiplied by k_scale")
    out = planned_decode().forward(q, (KEYS, VALUES), **scales, v_scale=0.5)
    close(out[:1] * 2, dense(q[:1], [7, 1, 9]), "values are multiplied by v_scale")


def test_tensor_cores_decode_groups_of_any_size() -> None:
    q = drawn(2, 5 * KV_HEADS, DIM).to(BF16)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NHD", use_tensor_cores=True)
    planned = planned_decode(wrapper=wrapper, num_qo_heads=5 * KV_HEADS)
    out = planned.forward(q, (KEYS, VALUES), sm_scale=SCALE)
    close(out[:1], dense(q[:1], [7, 1, 9]))
    close(out[1:], dense(q[1:], [30, 2, 11, 12, 5]))


def test_ragged_keys_have_a_window_and_values_a_size_of_their_own() -> None:
    q, both = drawn(3, HEADS, DIM).to(BF16), int32(0, 3)
    ragged = BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, "NHD")
    sizes = {"head_dim_vo": DIM // 2, "window_left": 1, "q_data_type": BF16}
    ragged.begin_forward(both, both, HEADS, KV_HEADS, DIM, **sizes)
    values = VALUES[20:23, :, : DIM // 2]
    out = ragged.forward(q, KEYS[20:23], values, causal=True, sm_scale=SCALE, window_left=1)
    close(out, dense(q, [20, 21, 22], window=1)[..., : DIM // 2], "a planned window is kept")
    with pytest.raises(KernelRefusal, match=r"v\.head_dim = 64 .* 32, as planned"):
        ragged.forward(q, KEYS[20:23], VALUES[20:23], causal=True)


def per_head(**changes: Any) -> Any:
    """Two queries behind one cached key, all of one request."""
    arguments: dict[str, Any] = {
        "seq_lens": int32(3),
        "max_q_len": 2,
        "max_kv_len": 3,
        "bmm1_scale": SCALE,
        "bmm2_scale": 0.5,
        "o_sf_scale": 1.0,
        "batch_size": 1,
        "window_left": -1,
        "cum_seq_lens_q": int32(0, 2),
        "cum_seq_lens_kv": int32(0, 3),
        "enable_pdl": None,
        "is_causal": True,
        "return_lse": False,
    }
    q = drawn(2, HEADS, DIM).to(BF16)
    packed = (q, KEYS[20:23], VALUES[20:23], WORKSPACE)
    return trtllm_ragged_attention_deepseek(*packed, **arguments | changes)


def test_a_prefill_per_head_scales_its_result() -> None:
    q = drawn(2, HEADS, DIM).to(BF16)
    close(per_head() * 2, dense(q, [20, 21, 22]), "the result is scaled")


@pytest.mark.parametrize(
    "changes",
    [{"max_q_len": 1}, {"max_kv_len": 2}, {"batch_size": 2}, {"seq_lens": int32(2)}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_prefill_per_head_refuses_bounds_of_another_batch(changes: dict[str, Any]) -> None:
    with pytest.raises(KernelRefusal, match=f"deepseek: {next(iter(changes))} = "):
        per_head(**changes)


def test_a_window_holds_under_a_custom_mask() -> None:
    q = drawn(5, HEADS, DIM).to(BF16)
    everything = torch.ones(2 * 4 + 3 * 5, dtype=torch.bool)
    wrapper = planned_prefill(custom_mask=everything, window_left=2)
    out = wrapper.forward(q, (KEYS, VALUES), causal=True, sm_scale=SCALE, window_left=2)
    close(out[:2], dense(q[:2], [7, 1, 9, 30], window=2, causal=False))
    close(out[2:], dense(q[2:], [2, 11, 12, 5, 6], window=2, causal=False))


def test_two_partial_results_merge_to_the_whole() -> None:
    q = drawn(2, HEADS, DIM).to(BF16)
    cached = planned_prefill(
        qo_indptr=int32(0, 2),
        paged_kv_indptr=int32(0, 3),
        paged_kv_indices=int32(4, 8, 15),
        paged_kv_last_page_len=int32(1),
    )
    ragged = BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, "NHD")
    both = int32(0, 2)
    ragged.begin_forward(both, both, HEADS, KV_HEADS, DIM, q_data_type=BF16)
    options = {"sm_scale": SCALE}
    a = cached.forward_return_lse(q, (KEYS, VALUES), causal=False, **options)
    b = ragged.forward_return_lse(q, KEYS[20:22], VALUES[20:22], causal=True, **options)
    close(merge_state(*a, *b)[0], dense(q, [4, 8, 15, 20, 21]))


def test_merging_with_nothing_changes_nothing() -> None:
    v, s = drawn(3, HEADS, DIM), drawn(3, HEADS)
    nothing = torch.full_like(s, -torch.inf)
    merged, total = merge_state(v, s, torch.zeros_like(v), nothing)
    told = "merging with an empty part leaves outputs and log-sum-exps as they are"
    torch.testing.assert_close(merged, v, msg=lambda found: f"{told}\n{found}")
    torch.testing.assert_close(total, s, msg=lambda found: f"{told}\n{found}")
    merged, total = merge_state(torch.zeros_like(v), nothing, torch.zeros_like(v), nothing)
    seen = merged[0, 0, 0].item(), total[0, 0].item()
    both = f"two empty parts merge into an output of 0 and a log-sum-exp of -inf, not {seen}"
    assert torch.equal(merged, torch.zeros_like(v)), both
    assert torch.equal(total, nothing), both


def test_the_logarithm_is_of_base_two() -> None:
    q = torch.zeros(2, HEADS, DIM, dtype=BF16)
    _, lse = planned_decode().forward_return_lse(q, (KEYS, VALUES), sm_scale=SCALE)
    assert lse[:, 0].tolist() == pytest.approx([math.log2(3), math.log2(5)])
    part, three, five = (
        drawn(1, HEADS, DIM),
        *(torch.full((1, HEADS), math.log2(n)) for n in (3, 5)),
    )
    _, eight = merge_state(part, three, part, five)
    assert eight.tolist() == [pytest.approx([3.0] * HEADS)], "3 and 5 equal keys merge to 8 of them"


def test_a_merge_refuses_another_dtype_than_that_of_logarithms() -> None:
    v, s = drawn(3, HEADS, DIM), drawn(3, HEADS)
    for name, pair in (("s_a", (s.to(BF16), s)), ("s_b", (s, s.to(BF16)))):
        with pytest.raises(KernelRefusal, match=f"{name}.dtype"):
            merge_state(v, pair[0], v, pair[1])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"indptr": torch.tensor([0, 3, 8])}, "indptr"),
        ({"indices": torch.tensor([7, 1, 9, 30, 2, 11, 12, 5])}, "indices"),
        ({"num_qo_heads": 5}, "num_qo_heads"),
        ({"num_qo_heads": 10}, "group_size"),
        ({"head_dim": 80}, "head_dim"),
        ({"page_size": 16}, "page_size"),
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode"),
    ],
)
def test_a_decode_plan_refuses(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(KernelRefusal, match=named):
        planned_decode(**changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"indptr": int32(1, 3, 8)}, "starting at 0"),
        ({"indptr": int32(0, 5, 3)}, "never decreasing"),
        ({"indptr": int32(0, 3, 9)}, "ending within 8"),
        ({"indices": int32(7, 1, 9, 30, 2, 11, 12, SLOTS)}, "kv_indices"),
        ({"indices": int32(7, 1, 9, 30, 2, 11, 12, -1)}, "kv_indices"),
        ({"data_type": torch.float16}, "keys.dtype"),
        ({"num_kv_heads": 4}, "keys.heads"),
    ],
)
def test_a_decode_run_refuses_what_was_planned(changes: dict[str, Any], named: str) -> None:
    wrapper = planned_decode(**changes)
    with pytest.raises(KernelRefusal, match=named):
        wrapper.forward(drawn(2, HEADS, DIM).to(BF16), (KEYS, VALUES), sm_scale=SCALE)


@pytest.mark.parametrize(
    ("q", "named"),
    [
        (drawn(3, HEADS, DIM).to(BF16), "q rows"),
        (drawn(2, HEADS, DIM), "q.dtype"),
        (drawn(2, 2 * HEADS, DIM).to(BF16)[:, ::2], "q.stride"),
    ],
)
def test_a_run_refuses_a_query_that_was_not_planned(q: torch.Tensor, named: str) -> None:
    wrapper = planned_decode()
    with pytest.raises(KernelRefusal, match=named):
        wrapper.forward(q, (KEYS, VALUES), sm_scale=SCALE)


def test_a_scale_is_that_of_one_run() -> None:
    q, wrapper = drawn(2, HEADS, DIM).to(BF16), planned_decode()
    plain = wrapper.forward(q, (KEYS, VALUES))
    scaled = wrapper.forward(q, (KEYS, VALUES), sm_scale=8 * SCALE)
    assert not torch.equal(scaled, plain)
    again = wrapper.forward(q, (KEYS, VALUES))
    assert torch.equal(again, plain), "a run without a scale has that of its head_dim"


def test_a_run_refuses_values_of_other_heads_than_its_keys() -> None:
    q = drawn(2, HEADS, DIM).to(BF16)
    with pytest.raises(KernelRefusal, match=r"values\.heads = 1 .* 2"):
        planned_decode().forward(q, (KEYS, VALUES[:, :1]), sm_scale=SCALE)


def test_what_the_stand_in_does_not_compute_is_refused() -> None:
    q = drawn(2, HEADS, DIM).to(BF16)
    with pytest.raises(KernelRefusal, match=r"logits_soft_cap = 30\.0 .* 0"):
        planned_decode().forward(q, (KEYS, VALUES), logits_soft_cap=30.0)
    planned_decode().forward(q, (KEYS, VALUES), logits_soft_cap=0.0)
    with pytest.raises(KernelRefusal, match=r"kv_layout = .HND. .* NHD"):
        BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "HND")


def test_a_run_needs_a_plan() -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NHD")
    with pytest.raises(KernelRefusal, match="a plan before it"):
        wrapper.forward(drawn(2, HEADS, DIM).to(BF16), (KEYS, VALUES))
    ragged = BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    with pytest.raises(KernelRefusal, match="a plan before it"):
        ragged.run(drawn(2, HEADS, DIM).to(BF16), KEYS[:2], VALUES[:2])


def test_a_mask_that_is_too_short_is_refused() -> None:
    with pytest.raises(KernelRefusal, match="custom_mask size"):
        planned_prefill(custom_mask=torch.ones(22, dtype=torch.bool))


def graph_decode(bs: int = 2) -> tuple[Any, dict[str, torch.Tensor]]:
    buffers = {
        "paged_kv_indptr_buffer": torch.zeros(bs + 1, dtype=torch.int32),
        "paged_kv_indices_buffer": torch.zeros(12, dtype=torch.int32),
        "paged_kv_last_page_len_buffer": torch.ones(bs, dtype=torch.int32),
    }
    return BatchDecodeWithPagedKVCacheWrapper(
        WORKSPACE, "NHD", use_cuda_graph=True, **buffers
    ), buffers


def test_a_replay_reads_the_buffers_of_the_constructor() -> None:
    wrapper, buffers = graph_decode()
    planned_decode(wrapper=wrapper)
    q, tape = drawn(2, HEADS, DIM).to(BF16), Tape()
    out = tape.capture(lambda: wrapper.forward(q, (KEYS, VALUES), sm_scale=SCALE))
    buffers["paged_kv_indices_buffer"][:3] = int32(20, 21, 22)
    tape.replay()
    close(out[:1], dense(q[:1], [20, 21, 22]))
    buffers["paged_kv_indptr_buffer"].copy_(int32(0, 2, 6))
    tape.replay()
    close(out[:1], dense(q[:1], [20, 21]))


def test_a_replay_refuses_more_keys_than_were_planned() -> None:
    wrapper, buffers = graph_decode()
    planned_decode(wrapper=wrapper)
    q, tape = drawn(2, HEADS, DIM).to(BF16), Tape()
    out = tape.capture(lambda: wrapper.forward(q, (KEYS, VALUES), sm_scale=SCALE))
    longer = int32(0, 4, 9)
    buffers["paged_kv_indptr_buffer"].copy_(longer)
    with pytest.raises(KernelRefusal, match=r"keys of request 0 = 4 .* <= 3, as planned"):
        tape.replay()
    arguments = (buffers["paged_kv_last_page_len_buffer"], HEADS, KV_HEADS, DIM, 1)
    indices = buffers["paged_kv_indices_buffer"]
    # What the device has there is of another step: the host's lengths are planned for.
    other = int32(0, 1, 2)
    fast_decode_plan(wrapper, other, indices, *arguments, global_override_indptr_cpu=longer)
    tape.replay()
    close(out[:1], dense(q[:1], indices[:4].tolist()))


def test_a_plan_again_without_a_graph_has_lists_of_its_own() -> None:
    wrapper, q = planned_decode(), drawn(2, HEADS, DIM).to(BF16)
    lists = (int32(0, 2, 3), int32(20, 21, 22), int32(1, 1))
    fast_decode_plan(wrapper, *lists, HEADS, KV_HEADS, DIM, 1)
    out = wrapper.forward(q, (KEYS, VALUES), sm_scale=SCALE)
    close(out[:1], dense(q[:1], [20, 21]), "slots are of the last plan")
    close(out[1:], dense(q[1:], [22]))


def graph_prefill() -> Any:
    """Of two requests."""
    return BatchPrefillWithPagedKVCacheWrapper(
        WORKSPACE,
        "NHD",
        use_cuda_graph=True,
        qo_indptr_buf=int32(0, 0, 0),
        paged_kv_indptr_buf=int32(0, 0, 0),
        paged_kv_indices_buf=torch.zeros(12, dtype=torch.int32),
        paged_kv_last_page_len_buf=int32(1, 1),
        custom_mask_buf=torch.zeros(8, dtype=torch.uint8),
        mask_indptr_buf=int32(0, 0, 0),
    )


def test_a_graph_reads_the_mask_of_each_request() -> None:
    mask = torch.ones(2 * 4 + 3 * 5, dtype=torch.bool)
    mask[8::5] = False  # no query of request 1 sees its first key
    q = drawn(5, HEADS, DIM).to(BF16)
    wrapper = planned_prefill(wrapper=graph_prefill(), custom_mask=mask)
    out = wrapper.forward(q, (KEYS, VALUES), sm_scale=SCALE)
    close(out[:2], dense(q[:2], [7, 1, 9, 30], causal=False))
    close(out[2:], dense(q[2:], [11, 12, 5, 6], causal=False), "each request has its mask")


def test_a_plan_for_a_graph_refuses_more_queries_than_its_first() -> None:
    wrapper = planned_prefill(wrapper=graph_prefill(), qo_indptr=int32(0, 1, 4))
    with pytest.raises(KernelRefusal, match=r"qo_indptr\[-1\] = 5 .* <= 4, as first planned"):
        planned_prefill(wrapper=wrapper)


def test_a_plan_for_a_graph_refuses_a_list_longer_than_its_buffer() -> None:
    wrapper, _ = graph_decode()
    with pytest.raises(KernelRefusal, match="indices_buf size = 13"):
        planned_decode(wrapper=wrapper, indices=torch.zeros(13, dtype=torch.int32))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"qo_indptr": int32(0, 2)}, "qo_indptr_buf size = 2 .* 3, the buffer's"),
        ({"paged_kv_last_page_len": int32(1)}, "last_page_len_buf size = 1 .* 2, the buffer's"),
    ],
    ids=["queries", "pages"],
)
def test_a_plan_for_a_graph_refuses_fewer_requests_than_were_captured(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(KernelRefusal, match=named):
        planned_prefill(wrapper=graph_prefill(), **changes)


def test_a_wrapper_for_graphs_needs_its_buffers() -> None:
    with pytest.raises(KernelRefusal, match="paged_kv_indptr_buf"):
        BatchPrefillWithPagedKVCacheWrapper(
            WORKSPACE, "NHD", use_cuda_graph=True, qo_indptr_buf=int32(0, 1)
        )
    for short in (int32(0, 0), int32(0, 0, 0, 0)):
        with pytest.raises(KernelRefusal, match=f"indptr_buf size = {len(short)} .* 3"):
            BatchDecodeWithPagedKVCacheWrapper(
                WORKSPACE, "NHD", True, False, short, int32(*range(12)), int32(1, 1)
            )


def test_a_ragged_wrapper_is_not_captured() -> None:
    with pytest.raises(KernelRefusal, match="use_cuda_graph = True"):
        BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, use_cuda_graph=True)


def test_mla_replays_lengths_of_the_last_plan_and_slots_of_its_buffer() -> None:
    rank, rope = 512, 64
    latent = drawn(SLOTS, 1, rank + rope).to(BF16)
    buffers = [int32(0, 1), int32(0, 0), torch.zeros(8, dtype=torch.int32), int32(0)]
    wrapper = BatchMLAPagedAttentionWrapper(WORKSPACE, True, *buffers)

    def plan(listed: int, seen: int | None = None) -> None:
        options = (2, rank, rope, 1, False, SCALE, BF16, BF16)
        slots, lens = int32(*range(listed)), int32(listed if seen is None else seen)
        wrapper.plan(int32(0, 1), int32(0, listed), slots, lens, *options)

    plan(2)
    q, tape = torch.zeros(1, 2, rank + rope, dtype=BF16), Tape()
    caches = latent[..., :rank], latent[..., rank:]
    out = tape.capture(lambda: wrapper.run(q[..., :rank], q[..., rank:], *caches))

    def mean(*slots: int) -> torch.Tensor:
        return latent[list(slots), 0, :rank].double().mean(0).expand(1, 2, -1)

    tape.replay()
    close(out, mean(0, 1))
    plan(4)
    tape.replay()
    close(out, mean(0, 1, 2, 3))
    buffers[2][:4] = int32(9, 8, 7, 6)
    buffers[1].fill_(5)  # the kernel has no use for this buffer
    tape.replay()
    close(out, mean(9, 8, 7, 6))
    plan(4, seen=3)
    tape.replay()
    close(out, mean(0, 1, 2), "kv_len_arr says how many of the listed slots there are")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"page_size": 16}, "page_size = 16 .* 1"),
        ({"kv_len_arr": int32(2, 1)}, "kv_len_arr size = 2 .* 1"),
    ],
    ids=["pages", "lengths"],
)
def test_an_mla_plan_refuses(changes: dict[str, Any], named: str) -> None:
    arguments: dict[str, Any] = {
        "qo_indptr": int32(0, 1),
        "kv_indptr": int32(0, 3),
        "kv_indices": int32(9, 4, 30),
        "kv_len_arr": int32(3),
        "num_heads": 2,
        "head_dim_ckv": 512,
        "head_dim_kpe": 64,
        "page_size": 1,
        "causal": False,
        "sm_scale": SCALE,
        "q_data_type": BF16,
        "kv_data_type": BF16,
    }
    with pytest.raises(KernelRefusal, match=named):
        BatchMLAPagedAttentionWrapper(WORKSPACE).plan(**arguments | changes)


def test_mla_is_causal_where_its_plan_is() -> None:
    rank, rope = 512, 64
    latent = drawn(SLOTS, 1, rank + rope).to(BF16)
    wrapper = BatchMLAPagedAttentionWrapper(WORKSPACE)
    slots, caches = [9, 4, 30], (latent[..., :rank], latent[..., rank:])
    q = torch.zeros(2, 2, rank + rope, dtype=BF16)
    for causal, seen in ((True, 2), (False, 3)):
        options = (2, rank, rope, 1, causal, SCALE, BF16, BF16)
        wrapper.plan(int32(0, 2), int32(0, 3), int32(*slots), int32(3), *options)
        out = wrapper.run(q[..., :rank], q[..., rank:], *caches)
        for row, count in ((out[0], seen), (out[1], 3)):
            mean = latent[slots[:count], 0, :rank].double().mean(0)
            close(row, mean.expand(2, -1), "a query sees what its plan lets it")
