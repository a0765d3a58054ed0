"""Which graphs a device has."""

from __future__ import annotations

from functools import partial

import torch

from harness.graphs.cuda import CudaGraph
from harness.graphs.graph import GraphFactory
from harness.graphs.tape import Tape


def new_graph(device: torch.device | str) -> GraphFactory:
    """What captures on this device: a tape on a CPU, a CUDA graph on a GPU."""
    return Tape if torch.device(device).type == "cpu" else partial(CudaGraph, device)
