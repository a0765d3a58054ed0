"""The command gives one verdict of many kinds, goes on after a kill, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fixtures.clusters.local_cluster import LocalCluster
from fixtures.plan import trials
from fixtures.pytest_plugin.poll import eventually
from harness.core.paths import ROOT
from harness.core.record import read_records
from harness.core.signals import hear_sigint

KINDS = ("--declared", "--kinds", "sm90,sm100", "--workers-per-gpu", "1")


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster({"sm90": 1.0}, {"sm100": 1.0}) as made:
        yield made


def command(cluster: LocalCluster, report: Path, words: str, *more: str) -> list[str]:
    where = ("--address", cluster.address, "--tree", str(ROOT), "--report", str(report))
    return [sys.executable, "-m", "ci.cluster", "run", *where, *more, "--", "-k", words]


def planned(rows: str) -> int:
    """Trials on a CPU of rows whose ids start so."""
    return sum(case.id.startswith(rows) for case, *_ in trials())


def asked_processes() -> list[psutil.Process]:
    """Pytests of a cluster that run now, below this process's own clusters or beside them."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if "--questions" in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def test_kinds_are_one_verdict(cluster: LocalCluster, tmp_path: Path) -> None:
    words = command(cluster, tmp_path, "mha-decode-bs2_ragged", *KINDS)
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    records = list(read_records(tmp_path / "run" / "records.jsonl"))
    assert {record.kind for record in records} == {"sm90", "sm100"}
    assert len({record.trial for record in records}) == len(records)
    lines = map(json.loads, (tmp_path / "run" / "ended.jsonl").read_text().splitlines())
    ran = {(line["kind"], line["place"]) for line in lines}
    assert len(ran) == len({place for _, place in ran}) == 2, "tests of a kind end on its node"
    each = planned("mha-decode-bs2_ragged")
    for kind in ("sm90", "sm100"):
        assert f"{kind}: planned {each} = run {each}" in done.stdout
    assert (tmp_path / "run" / "index.html").is_file()
    eventually(lambda: not asked_processes())


def test_workers_on_this_machine_have_the_packages_of_the_command(tmp_path: Path) -> None:
    """As those of a bundle, which lie on no path of the interpreter's own."""
    (tmp_path / "carried_plugin.py").write_text("import carried_package\n")
    (tmp_path / "carried_package.py").write_text("")
    report = ("--report", str(tmp_path / "report"))
    words = ["-k", "mha-decode-bs2_ragged and eager", "-p", "carried_plugin"]
    done = subprocess.run(
        [sys.executable, "-m", "ci.cluster", "run", *report, "--", *words], cwd=ROOT, check=False,
        env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_kind_that_nobody_has_is_red_and_named(cluster: LocalCluster, tmp_path: Path) -> None:
    more = ("--declared", "--kinds", "sm90,sm120", "--workers-per-gpu", "1", "--wait", "1")
    words = command(cluster, tmp_path, "mha-decode-bs2_ragged and xqa", *more)
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "run on sm120: waits for a node of sm120: none is there" in done.stdout
    assert "run on sm120: no node in 1 s; all of it stays unverified" in done.stdout
    assert "differential trials that its kernels run stay unverified" in done.stdout
    assert "gate: no records of sm120" in done.stdout


def test_a_lane_of_commands_that_nobody_ran_is_red(cluster: LocalCluster, tmp_path: Path) -> None:
    where = ("--address", cluster.address, "--tree", str(ROOT), "--report", str(tmp_path))
    more = ("--declared", "--kinds", "sm120", "--wait", "1", "--", "--a", "embedded:pair=gqa")
    words = [sys.executable, "-m", "ci.cluster", "bench", *where, *more]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "bench on sm120: no node in 1 s" in done.stdout
    assert done.returncode == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_driver_that_ends_frees_every_gpu_and_goes_on(
    cluster: LocalCluster, tmp_path: Path, how: signal.Signals
) -> None:
    words = command(cluster, tmp_path, "mha-decode", *KINDS)
    records = tmp_path / "run" / "records.jsonl"
    with subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.DEVNULL, preexec_fn=hear_sigint
    ) as process:
        eventually(lambda: records.is_file() and records.stat().st_size > 0, within_s=60.0)
        assert asked_processes()
        second = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        assert second.returncode == 2
        assert "accepted: a folder that no other run writes to" in second.stderr
        process.send_signal(how)
        code = process.wait(30)
    assert code == (-how if how is signal.SIGKILL else 130)
    eventually(lambda: not asked_processes(), within_s=20.0)
    before = len(records.read_text().splitlines())
    began = time.time()
    again = command(cluster, tmp_path, "mha-decode", *KINDS, "--resume")
    done = subprocess.run(again, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = list(read_records(records))
    assert len({record.trial for record in found}) == len(found)
    kept = [line for line in found if time.mktime(time.gmtime(began)) and line.recorded]
    assert len(kept) == len(found) >= before
    assert f"planned {2 * planned('mha-decode-')} = " in done.stdout


def test_an_address_where_nothing_is_is_one_line(tmp_path: Path) -> None:
    where = ("--address", "127.0.0.2:1", "--report", str(tmp_path))
    words = [sys.executable, "-m", "ci.cluster", "run", *where]
    quick = os.environ | {"RAY_gcs_server_port_wait_time_s": "1"}
    done = subprocess.run(
        words, cwd=ROOT, env=quick, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("cluster: --address 127.0.0.2:1: ")
    assert "Traceback" not in done.stderr
