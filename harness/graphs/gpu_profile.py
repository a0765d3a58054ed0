"""A GPU's launches, copies and waits, counted from the rows of a profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

GRAPH_LAUNCH = "cudaGraphLaunch"
MEMORY = ("Memcpy", "Memset")
EVENTS = ("Stream Wait", "Stream Sync", "Event Sync", "Context Sync")
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Runtime calls that make the host wait; a profile brings ``cudaDeviceSynchronize`` along."""


@dataclass(frozen=True)
class ProfileRow:
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
    """The work of a region on a GPU.

    Args:
        done: kernels, copies and fills by name, wherever they were launched.
        launched: those of them that the host launched one by one.
        graph_launches: replays of a graph.
        waits: runtime calls that made the host wait, by name.
    """

    done: Counter[str] = field(default_factory=Counter)
    launched: Counter[str] = field(default_factory=Counter)
    graph_launches: int = 0
    waits: Counter[str] = field(default_factory=Counter)

    @property
    def kernels(self) -> Counter[str]:
        """Everything but copies and fills of memory."""
        return Counter({k: n for k, n in self.done.items() if not k.startswith(MEMORY)})

    @property
    def copies(self) -> Counter[str]:
        """Copies by direction, as ``DtoH``."""
        # The name of one is "Memcpy DtoH (Device -> Pageable)".
        found: Counter[str] = Counter()
        for name, times in self.done.items():
            if name.startswith("Memcpy"):
                found[name.split()[1]] += times
        return found

    @property
    def replayed(self) -> int:
        """The part that graphs launched."""
        return self.done.total() - self.launched.total()


def tally(rows: Iterable[ProfileRow]) -> Activity:
    """Count the rows. Work without a call of its own is taken as launched one by one."""
    rows = list(rows)
    calls = [row for row in rows if not row.on_device]
    replays = {row.correlation for row in calls if row.name.startswith(GRAPH_LAUNCH)}
    # A wait between streams is told as a row of the device.
    done = [row for row in rows if row.on_device and not row.name.startswith(EVENTS)]
    return Activity(
        done=Counter(row.name for row in done),
        launched=Counter(row.name for row in done if row.correlation not in replays),
        graph_launches=len(replays),
        waits=Counter(row.name for row in calls if row.name in WAITS),
    )
