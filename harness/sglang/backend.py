"""Backends of sglang behind our interface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch

from harness.core.case import Case
from harness.graphs.effects import Effects, observe
from harness.kernels.checked import CheckedKernel
from harness.sglang.batches import (
    at_full_width,
    new_batch,
    new_layer,
    served_batch,
    with_host_lens,
)
from harness.sglang.context import publish
from harness.sglang.graph_planning import (
    needs_host_lens,
    plan_in_graph,
    plan_out_of_graph,
    undo_warmup,
)
from harness.sglang.model_runner import new_model_runner
from harness.sglang.patches import WithoutCUDA
from harness.sglang.process import active, load
from harness.sglang.stubs.flashinfer import served_by
from harness.sglang.stubs.rope import FP8, no_rotation
from harness.upstream.base_attn_backend import (
    AttentionBackend,
    MultiStepDraftBackend,
    SharedReadEnds,
)
from harness.upstream.forward_batch_info import ForwardBatch, ForwardMode
from harness.upstream.radix_attention import RadixAttention


@dataclass(frozen=True)
class Classes:
    """Where SGLang keeps one backend.

    Args:
        name: the value of ``--attention-backend``.
        module: below ``sglang.``.
        backend: the class that serves every mode but the multi-step draft.
        draft_backend: the class that serves the multi-step draft.
        takes_rope: whether MLA's rotary parts are arguments of their own.
        masks_verify: whether target verify reads the mask of the draft tree.
    """

    name: str
    module: str
    backend: str
    draft_backend: str
    takes_rope: bool = True
    masks_verify: bool = False

    def load(self) -> None:
        """Import the backend, in a process where a release is active."""
        load(self.module)

    def make(self, runner: Any, kernel: CheckedKernel) -> Any:
        """The backend of every mode but the multi-step draft; sglang's choose their kernel."""
        return getattr(load(self.module), self.backend)(runner)

    def make_draft(self, runner: Any, kernel: CheckedKernel, num_steps: int) -> Any:
        """The backend of the multi-step draft."""
        return getattr(load(self.module), self.draft_backend)(runner, 1, num_steps)

    @property
    def is_trtllm(self) -> bool:
        """Whether it is one of the TensorRT-LLM backends, which run unless others are asked for."""
        return self.name.startswith("trtllm")


TRTLLM_MHA = Classes(
    "trtllm_mha",
    "srt.layers.attention.trtllm_mha_backend",
    "TRTLLMHAAttnBackend",
    "TRTLLMHAAttnMultiStepDraftBackend",
)
TRTLLM_MLA = Classes(
    "trtllm_mla",
    "srt.layers.attention.trtllm_mla_backend",
    "TRTLLMMLABackend",
    "TRTLLMMLAMultiStepDraftBackend",
)
FLASHINFER_MHA = Classes(
    "flashinfer",
    "srt.layers.attention.flashinfer_backend",
    "FlashInferAttnBackend",
    "FlashInferMultiStepDraftBackend",
    masks_verify=True,
)
FLASHINFER_MLA = Classes(
    "flashinfer",
    "srt.layers.attention.flashinfer_mla_backend",
    "FlashInferMLAAttnBackend",
    "FlashInferMLAMultiStepDraftBackend",
    masks_verify=True,
)
TRITON = Classes(
    "triton",
    "srt.layers.attention.triton_backend",
    "TritonAttnBackend",
    "TritonMultiStepDraftBackend",
    takes_rope=False,
    masks_verify=True,
)
FLASHMLA = Classes(
    "flashmla",
    "srt.layers.attention.flashmla_backend",
    "FlashMLABackend",
    "FlashMLAMultiStepDraftBackend",
    takes_rope=False,
)


@dataclass
class Plan:
    """The metadata of one forward by our names; None where sglang's has no such field."""

    cache_seqlens_int32: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    swa_page_table: torch.Tensor | None = None
    max_seq_len_q: int | None = None


def plan_of(backend: Any) -> Plan | None:
    """What a backend planned last."""
    decode = getattr(backend, "forward_decode_metadata", None)
    if decode is not None:
        return Plan(
            cache_seqlens_int32=decode.seq_lens_k,
            cu_seqlens_q=decode.cu_seqlens_q,
            page_table=decode.block_kv_indices,
            max_seq_len_q=decode.max_seq_len_q,
        )
    metadata = getattr(backend, "forward_metadata", None)
    if metadata is None or not hasattr(metadata, "cache_seqlens_int32"):
        return None
    plan = Plan(**{name: getattr(metadata, name, None) for name in Plan.__dataclass_fields__})
    if hasattr(metadata, "geometry"):
        plan.max_seq_len_q = metadata.geometry.max_q_len
    return plan


def decompressed(
    q: torch.Tensor, k: torch.Tensor, q_rope: torch.Tensor, k_rope: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value [T, heads, …] of each head, of absorbed MLA [T, heads or 1, …]."""
    query = torch.cat((q, q_rope), -1)
    key = torch.cat((k, k_rope), -1).expand(-1, q.shape[1], -1).contiguous()
    return query, key, key[..., : k.shape[-1]].contiguous()


def on_device(runner: Any) -> AbstractContextManager[object]:
    """What sglang's code runs in: on a CPU memory that it asks for on CUDA is the CPU's."""
    return WithoutCUDA() if runner.device == "cpu" else nullcontext()


@contextmanager
def observed(backend: SGLangBackend | SGLangDraftBackend) -> Iterator[None]:
    """Keep what planning inside the ``with`` does in ``backend.planning``, on a CPU."""
    if backend.runner.device != "cpu":
        yield
        return
    lens = backend.planned.seq_lens_cpu
    with observe(host=[] if lens is None else [lens]) as backend.planning:
        yield


class SGLangBackend(AttentionBackend):
    """One backend object of sglang.

    Args:
        theirs: the object.
        runner: the stand-in of its model runner.
        kernel: serves what it calls.
        parent: the multi-step draft it is a step of.
        packs_query: whether its query is packed before it is handed over.
    """

    def __init__(
        self,
        theirs: Any,
        runner: Any,
        kernel: CheckedKernel,
        parent: SGLangDraftBackend | None = None,
        packs_query: bool = False,
    ) -> None:
        self.theirs, self.runner, self.kernel, self.parent = theirs, runner, kernel, parent
        self.packs_query = packs_query
        self.needs_cpu_seq_lens = needs_host_lens(theirs)
        self.planned: Any = None
        self.planning = Effects()
        self._layers: dict[int, Any] = {}
        self._lens: dict[int, torch.Tensor] = {}

    @property
    def forward_metadata(self) -> Plan | None:
        """What was planned last; decode on MLA took the batch's own lengths up to 0.5.18."""
        plan = plan_of(self.theirs)
        if plan is not None and plan.cache_seqlens_int32 is None:
            lens = (self.planned if self.parent is None else self.parent.planned).seq_lens
            own = self._lens.setdefault(len(lens), torch.empty_like(lens, dtype=torch.int32))
            plan.cache_seqlens_int32 = own.copy_(lens)
        return plan

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan an eager forward; of a prefill the scheduler knows every length."""
        if batch.forward_mode is ForwardMode.EXTEND:
            batch = with_host_lens(batch)
        self.planned = new_batch(batch, self.runner, batch.out_cache_loc)
        if batch.batch_size:
            with observed(self), on_device(self.runner):
                self.theirs.init_forward_metadata(self.planned)

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """The host side of planning."""
        if in_capture:
            batch = with_host_lens(batch)
            batch = at_full_width(batch) if self.runner.captures_full_width else batch
        self.planned = new_batch(batch, self.runner, batch.out_cache_loc)
        with observed(self), on_device(self.runner):
            plan_out_of_graph(self.theirs, self.planned, in_capture)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """The device side of planning, recorded."""
        with on_device(self.runner):
            plan_in_graph(self.theirs, self.planned)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what graphs read."""
        with on_device(self.runner):
            self.theirs.init_cuda_graph_state(max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """seq_lens of a padded row, enough for its queries where MLA pads a draft extend."""
        fill = int(self.theirs.get_cuda_graph_seq_len_fill_value())
        width = self.theirs.num_draft_tokens if hasattr(self.theirs, "padded_q_buffer") else 1
        return max(fill, width) if self.runner.extends_draft else fill

    def on_after_cuda_graph_warmup(self) -> None:
        """Undo what the warm-up changed."""
        undo_warmup(self.theirs)

    def shared_read_ends(self, fm: ForwardMode) -> SharedReadEnds:
        """As the release says; it does from 0.5.18 on."""
        says = getattr(self.theirs, "shared_read_ends", None)
        if says is None:
            return SharedReadEnds.UNKNOWN
        mode = load("srt.model_executor.forward_batch_info").ForwardMode[fm.name]
        return SharedReadEnds[says(mode).name]

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of one layer, as ``RadixAttention.forward`` calls it."""
        planned = self.planned if self.parent is None else self.parent.planned
        served = served_batch(planned, batch)
        theirs = self._layers.get(layer.layer_id)
        if theirs is None:
            theirs = self._layers[layer.layer_id] = new_layer(layer, self.runner.device)
        if self.packs_query:
            q = q.contiguous()
        if layer.sinks is not None:
            kwargs["sinks"] = layer.sinks
        if "q_rope" in kwargs and not self.runner.takes_rope:
            q = torch.cat((q, kwargs.pop("q_rope")), -1)
            k = torch.cat((k, kwargs.pop("k_rope")), -1)
        if self._rotates(batch):
            cache = no_rotation(self.runner.model_config.context_len, kwargs["q_rope"].shape[-1])
            kwargs["cos_sin_cache"] = cache
        with served_by(self.kernel), on_device(self.runner):
            if self._is_decompressed(layer):
                # As deepseek's forward_normal does: the model writes the latent itself, and hands
                # over a key and a value of each head.
                locations = served.out_cache_loc
                if active().bundles_locations:
                    locations = load("srt.mem_cache.memory_pool").KVWriteLoc.for_batch(served)
                pool = self.runner.token_to_kv_pool
                pool.set_mla_kv_buffer(theirs, locations, k, kwargs["k_rope"])
                q, k, v = decompressed(q, k, kwargs.pop("q_rope"), kwargs.pop("k_rope"))
                theirs, save_kv_cache = self._per_head(theirs), False
            out: torch.Tensor = self.theirs.forward(
                q if "q_rope" in kwargs else q.flatten(1),
                k,
                v,
                theirs,
                served,
                save_kv_cache=save_kv_cache,
                **kwargs,
            )
        return out.flatten(1)

    def _rotates(self, batch: ForwardBatch) -> bool:
        """Whether the model leaves the rotation of query and key to this backend."""
        mode, runner = batch.forward_mode, self.runner
        serves = mode.is_decode() or mode is ForwardMode.TARGET_VERIFY
        return bool(runner.fuses_rope) and serves and runner.kv_cache_dtype == FP8

    def _is_decompressed(self, layer: RadixAttention) -> bool:
        """Whether a prefill without a prefix runs on heads of its own instead of the latent."""
        prefill = getattr(self.theirs, "forward_prefill_metadata", None)
        extends = self.planned is not None and self.planned.forward_mode.name == "EXTEND"
        return prefill is not None and extends and not prefill.fallback_to_flashinfer_impl

    def _per_head(self, layer: Any) -> Any:
        heads = copy(layer)
        heads.tp_k_head_num = heads.tp_v_head_num = layer.tp_q_head_num
        return heads

    def forward_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Never called: ``forward`` hands everything on."""
        raise NotImplementedError

    forward_extend = forward_decode


class SGLangDraftBackend(MultiStepDraftBackend):
    """The multi-step draft backend of sglang."""

    def __init__(self, theirs: Any, runner: Any, kernel: CheckedKernel, num_steps: int) -> None:
        self.theirs, self.runner, self.kernel = theirs, runner, kernel
        self.needs_cpu_seq_lens = needs_host_lens(theirs)
        self.topk, self.speculative_num_steps = 1, num_steps
        steps = theirs.attn_backends[: num_steps - 1]
        self.attn_backends = [SGLangBackend(step, runner, kernel, self) for step in steps]
        self.planned: Any = None
        self.planning = Effects()
        self._locations: dict[int, torch.Tensor] = {}

    def _plan(self, batch: ForwardBatch, *, static: bool) -> None:
        """Hand over write locations request after request, one more than steps write."""
        steps, bs = self.speculative_num_steps, batch.batch_size
        given = batch.out_cache_loc.view(steps - 1, bs)
        window = self._locations.get(bs) if static else None
        if window is None:
            window = given.new_zeros(bs * steps)
            if static:
                self._locations[bs] = window
        window.view(bs, steps)[:, :-1].copy_(given.t())
        self.planned = new_batch(batch, self.runner, window)
        if not static:  # those of the first step, as the worker sets them
            self.planned.positions = batch.seq_lens.clone()

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan every step of an eager draft."""
        self._plan(batch, static=False)
        with observed(self), on_device(self.runner):
            self.theirs.init_forward_metadata(self.planned)

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """The host side of planning every step."""
        if in_capture:
            batch = with_host_lens(batch)
        self._plan(batch, static=True)
        with observed(self), on_device(self.runner):
            plan_out_of_graph(self.theirs, self.planned, in_capture)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """The device side of planning every step, recorded."""
        with on_device(self.runner):
            plan_in_graph(self.theirs, self.planned)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what graphs read."""
        with on_device(self.runner):
            self.theirs.init_cuda_graph_state(max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """seq_lens of a padded row."""
        return int(self.theirs.attn_backends[0].get_cuda_graph_seq_len_fill_value())

    def on_after_cuda_graph_warmup(self) -> None:
        """Undo what the warm-up changed."""
        undo_warmup(self.theirs)


def new_backend(
    classes: Classes,
    *,
    case: Case,
    kernel: CheckedKernel,
    device: torch.device | str,
    packs_query: bool = False,
    **pools: Any,
) -> SGLangBackend:
    """The backend of every mode but the multi-step draft, real but for its model runner."""
    runner = _runner(classes, case, kernel, device, pools)
    with on_device(runner):
        theirs = classes.make(runner, kernel)
    return SGLangBackend(theirs, runner, kernel, packs_query=packs_query)


def new_draft_backend(
    classes: Classes, *, case: Case, kernel: CheckedKernel, device: torch.device | str, **pools: Any
) -> SGLangDraftBackend:
    """The backend of the multi-step draft, real but for its model runner."""
    runner = _runner(classes, case, kernel, device, pools)
    with on_device(runner):
        theirs = classes.make_draft(runner, kernel, case.num_steps)
    return SGLangDraftBackend(theirs, runner, kernel, case.num_steps)


def _runner(
    classes: Classes,
    case: Case,
    kernel: CheckedKernel,
    device: torch.device | str,
    pools: dict[str, Any],
) -> Any:
    runner = new_model_runner(
        case,
        backend=classes.name,
        server_args=publish(case, classes.name, kernel.capability.name, device),
        req_to_token_pool=pools["req_to_token_pool"],
        token_to_kv_pool=pools["token_to_kv_pool"],
        device=device,
    )
    runner.takes_rope, runner.masks_verify = classes.takes_rope, classes.masks_verify
    # trtllm's backends plan their largest width themselves; FlashInfer's wrappers keep the first.
    runner.captures_full_width = classes == FLASHINFER_MHA
    runner.fuses_rope = classes == TRTLLM_MLA and active().fuses_mla_rope
    return runner
