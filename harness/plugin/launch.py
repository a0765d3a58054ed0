"""Settings of a server that these backends do not serve, refused before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.core.case import Family, KVDtype
from harness.errors import UsageError, rejected
from harness.plugin.served import SERVED, ServedBackend

KV_DTYPES = {"auto": KVDtype.AUTO, "bfloat16": KVDtype.AUTO, "bf16": KVDtype.AUTO}
KV_DTYPES |= {"fp8_e4m3": KVDtype.FP8}
"""Values of ``--kv-cache-dtype`` that a Capability may accept."""
SWITCHES = (
    "enable_dp_attention",
    "enable_mixed_chunk",
    "enable_two_batch_overlap",
    "enable_hierarchical_cache",
    "enable_deterministic_inference",
)
"""Switches of a server that these backends were not tried with."""


def chosen(arguments: Any) -> list[ServedBackend]:
    """The backends of ours that a server is started with."""
    names = (
        arguments.attention_backend,
        arguments.prefill_attention_backend,
        arguments.decode_attention_backend,
        arguments.speculative_draft_attention_backend,
    )
    return [SERVED[name] for name in dict.fromkeys(names) if name in SERVED]


def check_launch(arguments: Any, device: str) -> None:
    """Refuse a server's arguments.

    Args:
        arguments: ``ServerArgs``, its defaults filled in.
        device: that the server will run on.

    Raises:
        UsageError: naming the first that is not served, its value and what is.
    """
    for served in chosen(arguments):
        for name, value, accepted in _refused(served, arguments, device):
            raise UsageError(f"{served.name}: {rejected(name, value, accepted)}")


def _refused(
    served: ServedBackend, arguments: Any, device: str
) -> Iterator[tuple[str, object, str]]:
    capability = served.capability(device)
    # From 0.5.20 on only the model runner knows; backends check it, too, when they are made.
    if hasattr(arguments, "use_mla_backend"):
        family = Family.MLA if arguments.use_mla_backend() else Family.MHA
        if family is not served.family:
            yield "attention of the model", family.value, served.family.value
    topk = arguments.speculative_eagle_topk
    if topk not in (None, 1):
        yield "speculative_eagle_topk", topk, "1: the draft is a chain"
    width = arguments.speculative_num_draft_tokens or 0
    if width > capability.max_q_len:
        yield "speculative_num_draft_tokens", width, f"<= {capability.max_q_len}"
    if arguments.page_size not in capability.page_sizes:
        yield "page_size", arguments.page_size, _listed(capability.page_sizes)
    kv_dtypes = [name for name, kind in KV_DTYPES.items() if kind in capability.kv_dtypes]
    if arguments.kv_cache_dtype not in kv_dtypes:
        yield "kv_cache_dtype", arguments.kv_cache_dtype, ", ".join(kv_dtypes)
    for name in SWITCHES:
        if getattr(arguments, name, False):
            yield name, True, "False"


def _listed(numbers: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
