"""Capabilities: the limits of each kernel as data, and the refusals that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.core.case import Case, Dtype, Family, KVDtype, Mode
from harness.core.numerics import ANY_MODE, DECODE_KERNEL, PLAIN, Numerics


@dataclass(frozen=True, kw_only=True)
class Capability:
    """The limits of one kernel family.

    Args:
        name: the kernel's name in test ids and reports.
        families: attention families it serves.
        head_dims: accepted query/key head sizes (MHA), empty for any.
        page_sizes: accepted KV page sizes in tokens, empty for any.
        dtypes: accepted query dtypes.
        kv_dtypes: accepted KV cache dtypes.
        max_group_size: most query heads per KV head.
        max_fp8_group_elements: most query elements per KV head over an FP8 cache, 0 for any.
        mla_dims: accepted (kv_lora_rank, qk_rope_head_dim) (MLA), empty for any.
        max_q_len: most query tokens per request in a decode call.
        max_window_q_len: the same where a sliding window is on.
        window: whether a sliding window is served.
        sinks: whether attention sinks are served.
        needs_packed_mask: whether q_len > 1 needs an explicit packed causal mask (XQA does).
        casts_query_to_kv_dtype: whether an FP8 cache wants an FP8 query (trtllm-gen) or
            refuses one (XQA).
        needs_packed_query: whether it ignores the strides of its query.
        block_table_multiple: block-table widths must be a multiple of
            ``block_table_multiple / page_size`` (trtllm-gen MLA: 128); 1 for no rule.
        compute_capabilities: (major, minor) of the GPUs it runs on, empty for any device.
        numerics: of the real kernel; the reference in its place has plain ones.
        source: of the limits.
    """

    name: str
    families: frozenset[Family]
    head_dims: frozenset[int] = frozenset()
    page_sizes: frozenset[int] = frozenset()
    dtypes: frozenset[Dtype]
    kv_dtypes: frozenset[KVDtype]
    max_group_size: int = 64
    max_fp8_group_elements: int = 0
    mla_dims: frozenset[tuple[int, int]] = frozenset()
    max_q_len: int = 16
    max_window_q_len: int = 16
    window: bool = True
    sinks: bool = True
    needs_packed_mask: bool = False
    casts_query_to_kv_dtype: bool = False
    needs_packed_query: bool = True
    block_table_multiple: int = 1
    compute_capabilities: frozenset[tuple[int, int]] = frozenset()
    numerics: Numerics = PLAIN
    source: str


ANY_DTYPE = frozenset(Dtype)
HALF = frozenset({Dtype.BF16, Dtype.FP16})
HALF_KV = frozenset({KVDtype.AUTO, KVDtype.FP8})
BLACKWELL = frozenset({(10, 0), (10, 3)})

REFERENCE = Capability(
    name="reference",
    families=frozenset(Family),
    dtypes=ANY_DTYPE,
    kv_dtypes=frozenset(KVDtype),
    source="harness/kernels/reference.py accepts whatever the math allows",
)
XQA = Capability(
    name="xqa",
    families=frozenset({Family.MHA}),
    head_dims=frozenset({64, 128, 256}),
    page_sizes=frozenset({16, 32, 64, 128}),
    dtypes=HALF,
    kv_dtypes=HALF_KV,
    max_group_size=32,
    max_fp8_group_elements=30 * 256,
    max_window_q_len=1,
    needs_packed_mask=True,
    compute_capabilities=frozenset({(9, 0), (12, 0), (12, 1)}),
    numerics=Numerics(
        budget_factor=1.25,
        rounds_query=DECODE_KERNEL,
        rounds_weights=DECODE_KERNEL,
        unrounded_with_sinks=frozenset({Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND_V2}),
        spreads_nan=frozenset({KVDtype.FP8}),
        source="flashinfer 0.6.12, csrc/xqa: split keys leave 16-bit partial results; over an FP8 "
        "cache mha_sm90.cu multiplies in FP8 and loads whole pages; where several queries meet "
        "sinks, flashinfer/xqa.py takes mha.cu in its place",
    ),
    source="flashinfer 0.6.12, flashinfer/xqa.py; csrc/xqa/mha.cu holds 32 query heads of 256, and "
    "has no window for queries in front of the last; mha_sm90.cu joins split keys of 32 heads of "
    "256 in 66,624 bytes of shared memory, of 31 in 64,544, and its launch has 63,360",
)
TRTLLM_GEN_MHA = Capability(
    name="trtllm_gen",
    families=frozenset({Family.MHA}),
    head_dims=frozenset({64, 128, 256}),
    page_sizes=frozenset({16, 32, 64}),
    dtypes=HALF,
    kv_dtypes=HALF_KV,
    casts_query_to_kv_dtype=True,
    needs_packed_query=False,
    compute_capabilities=BLACKWELL,
    numerics=Numerics(rounds_query=ANY_MODE),
    source="flashinfer 0.6.12, flashinfer/decode.py trtllm_batch_decode_with_kv_cache; the query's "
    "strides are handed on in csrc/trtllm_fmha_kernel_launcher.cu",
)
TRTLLM_GEN_MLA = Capability(
    name="trtllm_gen",
    families=frozenset({Family.MLA}),
    mla_dims=frozenset({(512, 64), (256, 64)}),
    page_sizes=frozenset({32, 64}),
    dtypes=frozenset({Dtype.BF16}),
    kv_dtypes=HALF_KV,
    window=False,
    sinks=False,
    max_group_size=128,
    casts_query_to_kv_dtype=True,
    block_table_multiple=128,
    compute_capabilities=BLACKWELL,
    numerics=Numerics(rounds_query=ANY_MODE),
    source="flashinfer 0.6.12, flashinfer/mla.py trtllm_batch_decode_with_kv_cache_mla",
)
FLASH_MLA = Capability(
    name="flash_mla",
    families=frozenset({Family.MLA}),
    mla_dims=frozenset({(512, 64)}),
    page_sizes=frozenset({64}),
    dtypes=HALF,
    kv_dtypes=frozenset({KVDtype.AUTO}),
    window=False,
    sinks=False,
    max_group_size=128,
    compute_capabilities=frozenset({(9, 0)}),
    numerics=Numerics(
        spreads_nan=frozenset({Mode.DRAFT_EXTEND}),
        source="sglang-kernel 0.4.4 on an H200: its padded queries see keys nobody wrote",
    ),
    source="sglang-kernel 0.4.4, sgl_kernel/flash_mla.py",
)

FLASHINFER_MHA = Capability(
    name="flashinfer",
    families=frozenset({Family.MHA}),
    head_dims=frozenset({64, 128, 256}),
    dtypes=HALF,
    kv_dtypes=HALF_KV,
    sinks=False,
    source="flashinfer 0.6.12, flashinfer/prefill.py and decode.py, backend fa2 on pages of one "
    "token; sglang's backend hands it no sinks",
)
FLASHINFER_MLA = Capability(
    name="flashinfer",
    families=frozenset({Family.MLA}),
    mla_dims=frozenset({(512, 64)}),
    dtypes=HALF,
    kv_dtypes=HALF_KV,
    window=False,
    sinks=False,
    max_group_size=128,
    source="flashinfer 0.6.12, flashinfer/mla.py BatchMLAPagedAttentionWrapper; sglang's backend "
    "casts an FP8 cache to the query's dtype",
)
TRITON = Capability(
    name="triton",
    families=frozenset(Family),
    dtypes=HALF,
    kv_dtypes=HALF_KV,
    max_group_size=128,
    source="sglang 0.5.23, kernels/ops/attention/decode_attention.py and extend_attention.py mask "
    "every size to the next power of two",
)
# TRITON's own kernels, interpreted; where they are not, the reference takes their place.
INTERPRETED = replace(
    TRITON,
    name="interpreted",
    kv_dtypes=frozenset({KVDtype.AUTO}),
    source="as triton; over an FP8 cache its kernels round query and weights, which nothing models",
)


Table = dict[tuple[Family, str], Capability]


def _table(*capabilities: Capability) -> Table:
    return {(family, row.name): row for row in capabilities for family in row.families}


CAPABILITIES = _table(REFERENCE, XQA, TRTLLM_GEN_MHA, TRTLLM_GEN_MLA, FLASH_MLA)
# Of kernels that SGLang's own backends alone call; `specgate limits` has nothing to ask. On sm100
# they hand over a strided query, which the unlimited kernel takes there.
SGLANG_CAPABILITIES = CAPABILITIES | _table(
    replace(REFERENCE, needs_packed_query=False),
    FLASHINFER_MHA,
    FLASHINFER_MLA,
    TRITON,
    INTERPRETED,
)


def device_refusal(capability: Capability, gpu: tuple[int, int] | None) -> str | None:
    """Why this kernel cannot run on this GPU, or None if it can.

    Args:
        capability: of the kernel.
        gpu: its compute capability; None where the strict reference stands in for the kernel.
    """
    gpus = capability.compute_capabilities
    if gpu is None or not gpus or gpu in gpus:
        return None
    needed = " or ".join(f"{major}.{minor}" for major, minor in sorted(gpus))
    present = "{}.{}".format(*gpu)
    return f"{capability.name} needs compute capability {needed}, this device has {present}"


def refusal(
    case: Case, capability: Capability, compute_capability: tuple[int, int] | None = None
) -> str | None:
    """Why this kernel cannot serve this case, in one phrase, or None if it can.

    Args:
        case: the row.
        capability: of the kernel.
        compute_capability: of the GPU; None where the strict reference stands in for the kernel.
    """
    reason = device_refusal(capability, compute_capability)
    if reason is not None:
        return reason
    of_family = _mha_limits if case.family is Family.MHA else _mla_limits
    for accepted, field, value, allowed in _limits(case, capability) + of_family(case, capability):
        if not accepted:
            shown = sorted(map(str, allowed)) if isinstance(allowed, frozenset) else allowed
            return f"{capability.name} refuses {field} {value}: accepts {shown}"
    return None


Limit = tuple[bool, str, object, object]


def _limits(case: Case, capability: Capability) -> tuple[Limit, ...]:
    pages, group, q_len = capability.page_sizes, case.group_size, _decode_q_len(case)
    most, longest = capability.max_group_size, capability.max_q_len
    window, longest_windowed = case.window_left, capability.max_window_q_len
    fits = window < 0 or q_len <= longest_windowed
    accepted = f"-1 where a request has more than {longest_windowed} query tokens"
    return (
        (case.family in capability.families, "family", case.family, capability.families),
        (not pages or case.page_size in pages, "page_size", case.page_size, pages),
        (case.dtype in capability.dtypes, "dtype", case.dtype, capability.dtypes),
        (case.kv_dtype in capability.kv_dtypes, "kv_dtype", case.kv_dtype, capability.kv_dtypes),
        (group <= most, "group_size", group, f"<= {most}"),
        (q_len <= longest, "q_len", q_len, f"<= {longest}"),
        (window < 0 or capability.window, "window_left", window, "-1"),
        (fits, "window_left", window, accepted),
        (not case.sinks or capability.sinks, "sinks", case.sinks, "False"),
    )


def _mha_limits(case: Case, capability: Capability) -> tuple[Limit, ...]:
    dims = capability.head_dims
    most, elements = capability.max_fp8_group_elements, case.group_size * case.head_dim
    held = not most or case.kv_dtype is not KVDtype.FP8 or elements <= most
    return (
        (not dims or case.head_dim in dims, "head_dim", case.head_dim, dims),
        (held, "group_size * head_dim", elements, f"<= {most} over an FP8 cache"),
    )


def _mla_limits(case: Case, capability: Capability) -> tuple[Limit, ...]:
    dims, own = capability.mla_dims, (case.kv_lora_rank, case.qk_rope_head_dim)
    return ((not dims or own in dims, "kv_lora_rank, qk_rope_head_dim", own, dims),)


def _decode_q_len(case: Case) -> int:
    """Query tokens per request in one decode call; 1 where queries are ragged or steps follow."""
    uniform = case.mode in (Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND_V2)
    return max(case.q_lens, default=1) if uniform else 1
