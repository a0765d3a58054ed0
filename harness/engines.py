"""Engines by name: a pair of models on a subject's backends, eager or replayed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from harness.attention.round_plan import RoundPlan
from harness.core.case import Family
from harness.engine.eagle_worker import EagleWorker
from harness.engine.kv_lease import SlotTable
from harness.engine.models.config import DeepseekConfig, LlamaConfig
from harness.engine.models.decoder_layer import DecoderModel
from harness.engine.models.loader import Pair
from harness.engine.phases import (
    EaglePhases,
    GraphPhase,
    Phase,
    TargetOnlyPhases,
    draft_phase,
    model_phase,
)
from harness.engine.plan_stream import PlanStream
from harness.engine.prefix_cache import PrefixCache
from harness.engine.scheduler import Scheduler
from harness.engine.spec_config import SpecConfig, SpecVersion
from harness.engine.target_only_worker import TargetOnlyWorker
from harness.errors import UsageError, rejected
from harness.graphs.draft_runner import DraftRunner
from harness.graphs.factory import new_graph
from harness.graphs.graph import GraphFactory
from harness.graphs.runner import GraphRunner
from harness.graphs.target_verify_runner import TargetVerifyRunner
from harness.kernels.registry import new_kernel
from harness.subjects import PagedSubject
from harness.upstream.allocator import PagedAllocator, ReqToTokenPool
from harness.upstream.forward_batch_info import ForwardMode, LogitsProcessorOutput
from harness.upstream.memory_pool import KVPool, MHATokenToKVPool, MLATokenToKVPool


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes of an engine's pools and batches.

    Args:
        page_size: tokens per page.
        num_pages: pages of each pool, the padding page included.
        max_bs: most requests at a time.
        max_context_len: most tokens of a prompt and its generation.
        capture_bs: batch sizes with a graph; larger batches run eagerly. Empty for no graphs.
    """

    page_size: int
    num_pages: int
    max_bs: int
    max_context_len: int
    capture_bs: tuple[int, ...] = ()


class EngineBuilder:
    """Pools, backends and phases of one engine; `scheduler` puts them together.

    Args:
        pair: target and draft; their dtype and device are the pools'.
        subject: backend and kernel.
        spec_config: how far to speculate, None for the target alone.
        config: its sizes.
        graph: makes the graphs, by default those of the pair's device.

    Attributes:
        runners: those that captured graphs, by the names of their classes.

    Raises:
        UsageError: the pair is of another attention family than the subject.
    """

    def __init__(
        self,
        pair: Pair,
        subject: PagedSubject,
        spec_config: SpecConfig | None,
        config: EngineConfig,
        graph: GraphFactory | None = None,
    ) -> None:
        family = family_of(pair.target)
        if family is not subject.family:
            raise UsageError(rejected("subject", subject.name, f"one of family {family}"))
        self._pair, self._subject, self._config = pair, subject, config
        self._device, self._dtype = pair.target.lm_head.device, pair.target.lm_head.dtype
        self._spec_config, self._graph = spec_config, graph or new_graph(self._device)
        self.runners: dict[str, GraphRunner[Any, Any]] = {}
        headroom = 1
        if spec_config is not None:
            headroom = max(spec_config.num_draft_tokens, spec_config.num_steps)
        self._table = ReqToTokenPool(config.max_bs, config.max_context_len + headroom, self._device)
        self.target_pool, self.draft_pool = self._pool(pair.target), self._pool(pair.draft)
        self.slots = SlotTable(
            self._table, PagedAllocator(config.num_pages, config.page_size), self.target_pool
        )

    def scheduler(
        self, streams: PlanStream | None = None, *, prefix_cache: bool = False
    ) -> Scheduler:
        """The scheduler; v2 overlaps on streams; later prompts share pages of a prefix cache."""
        config, spec_config = self._config, self._spec_config
        worker = (
            self._target_only_worker()
            if spec_config is None
            else self._eagle_worker(spec_config, streams)
        )
        return Scheduler(
            worker,
            self.slots,
            max_bs=config.max_bs,
            max_context_len=config.max_context_len,
            prefix_cache=PrefixCache(self.slots.allocator) if prefix_cache else None,
        )

    def _target_only_worker(self) -> TargetOnlyWorker:
        target = self._backend(self._subject.backend, self.target_pool)
        extend = model_phase(self._pair.target, target)
        decode: Phase[LogitsProcessorOutput] = extend
        if self._config.capture_bs:
            decode = self._replayed(
                TargetVerifyRunner, extend, self.target_pool, ForwardMode.DECODE, 1
            )
        return TargetOnlyWorker(
            TargetOnlyPhases(extend=extend, decode=decode), self._table, self.target_pool
        )

    def _eagle_worker(self, spec_config: SpecConfig, streams: PlanStream | None) -> EagleWorker:
        phases = self._phases(spec_config)
        if self._config.capture_bs:
            phases = self._captured(phases, spec_config)
        return EagleWorker(
            phases, spec_config, self._table, self.target_pool, self.draft_pool, streams=streams
        )

    def _phases(self, spec_config: SpecConfig) -> EaglePhases:
        pair, subject, pool = self._pair, self._subject, self.draft_pool
        shared = self._round_plan(spec_config)
        target = model_phase(pair.target, self._backend(subject.backend, self.target_pool, shared))
        draft = None
        if spec_config.num_steps > 1:
            draft = draft_phase(pair.draft, self._backend(subject.draft_backend, pool, shared))
        return EaglePhases(
            target_extend=target,
            target_verify=target,
            draft_prefill=model_phase(pair.draft, self._backend(subject.backend, pool)),
            draft=draft,
            draft_extend=model_phase(pair.draft, self._backend(subject.backend, pool, shared)),
        )

    def _round_plan(self, spec_config: SpecConfig) -> RoundPlan | None:
        """The plan that captured phases of a v2 round share; v1 extends by accepted tokens."""
        shares = (
            spec_config.version is SpecVersion.V2
            and spec_config.num_steps > 1
            and self._config.capture_bs
        )
        if not shares or not self._subject.backend.shares_rounds:
            return None
        return RoundPlan(
            speculative_num_steps=spec_config.num_steps,
            num_draft_tokens=spec_config.num_draft_tokens,
        )

    def _captured(self, phases: EaglePhases, spec_config: SpecConfig) -> EaglePhases:
        extend = (self._subject.draft_extend_runner, phases.draft_extend, self.draft_pool)
        verify = (TargetVerifyRunner, phases.target_verify, self.target_pool)
        v1, width = spec_config.version is SpecVersion.V1, spec_config.num_draft_tokens
        mode = ForwardMode.DRAFT_EXTEND if v1 else ForwardMode.DRAFT_EXTEND_V2
        draft = phases.draft and self._replayed(
            DraftRunner,
            phases.draft,
            self.draft_pool,
            ForwardMode.DECODE,
            spec_config.num_steps - 1,
        )
        return replace(
            phases,
            target_verify=self._replayed(*verify, ForwardMode.TARGET_VERIFY, width),
            draft=draft,
            draft_extend=self._replayed(*extend, mode, width),
        )

    def _backend(self, kind: Any, pool: KVPool, shared: RoundPlan | None = None) -> Any:
        spec_config = self._spec_config
        return kind(
            kernel=new_kernel(self._subject.family, self._subject.capability, self._device),
            req_to_token_pool=self._table,
            token_to_kv_pool=pool,
            max_context_len=self._config.max_context_len,
            num_draft_tokens=spec_config.num_draft_tokens if spec_config else 0,
            speculative_num_steps=spec_config.num_steps if spec_config else 0,
            device=self._device,
            round_plan=shared,
        )

    def _replayed(
        self, kind: Any, phase: Any, pool: KVPool, mode: ForwardMode, width: int
    ) -> GraphPhase[Any]:
        """The phase with a captured runner; the target reads no hidden states."""
        hidden = None if kind is TargetVerifyRunner else self._pair.draft.config.hidden_size
        runner = kind(
            forward=phase.forward,
            attn_backend=phase.backend,
            new_graph=self._graph,
            capture_bs=self._config.capture_bs,
            req_to_token_pool=self._table,
            token_to_kv_pool=pool,
            mode=mode,
            num_tokens_per_req=width,
            hidden_size=hidden,
            hidden_dtype=self._dtype,
            device=self._device,
        )
        runner.capture()
        self.runners[type(runner).__name__] = runner
        return GraphPhase(phase, runner)

    def _pool(self, model: DecoderModel) -> KVPool:
        config, engine_config = model.config, self._config
        common: dict[str, Any] = {
            "num_pages": engine_config.num_pages,
            "page_size": engine_config.page_size,
            "num_layers": len(model.layers),
            "dtype": self._dtype,
            "device": self._device,
        }
        if isinstance(config, LlamaConfig):
            heads, size = config.num_key_value_heads, config.head_dim
            return MHATokenToKVPool(**common, num_kv_heads=heads, head_dim=size)
        assert isinstance(config, DeepseekConfig)
        rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
        return MLATokenToKVPool(**common, kv_lora_rank=rank, qk_rope_head_dim=rope)


def family_of(model: DecoderModel) -> Family:
    """The attention family a model's layers need."""
    return Family.MLA if isinstance(model.config, DeepseekConfig) else Family.MHA
