"""Functions of sglang that need CUDA, and what a CPU runs in their place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from harness.graphs.host_syncs import INTERNAL_FILES
from harness.sglang.gpu import is_supported
from harness.sglang.stubs.sgl_kernel import sgl_per_tensor_quant_fp8
from harness.sglang.triton_attention import chosen, decode_attention_fwd, extend_attention_fwd

INTERNAL_FILES.add(__file__)
FP8 = torch.float8_e4m3fn


def quantize(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """``x / scale`` in FP8, saturating."""
    limit = torch.finfo(FP8).max
    scaled = x.float() if scale is None else x.float() / scale.float()
    return scaled.clamp(-limit, limit).to(FP8)


def fused_fp8_qkv_kv_cache(
    q: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_loc: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Write k and v [T, …] in FP8 to slots cache_loc [T]; the query in FP8 [T, …], unscaled."""
    for cache, rows, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
        flat = rows.reshape(len(rows), -1)
        cache.view(-1, flat.shape[1])[cache_loc] = quantize(flat, scale)
    return None if q is None else quantize(q.reshape(len(q), -1), None)


def scaled_fp8_quant(
    x: torch.Tensor, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """X in FP8 and its scale [1], which follows from the largest value if None."""
    made = torch.empty_like(x, dtype=FP8)
    is_static = scale is not None
    used = torch.zeros(1) if scale is None else scale
    sgl_per_tensor_quant_fp8(x, made, used, is_static)
    return made, used


@dataclass(frozen=True)
class Patch:
    """One function that is replaced.

    Args:
        name: of the function.
        modules: below ``sglang.``, where releases keep it; the first that exists.
        replacement: of the same signature.
        reason: why the real one cannot run.
        stays: whether the original serves the trials that ask for it.
    """

    name: str
    modules: tuple[str, ...]
    replacement: Callable[..., Any]
    reason: str
    stays: bool = False


_TRITON = ("kernels.ops.attention.{0}", "srt.layers.attention.triton_ops.{0}")
_MLA = "srt.layers.attention.trtllm_mla_backend"
PATCHES = (
    *(
        Patch(
            f"is_{generation}_supported",
            ("srt.utils.common", "srt.utils"),
            is_supported(generation),
            "asks CUDA",
        )
        for generation in ("sm90", "sm100", "sm120")
    ),
    Patch(
        "fused_fp8_qkv_kv_cache",
        ("kernels.ops.kvcache.fused_fp8_qkv_kv_cache", "jit_kernel.fused_fp8_qkv_kv_cache"),
        fused_fp8_qkv_kv_cache,
        "a CUDA kernel compiled at its first call",
    ),
    *(
        Patch(
            function.__name__,
            tuple(folder.format(module) for folder in _TRITON),
            function,
            "interpreted, a launch takes seconds",
            stays=True,
        )
        for module, function in (
            ("decode_attention", decode_attention_fwd),
            ("extend_attention", extend_attention_fwd),
        )
    ),
    Patch(
        "scaled_fp8_quant",
        ("srt.layers.quantization.fp8_kernel", "kernels.ops.quantization.fp8_kernel"),
        scaled_fp8_quant,
        "imports its CUDA kernel on CUDA alone",
    ),
    Patch("_jit_fixup_module", (_MLA,), lambda dtype: None, "compiles a CUDA kernel"),
    Patch(
        "can_use_set_mla_kv_concat_q",
        (_MLA,),
        lambda *_: False,
        "a CUDA kernel; without it the pool writes and torch concatenates",
    ),
    Patch(
        "can_use_set_mla_kv_concat_q_fp8",
        (_MLA,),
        lambda *_: False,
        "a CUDA kernel; without it the pool writes and torch concatenates",
    ),
)


def apply_patches() -> None:
    """Replace what this release has of ``PATCHES``."""
    for patch in PATCHES:
        for name in patch.modules:
            try:
                module = import_module(f"sglang.{name}")
            except ModuleNotFoundError:
                continue
            if hasattr(module, patch.name):
                replacement = patch.replacement
                if patch.stays:
                    replacement = chosen(getattr(module, patch.name), replacement)
                setattr(module, patch.name, replacement)
    _allow_triton()


def _allow_triton() -> None:
    """The CPU platform says that it has no Triton; the interpreter is one."""
    try:
        platform = import_module("sglang.srt.platforms").current_platform
    except (ModuleNotFoundError, AttributeError):
        return
    capabilities = getattr(platform, "capabilities", None)
    if capabilities is not None and not capabilities.supports_triton:
        replaced = import_module("msgspec").structs.replace
        type(platform).capabilities = replaced(capabilities, supports_triton=True)


class WithoutCUDA(TorchFunctionMode):
    """Memory that is asked for on CUDA or pinned is the CPU's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` with both requests taken out."""
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to and kwargs.get("device") == args[0].device:
            # A tensor's own device; the host is asked for by its name, positionally.
            del kwargs["device"]
            if len(args) == 1 and not kwargs:
                return args[0]
        return func(*args, **kwargs)
