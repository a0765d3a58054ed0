"""The fakes take what the real packages take, so a call that the fakes bind, the real ones bind.

The packages are read, not imported: neither imports on a machine without CUDA. To have FlashInfer's
sources here: ``pip install --no-deps flashinfer-python==0.6.12``.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from fixtures.drivers.package_source import package_source
from fixtures.fakes import fake_kernels, fake_prefill

WRAPPER = fake_kernels.BatchPrefillWithPagedKVCacheWrapper
FAKES: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("flashinfer/decode.py", fake_kernels.xqa_batch_decode_with_kv_cache),
    ("flashinfer/decode.py", fake_kernels.trtllm_batch_decode_with_kv_cache),
    ("flashinfer/prefill.py", fake_prefill.trtllm_batch_context_with_kv_cache),
    ("flashinfer/mla/_core.py", fake_kernels.trtllm_batch_decode_with_kv_cache_mla),
    ("flashinfer/prefill.py", WRAPPER.__init__),
    ("flashinfer/prefill.py", WRAPPER.plan),
    ("flashinfer/prefill.py", WRAPPER.run),
    ("sgl_kernel/flash_mla.py", fake_kernels.get_mla_metadata),
    ("sgl_kernel/flash_mla.py", fake_kernels.flash_mla_with_kvcache),
)


def real(text: str, name: str) -> ast.arguments:
    """Parameters of the last definition of a qualified name; earlier ones are overloads."""
    body = ast.parse(text).body
    for part in name.split("."):
        named = [node for node in body if getattr(node, "name", None) == part]
        body = named[-1].body
    return named[-1].args


def mismatches(fake: inspect.Signature, args: ast.arguments) -> list[str]:
    """Where a call that the fake binds would not bind to the real parameters, or mean another."""
    positional = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    keyword = positional + [arg.arg for arg in args.kwonlyargs]
    required = positional[: len(positional) - len(args.defaults)]
    required += [
        arg.arg
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
        if not default
    ]
    kinds = {kind: [p.name for p in fake.parameters.values() if p.kind is kind] for kind in KINDS}
    by_place, by_name, rest = (kinds[kind] for kind in KINDS)
    found = [
        f"{place}: {mine}, really {theirs}"
        for place, (mine, theirs) in enumerate(zip(by_place, positional, strict=False))
        if mine != theirs
    ]
    found += [f"{name} is no parameter" for name in by_name if name not in keyword]
    found += [f"{name} is required" for name in required if name not in by_place + by_name]
    found += ["more arguments are not taken" for _ in rest if args.vararg is None]
    return found


KINDS = (
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
    inspect.Parameter.VAR_POSITIONAL,
)


@pytest.mark.parametrize(("file", "fake"), FAKES, ids=lambda v: getattr(v, "__qualname__", None))
def test_fake_has_the_real_parameters(file: str, fake: Callable[..., Any]) -> None:
    args = real(package_source(file), fake.__qualname__)
    assert mismatches(inspect.signature(fake), args) == []


REAL = "def f(a, b, c=1, *, d, e=2): ..."


@pytest.mark.parametrize(
    ("fake", "text"),
    [
        (lambda a, b, *, d: None, None),
        (lambda a, b, c, *, e, d: None, None),
        (lambda b, a, *, d: None, "0: b, really a"),
        (lambda a, *, d: None, "b is required"),
        (lambda a, b: None, "d is required"),
        (lambda a, b, *, d, g: None, "g is no parameter"),
        (lambda a, b, *rest, d: None, "more arguments are not taken"),
    ],
)
def test_a_mismatch_is_named(fake: Callable[..., Any], text: str | None) -> None:
    found = mismatches(inspect.signature(fake), real(REAL, "f"))
    assert text in found if text else found == []
