"""A case: one frozen row of a table; everything that follows from it is a property."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from enum import StrEnum

from harness.errors import UsageError, rejected


class Family(StrEnum):
    """Attention family."""

    MHA = "mha"
    MLA = "mla"


class Mode(StrEnum):
    """One phase of speculative decoding; the value is the name used by ``pytest -k``."""

    EXTEND = "extend"
    DECODE = "decode"
    MULTI_STEP_DRAFT = "multi_step_draft"
    TARGET_VERIFY = "target_verify"
    DRAFT_EXTEND = "draft_extend_v1"
    DRAFT_EXTEND_V2 = "draft_extend_v2"
    IDLE = "idle"


class Execution(StrEnum):
    """Execution of a case: eager, or a replay of a captured graph."""

    EAGER = "eager"
    GRAPH = "graph"


class Layout(StrEnum):
    """Layout of a request's pages in the pool; each breaks another wrong assumption."""

    CONTIGUOUS = "contiguous"
    SHUFFLED = "shuffled"
    INTERLEAVED = "interleaved"


class Dtype(StrEnum):
    """Dtype of activations; the value is torch's name."""

    BF16 = "bfloat16"
    FP16 = "float16"
    FP32 = "float32"


class KVDtype(StrEnum):
    """Dtype of the KV cache; ``auto`` is the dtype of the activations."""

    AUTO = "auto"
    FP8 = "float8_e4m3fn"


class Inputs(StrEnum):
    """Kind of a case's inputs: random, or traced so that outputs name the keys that were read.

    Weighted are traced ones whose softmax weights and values FP8 holds exactly, and not all alike.
    """

    RANDOM = "random"
    # The value that goldens were recorded with.
    TRACED = "watched"
    WEIGHTED = "weighted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One case.

    A case is given per request: ``prefix_lens`` tokens are in the cache and committed before the
    forward, ``q_lens`` tokens are computed by it. The arguments of a backend (``seq_lens``,
    already advanced or not) depend on the mode and are derived.

    Args:
        id: written by hand, names the edge, unique over all tables.
        family: MHA (also GQA and MQA) or MLA.
        mode: the phase of speculative decoding.
        prefix_lens: committed tokens per request, before this forward.
        extend_lens: new tokens per request; extend mode only.
        accept_lens: accepted tokens per request including the bonus token; both draft extends.
            v1 computes exactly these rows, v2 computes num_draft_tokens rows and uses the
            row accept_len - 1.
        num_draft_tokens: query tokens per request in target_verify and draft_extend_v2.
        num_steps: speculative steps; a multi-step draft runs num_steps - 1 forwards.
        page_size: tokens per KV page.
        layout: page layout in the pool.
        num_q_heads: query heads.
        num_kv_heads: KV heads (MHA); MLA has one latent head.
        head_dim: query/key/value head size (MHA).
        kv_lora_rank: latent size (MLA).
        qk_rope_head_dim: rotary part of the key (MLA).
        dtype: dtype of activations.
        kv_dtype: dtype of the cache.
        k_scale: per-tensor scale of cached keys in the first layer (FP8 only); see ``kv_scales``.
        v_scale: per-tensor scale of cached values (FP8 only).
        window_left: keys a query sees to its left besides itself, -1 for all; a windowed case has
            one full layer and one windowed layer that lives in the SWA pool.
        sinks: whether each query head has an attention sink.
        max_context_len: the model's context length.
        capture_bs: batch sizes the graph runner captures.
        padded_rows: rows of DP padding after the real ones in an eager batch.
        pads_before_plan: whether DP padding raised batch_size before the plan.
        inputs: random or traced.
    """

    id: str
    family: Family
    mode: Mode
    prefix_lens: tuple[int, ...]
    extend_lens: tuple[int, ...] = ()
    accept_lens: tuple[int, ...] = ()
    num_draft_tokens: int = 4
    num_steps: int = 5
    page_size: int = 16
    layout: Layout = Layout.SHUFFLED
    num_q_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    dtype: Dtype = Dtype.BF16
    kv_dtype: KVDtype = KVDtype.AUTO
    k_scale: float = 1.0
    v_scale: float = 1.0
    window_left: int = -1
    sinks: bool = False
    max_context_len: int = 256
    capture_bs: tuple[int, ...] = (1, 2, 4, 8)
    padded_rows: int = 0
    pads_before_plan: bool = False
    inputs: Inputs = Inputs.RANDOM

    def __post_init__(self) -> None:
        needs_extend = self.mode is Mode.EXTEND
        needs_accept = self.mode in (Mode.DRAFT_EXTEND, Mode.DRAFT_EXTEND_V2)
        for field, given, needed in (
            ("extend_lens", self.extend_lens, needs_extend),
            ("accept_lens", self.accept_lens, needs_accept),
        ):
            if len(given) != (self.bs if needed else 0):
                accepted = f"{self.bs if needed else 0} values in mode {self.mode}"
                raise UsageError(f"case {self.id}: {rejected(field, given, accepted)}")
        if self.mode is Mode.IDLE and self.prefix_lens:
            raise UsageError(f"case {self.id}: {rejected('prefix_lens', self.prefix_lens, '()')}")
        if any(not 1 <= n <= self.num_draft_tokens for n in self.accept_lens):
            accepted = f"1 … num_draft_tokens = {self.num_draft_tokens} each"
            raise UsageError(
                f"case {self.id}: {rejected('accept_lens', self.accept_lens, accepted)}"
            )
        if max(self.prefix_lens, default=0) > self.max_context_len:
            accepted = f"<= max_context_len = {self.max_context_len} each"
            raise UsageError(
                f"case {self.id}: {rejected('prefix_lens', self.prefix_lens, accepted)}"
            )
        if max(self.total_lens, default=0) > self.max_total_len:
            accepted = (
                f"prefix + new <= {self.max_total_len}, context and one round of draft tokens"
            )
            raise UsageError(f"case {self.id}: {rejected('total_lens', self.total_lens, accepted)}")
        if self.num_q_heads % self.num_kv_heads:
            accepted = f"a multiple of num_kv_heads = {self.num_kv_heads}"
            raise UsageError(
                f"case {self.id}: {rejected('num_q_heads', self.num_q_heads, accepted)}"
            )

    @property
    def bs(self) -> int:
        """Requests in the batch."""
        return len(self.prefix_lens)

    @property
    def q_lens(self) -> tuple[int, ...]:
        """Query tokens per request in one forward; for the multi-step draft, over all its steps."""
        match self.mode:
            case Mode.EXTEND:
                return self.extend_lens
            case Mode.DRAFT_EXTEND:
                return self.accept_lens
            case Mode.TARGET_VERIFY | Mode.DRAFT_EXTEND_V2:
                return (self.num_draft_tokens,) * self.bs
            case Mode.MULTI_STEP_DRAFT:
                return (self.num_steps - 1,) * self.bs
            case Mode.DECODE:
                return (1,) * self.bs
            case Mode.IDLE:
                return ()

    @property
    def num_tokens(self) -> int:
        """Query tokens in the batch."""
        return sum(self.q_lens)

    @property
    def total_lens(self) -> tuple[int, ...]:
        """Tokens per request after the forward."""
        return tuple(p + q for p, q in zip(self.prefix_lens, self.q_lens, strict=True))

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return (
            self.num_q_heads if self.family is Family.MLA else self.num_q_heads // self.num_kv_heads
        )

    @property
    def num_layers(self) -> int:
        """Two, so that a layer mixed up with another is seen."""
        return 2

    @property
    def max_total_len(self) -> int:
        """Longest length any request may reach: the context and one round of draft tokens."""
        return self.max_context_len + max(self.num_draft_tokens, self.num_steps)

    @property
    def kv_scales(self) -> tuple[tuple[float, float], ...]:
        """(k_scale, v_scale) of every layer; layers of an FP8 cache differ in them.

        Weighted scores are whole at one k_scale. A scale of 1 stays: some pools have no other.
        """
        k_scale, v_scale = first = self.k_scale, self.v_scale
        if self.inputs is Inputs.WEIGHTED:
            return (first,) * self.num_layers
        own = k_scale if k_scale == 1 else k_scale / 2, v_scale if v_scale == 1 else v_scale / 8
        return first, own

    @property
    def scaling(self) -> float:
        """Of the softmax argument; twice the usual, so that keys differ in weight.

        Scores of weighted inputs are whole, and it makes their weights powers of two.
        """
        if self.inputs is Inputs.WEIGHTED:
            return math.log(2) / (self.k_scale if self.kv_dtype is KVDtype.FP8 else 1.0)
        mla = self.family is Family.MLA
        dim = self.kv_lora_rank + self.qk_rope_head_dim if mla else self.head_dim
        return 2.0 / math.sqrt(dim)

    @property
    def seed(self) -> int:
        """Derived from the id alone, so that editing another row changes nothing here."""
        return int.from_bytes(hashlib.sha256(self.id.encode()).digest()[:4], "big")
