"""What a GPU was asked to do and did, from the rows of a profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

GRAPH_LAUNCH = "cudaGraphLaunch"
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Runtime calls that make the host wait; a profile brings ``cudaDeviceSynchronize`` along."""


@dataclass(frozen=True)
class Row:
    """One line of a profile.

    Args:
        name: of the kernel, the copy or the runtime call.
        on_device: whether the GPU did it; otherwise the host asked for it.
        correlation: equal for a call and whatever it made the GPU do.
    """

    name: str
    on_device: bool
    correlation: int


@dataclass(frozen=True)
class Activity:
    """What a region made a GPU do.

    Args:
        kernels: that ran, by name, wherever they were launched.
        launched: kernels, copies and fills that the host launched one by one.
        copies: by direction, as ``DtoH``, wherever they were launched.
        graph_launches: replays of a graph.
        waits: runtime calls that made the host wait, by name.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    launched: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    graph_launches: int = 0
    waits: Counter[str] = field(default_factory=Counter)


def tally(rows: Iterable[Row]) -> Activity:
    """Count the rows. Work without a call of its own is taken as launched one by one."""
    rows = list(rows)
    calls = [row for row in rows if not row.on_device]
    replays = {row.correlation for row in calls if row.name.startswith(GRAPH_LAUNCH)}
    done = [row for row in rows if row.on_device]
    # Else "Memcpy DtoH (Device -> Pageable)" or "Memset (Device)".
    return Activity(
        kernels=Counter(row.name for row in done if not row.name.startswith(("Memcpy", "Memset"))),
        launched=Counter(row.name for row in done if row.correlation not in replays),
        copies=Counter(row.name.split()[1] for row in done if row.name.startswith("Memcpy")),
        graph_launches=len(replays),
        waits=Counter(row.name for row in calls if row.name in WAITS),
    )
