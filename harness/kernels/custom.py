"""A kernel of somebody else's: one function, under the Capability that it states."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from harness.core.capability import Capability
from harness.errors import UsageError, rejected
from harness.kernels.checked import CheckedKernel
from harness.kernels.interface import AttentionCall, ContextCall, DecodeCall
from harness.kernels.torch_ops import opaque

Function = Callable[[AttentionCall], torch.Tensor]
FORM = "MODULE:FUNCTION, a function of a DecodeCall or ContextCall with a Capability as .capability"


def load_function(name: str) -> Function:
    """The function of that name.

    Raises:
        UsageError: the module or the function is missing, or it states no Capability.
    """
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{rejected('--kernel', name, FORM)} ({error})") from error
    if not callable(found) or not isinstance(getattr(found, "capability", None), Capability):
        raise UsageError(rejected("--kernel", name, FORM))
    function: Function = found
    return function


class CustomKernel(CheckedKernel):
    """Calls the function for every entry, checked against its Capability before each call.

    To a tape each call is one opaque operation, as a launch is to a CUDA graph: what the function
    does inside is not recorded step by step, and it may read its tensors on the host.

    Args:
        function: called with a ``DecodeCall`` or a ``ContextCall``; returns [T, heads, value dim]
            in the call's ``out_dtype``.
    """

    def __init__(self, function: Function) -> None:
        capability: Capability = function.capability  # type: ignore[attr-defined]
        decode, context = _operations(function)
        launches = {"decode": decode, "context": context}
        super().__init__(capability, launches | {f"mla_{k}": v for k, v in launches.items()})


_registered: dict[Function, tuple[Callable[..., torch.Tensor], ...]] = {}


def _operations(function: Function) -> tuple[Callable[..., torch.Tensor], ...]:
    """The two operations of a function; registered once, since an operation's name is global."""
    if function not in _registered:
        made = []
        for kind, call in (("decode", DecodeCall), ("context", ContextCall)):
            launch = opaque(kind, f"custom{len(_registered)}_{kind}", _run(function, call))
            made.append(_spread(launch))
        _registered[function] = tuple(made)
    return _registered[function]


def _run(function: Function, call: type[AttentionCall]) -> Callable[..., torch.Tensor]:
    def run(**fields: Any) -> torch.Tensor:
        fields["caches"] = tuple(fields["caches"])
        return function(call(**fields))

    return run


def _spread(launch: Callable[..., torch.Tensor]) -> Callable[[AttentionCall], torch.Tensor]:
    return lambda call: launch(**call.arguments)
