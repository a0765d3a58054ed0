"""Nodes of a captured graph are counted by kind and named, or it is said why they are not."""

from __future__ import annotations

import sys
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

from harness.errors import ContractError, UsageError
from harness.graphs.cuda_nodes import kernel_names, node_counts

GRAPH = 77


class Kind(IntEnum):
    cudaGraphNodeTypeKernel = 0  # noqa: N815
    cudaGraphNodeTypeMemset = 2  # noqa: N815


class Runtime:
    """Two kernels, one of them of a library, and a fill; asked for their number, or for all."""

    kinds = (
        Kind.cudaGraphNodeTypeKernel,
        Kind.cudaGraphNodeTypeMemset,
        Kind.cudaGraphNodeTypeKernel,
    )

    def cudaGraphGetNodes(self, graph: int, room: int) -> tuple[int, list[int], int]:  # noqa: N802
        if graph != GRAPH or room not in (0, len(self.kinds)):
            return 1, [], 0
        return 0, list(range(room)), len(self.kinds)

    def cudaGraphNodeGetType(self, node: int) -> tuple[int, Kind]:  # noqa: N802
        return 0, self.kinds[node]


class Driver:
    """Names of them."""

    CUgraphNode = staticmethod(int)

    def cuGraphKernelNodeGetParams(self, node: int) -> tuple[int, Any]:  # noqa: N802
        return 0, SimpleNamespace(func=9 if node == 0 else 0, kern=5)

    def cuFuncGetName(self, function: int) -> tuple[int, bytes]:  # noqa: N802
        return 0, b"metadata"

    def cuKernelGetName(self, kernel: int) -> tuple[int, bytes]:  # noqa: N802
        return 1, b""


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", Runtime())
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", Driver())


@pytest.mark.usefixtures("bindings")
def test_nodes_are_counted_and_kernels_named() -> None:
    assert node_counts(GRAPH) == {"kernel": 2, "memset": 1}
    assert kernel_names(GRAPH) == ["metadata", ""]


@pytest.mark.usefixtures("bindings")
def test_a_graph_the_runtime_does_not_know_is_refused() -> None:
    with pytest.raises(ContractError, match="refuses a graph: 1"):
        node_counts(3)


@pytest.mark.usefixtures("bindings")
def test_an_empty_graph_has_no_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runtime, "kinds", ())
    assert not node_counts(GRAPH)


def test_without_the_package_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(UsageError, match="cuda-bindings, which is not installed"):
        node_counts(GRAPH)
