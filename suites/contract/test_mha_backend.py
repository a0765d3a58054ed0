"""Every phase of the MHA backend writes its keys, then attends to exactly its requests' tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fixtures.toy_attention import (
    CONTEXT,
    DRAFTS,
    ROWS,
    dense,
    make_batch,
    mha_layer,
    mha_pool,
    request_table,
    slots,
    swa_pool,
)
from harness.backends.mha import TRTLLMHAAttnBackend
from harness.backends.unoptimized import ContextKernelMHABackend, VerifyFixUpMHABackend
from harness.capability import REFERENCE, TRTLLM_GEN_MHA, XQA
from harness.errors import ContractError
from harness.graphs.tape import Tape
from harness.providers.torch_paged import TorchPaged
from harness.upstream.batch import EagleDraftExtendInput, ForwardBatch, ForwardMode
from harness.upstream.interface import AttentionLayer
from harness.upstream.pools import quantize

VERIFY, V1, V2 = ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2
TOTALS = (13, 8)


def unreadable() -> torch.Tensor:
    """A mirror that is longer than anything and of no use: reading it spoils the plan."""
    return torch.tensor([10**6, 10**6])


class Scene:
    """A backend, and batches of the two requests whose last tokens are computed."""

    def __init__(self, kind: type = TRTLLMHAAttnBackend, pool: Any = None, **changes: Any) -> None:
        torch.manual_seed(3)
        self.table = request_table()
        self.pool = pool or mha_pool()
        self.provider = changes.pop("provider", None) or TorchPaged(REFERENCE)
        self.backend = kind(
            provider=self.provider,
            req_to_token_pool=self.table,
            token_to_kv_pool=self.pool,
            max_context_len=CONTEXT,
            num_draft_tokens=DRAFTS,
            **changes,
        )
        self.layer = mha_layer()

    def batch(
        self, mode: ForwardMode, q_lens: tuple[int, ...], totals: tuple[int, ...] = TOTALS
    ) -> ForwardBatch:
        locs = [slots(r, n - q, n) for r, q, n in zip(ROWS, q_lens, totals, strict=False)]
        lens = [n - DRAFTS for n in totals] if mode.is_target_verify() else list(totals)
        counts, spec = torch.tensor(q_lens, dtype=torch.int32), None
        if mode.is_draft_extend(include_v2=True):
            width = q_lens[0] if mode.is_draft_extend_v2() else 0
            spec = EagleDraftExtendInput(None, counts, num_tokens_per_req=width)
        extend = counts if mode.is_extend() else None
        return make_batch(
            mode,
            self.table,
            self.pool,
            lens,
            torch.cat(locs),
            spec_info=spec,
            extend_seq_lens=extend,
        )

    def inputs(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch.randn(tokens, 4, 8), torch.randn(tokens, 2, 8), torch.randn(tokens, 2, 8)

    def run(self, batch: ForwardBatch, qkv: Any, layer: AttentionLayer | None = None) -> Any:
        self.backend.init_forward_metadata(batch)
        return self.backend.forward(*qkv, layer or self.layer, batch)

    def expected(
        self, q: torch.Tensor, q_lens: tuple[int, ...], totals: tuple[int, ...] = TOTALS
    ) -> torch.Tensor:
        """Dense attention over what the pool holds at each request's own slots."""
        out = []
        for row, n, part in zip(ROWS, totals, q.split(q_lens), strict=False):
            at = slots(row, 0, n)
            out.append(dense(part, self.pool.k_buffer[0][at], self.pool.v_buffer[0][at], 0.4))
        return torch.cat(out).flatten(1).float()


# mode, query tokens a request, kernel
PHASES = (
    (ForwardMode.EXTEND, (2, 8), "context"),
    (ForwardMode.DECODE, (1, 1), "decode"),
    (VERIFY, (3, 3), "decode"),
    (V1, (1, 3), "context"),
    (V1, (2, 2), "context"),
    (V2, (3, 3), "decode"),
)


@pytest.mark.parametrize(("mode", "q_lens", "kernel"), PHASES)
def test_every_phase_equals_dense(mode: ForwardMode, q_lens: tuple[int, int], kernel: str) -> None:
    scene = Scene()
    batch, qkv = scene.batch(mode, q_lens), scene.inputs(sum(q_lens))
    obtained = scene.run(batch, qkv)
    # The keys were written before attention, at the batch's locations.
    assert torch.equal(scene.pool.k_buffer[0][batch.out_cache_loc], qkv[1])
    assert torch.equal(scene.pool.v_buffer[0][batch.out_cache_loc], qkv[2])
    torch.testing.assert_close(obtained, scene.expected(qkv[0], q_lens))
    assert scene.provider.calls == [kernel]


@pytest.mark.parametrize(("mode", "q_lens", "kernel"), PHASES[1:])
def test_host_mirrors_are_not_looked_at(
    mode: ForwardMode, q_lens: tuple[int, int], kernel: str
) -> None:
    scene = Scene()
    batch, qkv = scene.batch(mode, q_lens), scene.inputs(sum(q_lens))
    plain = scene.run(batch, qkv)
    lying = batch.with_changes(seq_lens_cpu=unreadable(), seq_lens_sum=10**7)
    assert torch.equal(scene.run(lying, qkv), plain)
    assert TRTLLMHAAttnBackend.needs_cpu_seq_lens is False


@pytest.mark.parametrize(("mode", "q_lens", "kernel"), PHASES)
def test_a_strided_slice_of_a_fused_projection(
    mode: ForwardMode, q_lens: tuple[int, int], kernel: str
) -> None:
    scene, tokens = Scene(), sum(q_lens)
    fused = torch.randn(tokens, 8, 8)
    batch = scene.batch(mode, q_lens)
    obtained = scene.run(batch, (fused[:, :4], fused[:, 4:6], fused[:, 6:]))
    torch.testing.assert_close(obtained, scene.expected(fused[:, :4], q_lens))


@pytest.mark.parametrize(("mode", "q_lens", "kernel"), PHASES)
def test_rows_of_padding_behind_the_plan_come_out_zero(
    mode: ForwardMode, q_lens: tuple[int, int], kernel: str
) -> None:
    scene, tokens = Scene(), sum(q_lens)
    batch, qkv = scene.batch(mode, q_lens), scene.inputs(tokens + 2)
    for part in qkv:
        part[tokens:] = torch.nan
    scene.backend.init_forward_metadata(batch)
    padded = batch.with_changes(
        batch_size=4,
        out_cache_loc=torch.cat((batch.out_cache_loc, torch.zeros(2, dtype=torch.int64))),
    )
    obtained = scene.backend.forward(*qkv, scene.layer, padded)
    torch.testing.assert_close(obtained[:tokens], scene.expected(qkv[0][:tokens], q_lens))
    assert torch.equal(obtained[tokens:], torch.zeros(2, 32))


def test_keys_are_kept_where_the_caller_saved_them() -> None:
    scene = Scene()
    batch, (q, k, v) = scene.batch(VERIFY, (3, 3)), scene.inputs(6)
    before = scene.pool.k_buffer[0].clone()
    scene.backend.init_forward_metadata(batch)
    obtained = scene.backend.forward(q, k, v, scene.layer, batch, save_kv_cache=False)
    assert torch.equal(scene.pool.k_buffer[0], before)
    torch.testing.assert_close(obtained, scene.expected(q, (3, 3)))


@pytest.mark.parametrize("mode", [VERIFY, V2, V1, ForwardMode.DECODE])
def test_swa_layers_read_and_write_the_swa_pool(mode: ForwardMode) -> None:
    scene = Scene(pool=swa_pool())
    q_lens = (1, 1) if mode.is_decode() else (3, 3)
    batch, (q, k, v) = scene.batch(mode, q_lens), scene.inputs(sum(q_lens))
    mapping = scene.pool.full_to_swa_index_mapping.clone()
    scene.backend.init_forward_metadata(batch)
    # The scheduler may give the SWA slots away as soon as the plan has read the mapping.
    scene.pool.full_to_swa_index_mapping.fill_(40)
    layer = mha_layer(1, sliding_window_size=5)
    full_before = scene.pool.full_pool.k_buffer[0].clone()
    obtained = scene.backend.forward(q, k, v, layer, batch)
    swa, out = scene.pool.swa_pool, []
    assert torch.equal(swa.k_buffer[0][mapping[batch.out_cache_loc]], k)
    assert torch.equal(scene.pool.full_pool.k_buffer[0], full_before)
    for row, n, part in zip(ROWS, TOTALS, q.split(q_lens), strict=True):
        at = mapping[slots(row, 0, n)]
        out.append(dense(part, swa.k_buffer[0][at], swa.v_buffer[0][at], 0.4, window_left=5))
    torch.testing.assert_close(obtained, torch.cat(out).flatten(1).float())
    # The full layer of the same forward stays in its own pool.
    obtained = scene.backend.forward(q, k, v, mha_layer(0), batch)
    scene.pool = scene.pool.full_pool
    torch.testing.assert_close(obtained, scene.expected(q, q_lens))


@pytest.mark.parametrize("capability", [REFERENCE, TRTLLM_GEN_MHA], ids=lambda c: c.name)
def test_fp8_cache_with_scales(capability: Any) -> None:
    fp8 = torch.float8_e4m3fn
    free = {"head_dims": frozenset(), "page_sizes": frozenset(), "dtypes": REFERENCE.dtypes}
    provider = TorchPaged(type(capability)(**vars(capability) | free))
    scene = Scene(pool=mha_pool(dtype=fp8), provider=provider)
    layer = mha_layer(k_scale=0.5, v_scale=2.0)
    batch, (q, k, v) = scene.batch(VERIFY, (3, 3)), scene.inputs(6)
    obtained = scene.run(batch, (q, k, v), layer)
    written = scene.pool.v_buffer[0][batch.out_cache_loc]
    assert torch.equal(written.float(), quantize(v, 2.0, fp8).float())
    scene.pool.k_buffer = [scene.pool.k_buffer[0].float() * 0.5]
    scene.pool.v_buffer = [scene.pool.v_buffer[0].float() * 2.0]
    asked = q.to(fp8).float() if capability.casts_query_to_kv_dtype else q
    torch.testing.assert_close(obtained, scene.expected(asked, (3, 3)))
    assert obtained.dtype == q.dtype


def test_scales_of_an_unscaled_cache_are_not_applied() -> None:
    scene = Scene()
    batch, qkv = scene.batch(VERIFY, (3, 3)), scene.inputs(6)
    obtained = scene.run(batch, qkv, mha_layer(k_scale=0.5, v_scale=2.0))
    torch.testing.assert_close(obtained, scene.expected(qkv[0], (3, 3)))


def test_a_kernel_that_needs_a_mask_gets_one() -> None:
    free = {"head_dims": frozenset(), "page_sizes": frozenset(), "dtypes": REFERENCE.dtypes}
    scene = Scene(provider=TorchPaged(type(XQA)(**vars(XQA) | free)))
    for mode in (VERIFY, V2):
        batch, qkv = scene.batch(mode, (3, 3)), scene.inputs(6)
        obtained = scene.run(batch, qkv)
        torch.testing.assert_close(obtained, scene.expected(qkv[0], (3, 3)))


def test_idle_gives_zeros() -> None:
    scene = Scene()
    batch = scene.batch(ForwardMode.DECODE, (1, 1)).with_changes(forward_mode=ForwardMode.IDLE)
    assert torch.equal(scene.run(batch, scene.inputs(2)), torch.zeros(2, 32))


@pytest.mark.parametrize("mode", [VERIFY, V1, V2, ForwardMode.DECODE])
@pytest.mark.parametrize(
    "kind", [TRTLLMHAAttnBackend, ContextKernelMHABackend, VerifyFixUpMHABackend]
)
def test_a_recorded_forward_follows_lengths_and_pages(mode: ForwardMode, kind: type) -> None:
    scene = Scene(kind)
    q_lens = (1, 1) if mode.is_decode() else (3, 3)
    static, qkv = scene.batch(mode, q_lens), scene.inputs(sum(q_lens))
    backend = scene.backend
    backend.init_cuda_graph_state(4, 12)

    def record() -> torch.Tensor:
        backend.init_forward_metadata_in_graph(static)
        return backend.forward(*qkv, scene.layer, static)

    backend.init_forward_metadata_out_graph(static, in_capture=True)
    tape = Tape()
    captured = tape.capture(record)
    scene.run(scene.batch(ForwardMode.EXTEND, (1, 4)), scene.inputs(5))
    lens = (1, 3) if mode is V1 else q_lens
    moved, tokens = scene.batch(mode, lens, (11, 19)), sum(lens)
    static.seq_lens.copy_(moved.seq_lens)
    static.out_cache_loc.zero_()[:tokens] = moved.out_cache_loc
    if static.spec_info is not None:
        static.spec_info.num_accept_tokens.copy_(moved.spec_info.num_accept_tokens)
    for part, fresh in zip(qkv, scene.inputs(sum(q_lens)), strict=True):
        part.copy_(fresh)
    backend.init_forward_metadata_out_graph(static)
    tape.replay()
    wanted = scene.expected(qkv[0][:tokens], lens, (11, 19))
    torch.testing.assert_close(captured[:tokens], wanted)
    assert not captured[tokens:].any()


def test_the_context_kernel_peer_uses_the_context_kernel_and_agrees() -> None:
    for mode in (VERIFY, V2):
        scene = Scene(ContextKernelMHABackend)
        batch, qkv = scene.batch(mode, (3, 3)), scene.inputs(6)
        torch.testing.assert_close(scene.run(batch, qkv), scene.expected(qkv[0], (3, 3)))
        assert scene.provider.calls == ["context"]


def test_the_fix_up_peer_fills_verify_metadata_again() -> None:
    scene = Scene(VerifyFixUpMHABackend)
    batch, qkv = scene.batch(VERIFY, (3, 3)), scene.inputs(6)
    with pytest.raises(ContractError, match="planned mode = None"):
        scene.backend.update_verify_buffers_to_fill_after_draft(None, None)
    scene.backend.init_forward_metadata(batch)
    scene.backend.forward_metadata.page_table.zero_()
    scene.backend.update_verify_buffers_to_fill_after_draft(batch.spec_info, None)
    obtained = scene.backend.forward(*qkv, scene.layer, batch)
    torch.testing.assert_close(obtained, scene.expected(qkv[0], (3, 3)))
    # The optimized backend's hook does nothing, and needs to do nothing.
    plain = Scene()
    plain.backend.init_forward_metadata(batch)
    plain.backend.forward_metadata.page_table.zero_()
    plain.backend.update_verify_buffers_to_fill_after_draft(batch.spec_info, None)
    assert not plain.backend.forward_metadata.page_table.any()
