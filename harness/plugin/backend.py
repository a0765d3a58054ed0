"""One attention backend of ours as sglang's model runner, graph runners and layers call it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from harness.attention.paged_backend import PagedBackend
from harness.core.case import Family
from harness.errors import UsageError, rejected
from harness.kernels.interface import Kernel
from harness.plugin.batches import our_batch, our_layer
from harness.plugin.per_head_prefill import PerHeadPrefill, per_head_prefill
from harness.plugin.pools import served_pool
from harness.plugin.served import ServedBackend, device_of, served_kernel
from harness.upstream.forward_batch_info import ForwardBatch
from harness.upstream.memory_pool import MLATokenToKVPool, SWAKVPool
from harness.upstream.radix_attention import RadixAttention
from harness.upstream.verify_mask import TreeMaskMode, tree_mask_numel


class PluginBackend(AttentionBackend):  # type: ignore[misc]
    """A backend of ours behind sglang's interface.

    Args:
        ours: the backend.
        runner: the server's ``ModelRunner``, whose pools it works on.
        has_dead_topk: see ``ServedBackend``.
    """

    def __init__(self, ours: PagedBackend, runner: Any, *, has_dead_topk: bool = False) -> None:
        self.ours, self.has_dead_topk = ours, has_dead_topk
        self.needs_cpu_seq_lens = ours.needs_cpu_seq_lens
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.max_context_len, self.device = ours.max_context_len, runner.device
        self.cuda_graph_custom_mask: torch.Tensor | None = None
        self._extends_draft = runner.is_draft_worker and not ours.skip_prefill
        self._layers: dict[int, RadixAttention] = {}

    @cached_property
    def _per_head(self) -> PerHeadPrefill:
        return per_head_prefill()

    @property
    def forward_metadata(self) -> Any:
        """What was planned last."""
        return self.ours.forward_metadata

    def batch(self, theirs: Any) -> ForwardBatch:
        """A batch of the server's in our terms."""
        return our_batch(
            theirs,
            req_to_token_pool=self.ours.req_to_token_pool,
            token_to_kv_pool=self.ours.token_to_kv_pool,
        )

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan an eager forward."""
        self.ours.init_forward_metadata(self.batch(forward_batch))

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Choose the metadata of a graph; a draft extend is also filled here.

        The runner of draft extend records no planning.
        """
        batch = self.batch(forward_batch)
        self.ours.init_forward_metadata_out_graph(batch, in_capture)
        if batch.forward_mode.is_draft_extend_v2():
            self.ours.init_forward_metadata_in_graph(batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Fill the chosen metadata, recorded."""
        batch = self.batch(forward_batch)
        if not batch.forward_mode.is_draft_extend_v2():
            self.ours.init_forward_metadata_in_graph(batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what graphs read, and the mask that the tree builder writes."""
        self.ours.init_cuda_graph_state(max_bs, max_num_tokens)
        width, own = self.ours.num_draft_tokens, self.ours.verify_mask
        if own is not None:
            self.cuda_graph_custom_mask = own.buffer
        elif width and not self.ours.skip_prefill and not self._extends_draft:
            entries = tree_mask_numel(
                TreeMaskMode.FULL_MASK, max_bs, width, self.ours.max_context_len
            )
            self.cuda_graph_custom_mask = torch.zeros(entries, dtype=torch.bool, device=self.device)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """seq_lens of a padded row: a draft extend's includes its queries."""
        fill = self.ours.get_cuda_graph_seq_len_fill_value()
        return max(fill, self.ours.num_draft_tokens) if self._extends_draft else fill

    def get_verify_buffers_to_fill_after_draft(self) -> list[torch.Tensor | None]:
        """The mask, preallocated; positions are the worker's."""
        return [self.cuda_graph_custom_mask, None]

    def update_verify_buffers_to_fill_after_draft(
        self, spec_info: Any, cuda_graph_bs: int | None
    ) -> None:
        """Redo what depends on draft tokens: nothing, but for the baseline."""
        self.ours.update_verify_buffers_to_fill_after_draft(spec_info, cuda_graph_bs)

    def on_after_cuda_graph_warmup(self) -> None:
        """Undo what the warm-up before a capture changed."""
        self.ours.on_after_cuda_graph_warmup()

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of one layer; a prefill per head may be asked for log-sum-exps as well."""
        batch = self.batch(forward_batch)
        pool = self.ours.token_to_kv_pool
        if isinstance(pool, MLATokenToKVPool) and layer.v_head_dim != pool.kv_lora_rank:
            # Values of each head and not latents: sglang has cached those itself.
            planned = self.ours.planned(batch)
            return self._per_head(q, k, v, layer, forward_batch, planned)
        own = self._layer(layer, sinks)
        if own.v_head_dim != own.head_dim and q_rope is None:
            heads = q.view(-1, own.tp_q_head_num, own.head_dim)
            q, q_rope = heads[..., : own.v_head_dim], heads[..., own.v_head_dim :]
            rows = k.view(-1, 1, own.head_dim)
            k, k_rope = rows[..., : own.v_head_dim], rows[..., own.v_head_dim :]
        if q_rope is not None:
            kwargs |= {"q_rope": q_rope, "k_rope": k_rope}
        return self.ours.forward(q, k, v, own, batch, save_kv_cache, **kwargs)

    forward_decode = forward_extend

    def _layer(self, theirs: Any, sinks: torch.Tensor | None) -> RadixAttention:
        own = self._layers.get(theirs.layer_id)
        if own is None:
            own = self._layers[theirs.layer_id] = our_layer(theirs, sinks)
        return own


class PluginMultiStepDraftBackend:
    """The multi-step draft of ours behind sglang's interface.

    Args:
        served: which.
        runner: the draft's ``ModelRunner``.
        speculative_num_steps: steps of a round.
        kernel: as of ``new_plugin_backend``.

    Raises:
        UsageError: the draft has layers with a window, whose locations planning would translate.
    """

    def __init__(
        self,
        served: ServedBackend,
        runner: Any,
        speculative_num_steps: int,
        kernel: Kernel | None = None,
    ) -> None:
        arguments = _arguments(served, runner, kernel)
        if isinstance(arguments["token_to_kv_pool"], SWAKVPool):
            accepted = "a draft whose layers see every key"
            raise UsageError(rejected(f"KV pool of {served.name}'s draft", "SWAKVPool", accepted))
        arguments["speculative_num_steps"] = speculative_num_steps
        self.ours = served.draft_backend(**arguments)
        self.needs_cpu_seq_lens = self.ours.needs_cpu_seq_lens
        self.topk, self.speculative_num_steps = 1, speculative_num_steps
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.attn_backends: Sequence[PluginBackend] = [
            PluginBackend(step, runner) for step in self.ours.attn_backends
        ]

    def _batch(self, theirs: Any) -> ForwardBatch:
        batch = self.attn_backends[0].batch(theirs)
        # A step is handed its own locations when it runs; planning needs their number alone.
        rows = len(self.attn_backends) * batch.batch_size
        return batch.with_changes(out_cache_loc=batch.out_cache_loc[:rows])

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan every step of an eager draft."""
        self.ours.init_forward_metadata(self._batch(forward_batch))

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Choose the metadata of every step."""
        self.ours.init_forward_metadata_out_graph(self._batch(forward_batch), in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Fill the metadata of every step, recorded."""
        self.ours.init_forward_metadata_in_graph(self._batch(forward_batch))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what graphs read."""
        self.ours.init_cuda_graph_state(max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """seq_lens of a padded row."""
        return self.ours.get_cuda_graph_seq_len_fill_value()

    def on_after_cuda_graph_warmup(self) -> None:
        """Undo what the warm-up before a capture changed."""
        self.ours.on_after_cuda_graph_warmup()


def new_plugin_backend(
    served: ServedBackend, runner: Any, kernel: Kernel | None = None
) -> PluginBackend:
    """The backend of a model runner for every mode but the multi-step draft.

    Args:
        served: which.
        runner: the ``ModelRunner``.
        kernel: what it attends by; the one of the device if None.
    """
    ours = served.backend(**_arguments(served, runner, kernel))
    return PluginBackend(ours, runner, has_dead_topk=served.has_dead_topk)


def _arguments(served: ServedBackend, runner: Any, kernel: Kernel | None) -> dict[str, Any]:
    family = Family.MLA if runner.use_mla_backend else Family.MHA
    if family is not served.family:
        given = f"attention of the model for {served.name}"
        raise UsageError(rejected(given, family.value, served.family.value))
    arguments = _speculation(runner)
    return {
        "kernel": kernel or served_kernel(served, device_of(runner)),
        "req_to_token_pool": runner.req_to_token_pool,
        "token_to_kv_pool": served_pool(runner.token_to_kv_pool),
        "max_context_len": runner.model_config.context_len,
        "num_draft_tokens": arguments.speculative_num_draft_tokens or 0,
        "speculative_num_steps": arguments.speculative_num_steps or 0,
        "device": runner.device,
    }


def _speculation(runner: Any) -> Any:
    """What holds the settings of speculation: from 0.5.18 on the process, before it the runner."""
    try:
        from sglang.srt.runtime_context import get_spec
    except ImportError:
        return runner.server_args
    return get_spec()
