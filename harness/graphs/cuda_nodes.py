"""Nodes of a captured CUDA graph, read from the driver through ``cuda.bindings``."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from typing import Any

from harness.errors import ContractError, UsageError

PREFIX = "cudaGraphNodeType"


def bindings(part: str) -> Any:
    """``cuda.bindings.runtime`` or ``cuda.bindings.driver``.

    Raises:
        UsageError: the package is missing.
    """
    try:
        return import_module(f"cuda.bindings.{part}")
    except ImportError as error:
        raise UsageError(
            "nodes of a CUDA graph are counted by cuda-bindings, which is not installed"
        ) from error


def node_counts(graph: int) -> Counter[str]:
    """Nodes by kind: ``kernel``, ``memcpy``, ``memset`` and what else the runtime names.

    Args:
        graph: a ``cudaGraph_t``.

    Raises:
        UsageError: cuda-bindings is missing.
        ContractError: the runtime refuses the graph.
    """
    runtime = bindings("runtime")
    return Counter(_kind(runtime, node) for node in _nodes(runtime, graph))


def kernel_names(graph: int) -> list[str]:
    """Mangled names of the kernels, in no certain order; "" for one without a name.

    Raises:
        UsageError: cuda-bindings is missing.
        ContractError: the runtime refuses the graph.
    """
    runtime, driver = bindings("runtime"), bindings("driver")
    nodes = _nodes(runtime, graph)
    return [_name(driver, node) for node in nodes if _kind(runtime, node) == "kernel"]


def _nodes(runtime: Any, graph: int) -> list[Any]:
    _, count = _answer(runtime.cudaGraphGetNodes(graph, 0))
    return list(_answer(runtime.cudaGraphGetNodes(graph, count))[0])[:count] if count else []


def _kind(runtime: Any, node: Any) -> str:
    [kind] = _answer(runtime.cudaGraphNodeGetType(node))
    return str(kind.name).removeprefix(PREFIX).lower()


def _name(driver: Any, node: Any) -> str:
    error, params = driver.cuGraphKernelNodeGetParams(driver.CUgraphNode(int(node)))
    if int(error):
        return ""
    # A kernel of a library has a CUkernel and no CUfunction.
    if int(params.func):
        error, name = driver.cuFuncGetName(params.func)
    else:
        error, name = driver.cuKernelGetName(params.kern)
    return "" if int(error) else bytes(name).decode()


def _answer(returned: tuple[Any, ...]) -> tuple[Any, ...]:
    error, *values = returned
    if int(error):
        raise ContractError(f"the CUDA runtime refuses a graph: {error}")
    return tuple(values)
