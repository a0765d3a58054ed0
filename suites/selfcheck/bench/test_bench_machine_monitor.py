"""A monitor reports the conditions of the machine, and other processes on its GPU."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections import namedtuple
from types import SimpleNamespace

import pytest

from harness.bench import machine_monitor, nvml
from harness.bench.machine_monitor import MachineMonitor, problems_now


def reading(*processes, **facts):
    usual = {"mhz": 1980.0, "celsius": 40.0, "throttled": (), "capped": False}
    return nvml.GpuReading(**usual | facts, processes=frozenset(processes))


class Gpu:
    machine, pcie_full = "driver 1, MIG off", False

    def __init__(self):
        self.reads = 0

    def read(self):
        self.reads += 1
        return reading(
            *((10, 11) if self.reads < 3 else (10, 11, 99)),
            mhz=1000.0 if self.reads == 1 else 1980.0,
            celsius=40.0 + self.reads,
            throttled=("power brake",) if self.reads == 2 else (),
            capped=self.reads in (1, 3),
        )


def test_a_monitor_reports_the_gpu_and_other_processes(monkeypatch):
    monkeypatch.setattr(machine_monitor, "PERIOD_S", 0.001)
    fake = Gpu()
    with MachineMonitor(gpu=fake, present=frozenset({10})) as monitor:
        while fake.reads < 5:
            time.sleep(0.001)
    facts = monitor.facts()
    assert facts["foreign_processes"] == 2  # 10 was there before any server, 99 came
    assert facts["throttled"] == ("power brake",)
    said = "a power cap in the first of several readings is that of the load before: not counted"
    assert facts["capped"] == pytest.approx(1 / (fake.reads - 1)), said
    assert facts["mhz"] == 1980.0
    assert facts["celsius"] == 40.0 + fake.reads
    assert (facts["machine"], facts["pcie_full"]) == ("driver 1, MIG off", False)


def test_a_process_that_came_and_went_is_another_one_on_the_gpu():
    monitor = MachineMonitor(gpu=Gpu(), present=frozenset({10}))
    monitor.readings = [reading(10, 11), reading(10, 11, 99), reading(10, 11)]
    said = "10 was there before any server, and 99 computed for a while"
    assert monitor.facts()["foreign_processes"] == 2, said


def test_a_trial_is_as_hot_as_its_hottest_moment():
    monitor = MachineMonitor(gpu=Gpu())
    monitor.readings = [reading(celsius=celsius) for celsius in (41.0, 71.0, 55.0)]
    assert monitor.facts()["celsius"] == 71.0


def test_the_clock_of_a_trial_is_that_of_most_of_it():
    monitor = MachineMonitor(gpu=Gpu())
    monitor.readings = [reading(mhz=mhz) for mhz in (1980.0, 1200.0, 345.0, 1230.0, 1215.0)]
    said = "neither the boost before the load nor the idle clock after it: the median"
    assert monitor.facts()["mhz"] == 1215.0, said


def test_a_single_reading_tells_the_power_cap():
    with MachineMonitor(gpu=Gpu()) as monitor:
        pass
    assert len(monitor.readings) == 1
    assert monitor.facts()["capped"] == 1.0


def test_without_a_gpu_only_the_host_is_told_and_our_own_work_is_no_load(monkeypatch):
    clocks = iter([(0.0, 100.0, 10.0), (10.0, 109.0, 16.0)])
    monkeypatch.setattr(MachineMonitor, "_clocks", lambda _: next(clocks))
    monkeypatch.setattr(machine_monitor.psutil, "cpu_count", lambda: 2)
    with MachineMonitor() as monitor:
        pass
    # Nine seconds of work in ten, six of them ours, on two cores.
    assert monitor.facts() == {"load": pytest.approx(0.15)}


def test_the_time_of_guests_is_counted_once(monkeypatch):
    # proc(5): user has that of guests, nice that of their niced ones.
    fields = {"user": 50.0, "nice": 30.0, "system": 7.0, "idle": 900.0, "iowait": 11.0}
    fields |= {"irq": 1.0, "softirq": 2.0, "steal": 3.0, "guest": 40.0, "guest_nice": 25.0}
    host = namedtuple("host", fields)(**fields)
    monkeypatch.setattr(machine_monitor.psutil, "cpu_times", lambda: host)
    _, busy, _ = MachineMonitor()._clocks()
    assert busy == 93.0, f"guests' 65 s are in the 80 of user and nice: 93 s of work, not {busy}"


def test_work_of_a_process_that_began_and_ended_meanwhile_is_ours():
    monitor = MachineMonitor()
    _, _, before = monitor._clocks()
    spin = "import time\nwhile time.process_time() < 0.6: pass"
    subprocess.run([sys.executable, "-c", spin], check=True)
    _, _, after = monitor._clocks()
    told = "CPU seconds of a child that has ended are ours: 0.6"
    # Clocks tick a hundred times a second.
    assert 0.5 <= after - before < 5.0, f"{told}, not {after - before}"


@pytest.mark.parametrize(
    ("busy", "said"), [(9.0, ["load: 0.9, accepted: others under half the cores"]), (4.0, [])]
)
def test_problems_now_say_why_blocks_would_be_dropped(monkeypatch, busy, said):
    clocks = iter([(0.0, 0.0, 0.0), (10.0, busy, 0.0)])
    monkeypatch.setattr(MachineMonitor, "_clocks", lambda _: next(clocks))
    monkeypatch.setattr(machine_monitor.psutil, "cpu_count", lambda: 1)
    assert [*problems_now(MachineMonitor(), 0.0)] == said


def test_problems_now_name_processes_on_the_gpu():
    fake = Gpu()
    found = problems_now(MachineMonitor(gpu=fake, present=fake.read().processes), 0.0)
    assert "foreign_processes: 2, accepted: no other process computes on the GPU" in found


def test_our_work_is_that_of_this_process_and_of_the_servers():
    with MachineMonitor(leaders=[2**22 - 1]) as monitor:
        wall, busy, own = monitor._clocks()
    assert wall > 0
    assert 0.0 < own <= busy


def test_what_a_child_of_a_server_starts_is_ours_too():
    # As the scheduler of a server that a wrapper started.
    nap = "import time; time.sleep(60)"
    start = f"p = subprocess.Popen([sys.executable, '-c', {nap!r}], stdout=subprocess.DEVNULL)"
    script = f"import subprocess, sys\n{start}\nprint(p.pid, flush=True)\np.wait()"
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        grandchild = int(child.stdout.readline())
        ours = {process.pid for process in MachineMonitor()._ours()}
        os.kill(grandchild, signal.SIGKILL)
    finally:
        child.kill()
        child.communicate()
    assert {child.pid, grandchild} <= ours, "work of children's children is no load"


def test_a_machine_without_nvml_has_no_gpu(monkeypatch):
    def absent():
        raise nvml.pynvml.NVMLError(nvml.pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(nvml.pynvml, "nvmlInit", absent)
    assert nvml.first() is None


@pytest.mark.parametrize(
    ("shown", "index"), [("2,3", 2), ("", 0), (None, 0), ("GPU-b", 1), ("GPU-cd,GPU-a", 2)]
)
def test_the_gpu_that_cuda_counts_first_is_watched(monkeypatch, shown, index):
    uuids = ("GPU-ab12", "GPU-bc23", "GPU-cd34")
    monkeypatch.setattr(nvml, "count", lambda: len(uuids))
    monkeypatch.setattr(nvml.pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(nvml.pynvml, "nvmlDeviceGetUUID", lambda handle: uuids[handle])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    monkeypatch.setattr(nvml, "Nvml", lambda index: index)
    assert nvml.first() == index


@pytest.mark.parametrize("fault", [None, PermissionError])
def test_priority_is_raised_where_that_is_allowed(monkeypatch, fault):
    asked = []

    def set_priority(*args):
        asked.append(args)
        if fault:
            raise fault

    monkeypatch.setattr(machine_monitor.os, "setpriority", set_priority)
    machine_monitor.raise_priority()
    assert asked == [(machine_monitor.os.PRIO_PROCESS, 0, -10)]


def test_whoever_listens_at_a_url_is_its_server(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert machine_monitor.listeners(f"http://127.0.0.1:{port}") == [os.getpid()]
    assert machine_monitor.listeners(f"http://127.0.0.1:{port}") == []

    def denied(**_):
        raise machine_monitor.psutil.AccessDenied

    monkeypatch.setattr(machine_monitor.psutil, "net_connections", denied)
    assert machine_monitor.listeners("http://127.0.0.1:80") == []


@pytest.mark.parametrize(
    ("url", "pid"), [("http://host", 1080), ("https://host", 1443), ("http://host:81", 1081)]
)
def test_a_url_without_a_port_has_that_of_its_scheme(monkeypatch, url, pid):
    listening = machine_monitor.psutil.CONN_LISTEN
    sockets = [
        SimpleNamespace(status=listening, laddr=SimpleNamespace(port=port), pid=1000 + port)
        for port in (80, 81, 443)
    ]
    monkeypatch.setattr(machine_monitor.psutil, "net_connections", lambda **_: sockets)
    said = "an attached server is no other process, whether its URL names its port or not"
    assert machine_monitor.listeners(url) == [pid], said


def test_nvml_is_read(monkeypatch):
    real = nvml.pynvml
    reasons = real.nvmlClocksEventReasonHwPowerBrakeSlowdown | real.nvmlClocksEventReasonSwPowerCap

    def refuse(*_):
        raise real.NVMLError(real.NVML_ERROR_NOT_SUPPORTED)

    answers = {
        "nvmlInit": None, "nvmlDeviceGetHandleByIndex": "handle",
        "nvmlSystemGetDriverVersion": "580.1", "nvmlDeviceGetVbiosVersion": "96",
        "nvmlDeviceGetEccMode": [1, 1], "nvmlDeviceGetCurrPcieLinkWidth": 8,
        "nvmlDeviceGetMaxPcieLinkWidth": 16, "nvmlDeviceGetCurrentClocksEventReasons": reasons,
        "nvmlDeviceGetClockInfo": 1980, "nvmlDeviceGetTemperature": 41,
        "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=5)],
    }  # fmt: skip
    for name, value in answers.items():
        monkeypatch.setattr(real, name, lambda *_, value=value: value)
    monkeypatch.setattr(real, "nvmlDeviceGetMigMode", refuse)
    device = nvml.first()
    assert device.machine == "driver 580.1, VBIOS 96, MIG Not Supported, ECC [1, 1]"
    assert device.pcie_full is False
    assert device.read() == nvml.GpuReading(
        mhz=1980.0,
        celsius=41.0,
        throttled=("power brake",),
        capped=True,
        processes=frozenset({5}),
    )
