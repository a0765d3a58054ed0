"""Every phase of the MLA backend attends to its requests' latents, and never asks the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fixtures.toy_attention import (
    CONTEXT,
    DRAFTS,
    RANK,
    ROPE,
    ROWS,
    dense,
    make_batch,
    mla_layer,
    mla_pool,
    request_table,
    slots,
)
from harness.backends.mla import TRTLLMMLABackend
from harness.backends.unoptimized import HostLengthsMLABackend
from harness.capability import REFERENCE, TRTLLM_GEN_MLA, Capability
from harness.errors import CapacityError, ContractError
from harness.graphs.tape import Tape
from harness.providers.torch_paged import TorchPaged
from harness.upstream.batch import EagleDraftExtendInput, ForwardBatch, ForwardMode
from harness.upstream.interface import AttentionLayer
from harness.upstream.pools import quantize

VERIFY, V1, V2 = ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2
TOTALS = (13, 8)
# trtllm-gen's rules without its sizes, so that tests stay small.
SMALL = Capability(**vars(TRTLLM_GEN_MLA) | {"page_sizes": frozenset(), "dtypes": REFERENCE.dtypes})


class Scene:
    """A backend, and batches of the two requests whose last tokens are computed."""

    def __init__(self, kind: type = TRTLLMMLABackend, **changes: Any) -> None:
        torch.manual_seed(5)
        self.table, self.pool = request_table(), changes.pop("pool", None) or mla_pool()
        self.provider = TorchPaged(changes.pop("capability", SMALL))
        arguments = {"max_context_len": CONTEXT, "num_draft_tokens": DRAFTS} | changes
        self.backend = kind(
            provider=self.provider,
            req_to_token_pool=self.table,
            token_to_kv_pool=self.pool,
            **arguments,
        )

    def batch(
        self, mode: ForwardMode, q_lens: tuple[int, ...], totals: tuple[int, ...] = TOTALS
    ) -> ForwardBatch:
        locs = [slots(r, n - q, n) for r, q, n in zip(ROWS, q_lens, totals, strict=True)]
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

    def inputs(self, tokens: int) -> dict[str, torch.Tensor]:
        shapes = {"q": (4, RANK), "q_rope": (4, ROPE), "k": (1, RANK), "k_rope": (1, ROPE)}
        return {name: torch.randn(tokens, *shape) for name, shape in shapes.items()}

    def forward(
        self,
        batch: ForwardBatch,
        parts: dict[str, torch.Tensor],
        layer: AttentionLayer | None = None,
    ) -> torch.Tensor:
        return self.backend.forward(v=parts["k"], layer=layer or mla_layer(), batch=batch, **parts)

    def run(self, batch: ForwardBatch, parts: dict[str, torch.Tensor], **how: Any) -> torch.Tensor:
        self.backend.init_forward_metadata(batch)
        return self.forward(batch, parts, **how)

    def expected(
        self,
        parts: dict[str, torch.Tensor],
        q_lens: tuple[int, ...],
        totals: tuple[int, ...] = TOTALS,
    ) -> torch.Tensor:
        """Dense attention over what the pool holds at each request's own slots."""
        q = torch.cat((parts["q"], parts["q_rope"]), -1)[: sum(q_lens)]
        out = []
        for row, n, part in zip(ROWS, totals, q.split(q_lens), strict=True):
            latent = self.pool.kv_buffer[0][slots(row, 0, n)][:, None]
            out.append(dense(part, latent, latent[..., :RANK], 0.3))
        return torch.cat(out).flatten(1).float()


# mode, query tokens a request, kernel; [1, 3] and [2, 2] have one sum
PHASES = (
    (ForwardMode.EXTEND, (2, 8), "mla_context"),
    (ForwardMode.DECODE, (1, 1), "mla_decode"),
    (VERIFY, (3, 3), "mla_decode"),
    (V1, (1, 3), "mla_decode"),
    (V1, (2, 2), "mla_decode"),
    (V1, (3, 1), "mla_decode"),
    (V2, (3, 3), "mla_decode"),
)


@pytest.mark.parametrize(("mode", "q_lens", "kernel"), PHASES)
@pytest.mark.parametrize("kind", [TRTLLMMLABackend, HostLengthsMLABackend])
def test_every_phase_equals_dense_and_pads_with_zeros(
    kind: type, mode: ForwardMode, q_lens: tuple[int, int], kernel: str
) -> None:
    scene, tokens = Scene(kind), sum(q_lens)
    batch, parts = scene.batch(mode, q_lens), scene.inputs(tokens + 2)
    for part in parts.values():
        part[tokens:] = torch.nan
    scene.backend.init_forward_metadata(batch)
    padding = torch.zeros(2, dtype=torch.int64)
    padded = batch.with_changes(
        batch_size=4, out_cache_loc=torch.cat((batch.out_cache_loc, padding))
    )
    obtained = scene.forward(padded, parts)
    written = torch.cat((parts["k"], parts["k_rope"]), -1)[:tokens, 0]
    assert torch.equal(scene.pool.kv_buffer[0][batch.out_cache_loc], written)
    assert scene.pool.kv_buffer[0].isfinite().all()
    torch.testing.assert_close(obtained[:tokens], scene.expected(parts, q_lens))
    assert torch.equal(obtained[tokens:], torch.zeros(2, 4 * RANK))
    assert scene.provider.calls == [kernel]


@pytest.mark.parametrize(("mode", "q_lens", "kernel"), PHASES[1:])
def test_host_mirrors_are_not_looked_at(
    mode: ForwardMode, q_lens: tuple[int, int], kernel: str
) -> None:
    scene = Scene()
    batch, parts = scene.batch(mode, q_lens), scene.inputs(sum(q_lens))
    plain = scene.run(batch, parts)
    mirror = torch.tensor([10**6, 10**6])
    assert torch.equal(scene.run(batch.with_changes(seq_lens_cpu=mirror), parts), plain)
    assert TRTLLMMLABackend.needs_cpu_seq_lens is False
    assert HostLengthsMLABackend.needs_cpu_seq_lens is True


def test_nan_behind_a_padded_request_stays_there() -> None:
    scene = Scene()
    batch, parts = scene.batch(V1, (1, 3)), scene.inputs(4)
    owned = torch.cat([slots(row, 0, n) for row, n in zip(ROWS, TOTALS, strict=True)])
    poison = torch.full_like(scene.pool.kv_buffer[0], torch.nan)
    poison[owned] = scene.pool.kv_buffer[0][owned]
    scene.pool.kv_buffer[0].copy_(poison)
    torch.testing.assert_close(scene.run(batch, parts), scene.expected(parts, (1, 3)))


def test_fp8_latents_carry_the_keys_scale() -> None:
    fp8 = torch.float8_e4m3fn
    scene = Scene(pool=mla_pool(fp8))
    batch, parts = scene.batch(VERIFY, (3, 3)), scene.inputs(6)
    obtained = scene.run(batch, parts, layer=mla_layer(k_scale=0.5))
    written = scene.pool.kv_buffer[0][batch.out_cache_loc, :RANK]
    assert torch.equal(written.float(), quantize(parts["k"][:, 0], 0.5, fp8).float())
    scene.pool.kv_buffer = [scene.pool.kv_buffer[0].float() * 0.5]
    asked = {name: part.to(fp8).float() for name, part in parts.items()}
    torch.testing.assert_close(obtained, scene.expected(asked, (3, 3)))


@pytest.mark.parametrize("mode", [VERIFY, V1, V2, ForwardMode.DECODE])
@pytest.mark.parametrize("kind", [TRTLLMMLABackend, HostLengthsMLABackend])
def test_a_recorded_forward_follows_lengths_and_pages(mode: ForwardMode, kind: type) -> None:
    scene = Scene(kind)
    backend = scene.backend
    q_lens = (1, 1) if mode.is_decode() else (3, 3)
    static, parts = scene.batch(mode, q_lens), scene.inputs(sum(q_lens))
    backend.init_cuda_graph_state(4, 12)

    def record() -> torch.Tensor:
        backend.init_forward_metadata_in_graph(static)
        return scene.forward(static, parts)

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
    for name, fresh in scene.inputs(sum(q_lens)).items():
        parts[name].copy_(fresh)
    backend.init_forward_metadata_out_graph(static)
    tape.replay()
    torch.testing.assert_close(captured[:tokens], scene.expected(parts, lens, (11, 19)))
    assert not captured[tokens:].any()


def test_the_mask_is_allocated_with_the_graphs() -> None:
    backend = Scene().backend
    with pytest.raises(ContractError, match="call init_cuda_graph_state first"):
        backend.get_verify_buffers_to_fill_after_draft()
    assert backend.cuda_graph_custom_mask is None
    backend.init_cuda_graph_state(4, 12)
    mask, positions = backend.get_verify_buffers_to_fill_after_draft()
    assert positions is None
    assert mask is backend.cuda_graph_custom_mask
    assert (mask.dtype, mask.shape) == (torch.bool, (12 * (CONTEXT + DRAFTS),))
    # A second runner that fits leaves the buffer where the first one's graphs read it.
    backend.init_cuda_graph_state(2, 6)
    assert backend.get_verify_buffers_to_fill_after_draft()[0] is mask


@pytest.mark.parametrize("changes", [{"num_draft_tokens": 0}, {"skip_prefill": True}], ids=str)
def test_no_mask_where_nothing_is_verified(changes: dict[str, Any]) -> None:
    backend = Scene(**changes).backend
    backend.init_cuda_graph_state(4, 12)
    assert list(backend.get_verify_buffers_to_fill_after_draft()) == [None, None]


@pytest.mark.parametrize("name", ["q_rope", "k_rope"])
def test_a_missing_rotary_part_is_named(name: str) -> None:
    scene = Scene()
    batch, parts = scene.batch(VERIFY, (3, 3)), scene.inputs(6)
    del parts[name]
    with pytest.raises(ContractError, match=f"{name} = None"):
        scene.run(batch, parts)


def test_the_host_lengths_peer_reads_lengths_and_refuses_long_ones() -> None:
    scene = Scene(HostLengthsMLABackend)
    batch = scene.batch(VERIFY, (3, 3))
    for changes in ({"seq_lens_cpu": torch.tensor([26, 8])}, {"seq_lens": torch.tensor([9, 26])}):
        with pytest.raises(CapacityError, match=r"26.* <= 25 each"):
            scene.backend.init_forward_metadata(batch.with_changes(**changes))
