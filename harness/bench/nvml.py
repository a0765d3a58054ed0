"""State of one GPU, read through NVML."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pynvml  # type: ignore[import-untyped]

THROTTLES = {
    "hardware slowdown": pynvml.nvmlClocksEventReasonHwSlowdown,
    "hardware thermal": pynvml.nvmlClocksEventReasonHwThermalSlowdown,
    "power brake": pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
    "software thermal": pynvml.nvmlClocksEventReasonSwThermalSlowdown,
}
"""Reasons of a lower clock that are never accepted."""


@dataclass(frozen=True, kw_only=True)
class GpuReading:
    """State of a GPU at one moment.

    Args:
        mhz: SM clock.
        celsius: temperature.
        throttled: names of ``THROTTLES`` that hold.
        capped: whether the software power cap holds.
        processes: ids of those that compute, as the driver numbers them.
    """

    mhz: float
    celsius: float
    throttled: tuple[str, ...]
    capped: bool
    processes: frozenset[int]


class Nvml:
    """One GPU of this machine.

    Args:
        index: NVML's.
    """

    def __init__(self, index: int = 0) -> None:
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self.machine = ", ".join(
            (
                f"driver {pynvml.nvmlSystemGetDriverVersion()}",
                f"VBIOS {_asked(pynvml.nvmlDeviceGetVbiosVersion, self._handle)}",
                f"MIG {_asked(pynvml.nvmlDeviceGetMigMode, self._handle)}",
                f"ECC {_asked(pynvml.nvmlDeviceGetEccMode, self._handle)}",
            )
        )
        width = _asked(pynvml.nvmlDeviceGetCurrPcieLinkWidth, self._handle)
        self.pcie_full = width == _asked(pynvml.nvmlDeviceGetMaxPcieLinkWidth, self._handle)

    @property
    def gib(self) -> float:
        """Its memory."""
        return float(pynvml.nvmlDeviceGetMemoryInfo(self._handle).total) / (1 << 30)

    def read(self) -> GpuReading:
        """Its state now."""
        handle = self._handle
        reasons = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        return GpuReading(
            mhz=float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
            celsius=float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
            throttled=tuple(name for name, bit in THROTTLES.items() if reasons & bit),
            capped=bool(reasons & pynvml.nvmlClocksEventReasonSwPowerCap),
            processes=frozenset(
                process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            ),
        )


def _asked(query: Any, handle: Any) -> Any:
    """The answer, or why there is none: some facts exist on some GPUs only."""
    try:
        return query(handle)
    except pynvml.NVMLError as error:
        return str(error)


def first() -> Nvml | None:
    """The first GPU that CUDA_VISIBLE_DEVICES shows, None on a machine without one."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    try:
        return Nvml(_index(shown))
    except pynvml.NVMLError:
        return None


def _index(shown: str) -> int:
    """Of a GPU by its number or its UUID, whose end CUDA lets a user leave out; 0 for no name."""
    if shown.isdigit():
        return int(shown)
    for index in range(count() if shown else 0):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        if str(pynvml.nvmlDeviceGetUUID(handle)).startswith(shown):
            return index
    return 0


def count() -> int:
    """How many GPUs this machine has."""
    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0
