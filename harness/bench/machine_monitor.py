"""Conditions of the machine during a trial: other processes, clocks, temperature, power caps."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol
from urllib.parse import urlsplit

import psutil

from harness.bench.nvml import GpuReading
from harness.bench.stats.validity import Conditions, reasons

PERIOD_S = 0.1
CHECK_S = 1.0
NICENESS = -10
USUAL_PORTS = {"http": 80, "https": 443}
"""Of a URL that names none."""


class Gpu(Protocol):
    """A GPU that is sampled; see ``harness.bench.nvml``."""

    machine: str
    pcie_full: bool

    def read(self) -> GpuReading:
        """Its state now."""


@dataclass
class MachineMonitor:
    """Samples of the host, and of a GPU where there is one, while its context is open.

    Args:
        gpu: None on a machine without one.
        present: processes that computed on the GPU before any server was started.
        leaders: process ids of the servers; they, this process and all their children are ours.
    """

    gpu: Gpu | None = None
    present: frozenset[int] = frozenset()
    leaders: Sequence[int] = ()
    readings: list[GpuReading] = field(default_factory=list)
    load: float = 0.0

    def __enter__(self) -> MachineMonitor:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._before = self._clocks()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        wall, busy, own = (b - a for a, b in zip(self._before, self._clocks(), strict=True))
        # Processes that ended may have taken their time with them: less than none may be left.
        self.load = max(0.0, busy - own) / (wall * (psutil.cpu_count() or 1))

    def _sample(self) -> None:
        while self.gpu:
            self.readings.append(self.gpu.read())
            if self._ended.wait(PERIOD_S):
                return

    def _clocks(self) -> tuple[float, float, float]:
        """Seconds of wall time, of all cores' work, and of the part that is ours."""
        host = psutil.cpu_times()
        # Linux counts the time of guests in that of users, too.
        idle = sum(getattr(host, name, 0.0) for name in ("iowait", "guest", "guest_nice"))
        busy = sum(host) - host.idle - idle
        return time.monotonic(), busy, sum(map(_spent, self._ours()))

    def _ours(self) -> set[psutil.Process]:
        found = set()
        for pid in (os.getpid(), *self.leaders):
            try:
                leader = psutil.Process(pid)
                found |= {leader, *leader.children(recursive=True)}
            except psutil.NoSuchProcess:
                continue
        return found

    def facts(self) -> dict[str, Any]:
        """Fields of ``Conditions``; those of a GPU only where there is one."""
        if not self.readings or self.gpu is None:
            return {"load": self.load}
        seen = self.readings
        known = seen[0].processes - self.present
        throttled = sorted({reason for reading in seen for reason in reading.throttled})
        # The first reading's power cap is that of the load before.
        capped = [reading.capped for reading in seen[1:] or seen]
        return {
            "load": self.load,
            "foreign_processes": len(frozenset().union(*(r.processes for r in seen)) - known),
            "throttled": tuple(throttled),
            "capped": sum(capped) / len(capped),
            "mhz": median(reading.mhz for reading in seen),
            "celsius": max(reading.celsius for reading in seen),
            "machine": self.gpu.machine,
            "pcie_full": self.gpu.pcie_full,
        }


def problems_now(monitor: MachineMonitor, seconds: float = CHECK_S) -> tuple[str, ...]:
    """Why a block measured now would be dropped, before any server was started."""
    with monitor:
        time.sleep(seconds)
    return reasons([Conditions(**monitor.facts())])


def _spent(process: psutil.Process) -> float:
    """Seconds of all cores, those of its children that ended among them."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)


def listeners(url: str) -> list[int]:
    """Processes of this host that listen at a URL: an attached server's work is no load either."""
    parts = urlsplit(url)
    port = parts.port or USUAL_PORTS[parts.scheme]
    with contextlib.suppress(psutil.AccessDenied):
        sockets: list[Any] = psutil.net_connections(kind="tcp")
        heard = {s.pid for s in sockets if s.status == psutil.CONN_LISTEN and s.laddr.port == port}
        return sorted(pid for pid in heard if pid)
    return []


def raise_priority() -> None:
    """Raise this process's priority, and so that of what it starts, where that is allowed."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
