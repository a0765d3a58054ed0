"""The graph factory of each device."""

from __future__ import annotations

from functools import partial

import torch

from harness.graphs.cuda import CudaGraph
from harness.graphs.graph import GraphFactory
from harness.graphs.tape import Tape


def new_graph(device: torch.device | str) -> GraphFactory:
    """The graph factory of this device: of tapes on a CPU, of CUDA graphs on a GPU."""
    return Tape if torch.device(device).type == "cpu" else partial(CudaGraph, device)
