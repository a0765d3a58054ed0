"""A benchmark that is killed leaves no process and no half line, and goes on where it was.

Its servers are of the kind that ``--server`` names.
"""

import shlex
import signal
import subprocess
import sys

import psutil
import pytest

from fixtures import bench
from fixtures.pytest_plugin.poll import eventually
from fixtures.pytest_plugin.servers import FIRST_S
from harness.bench.jsonl import read
from harness.bench.session_records import Session, Trial
from harness.core.paths import ROOT
from harness.errors import UsageError

pytestmark = pytest.mark.untraced
WORDS = (
    "--sessions=A/A",
    "--workloads=smoke-bs2-in32-out32",
    "--design=pairs",
    "--blocks-at-most=1",
    "--warm-ups=1",
    "--passes=3",
)


SERVERS = {"serve", "sglang.launch_server"}
"""What a command of one of them has among its words."""


@pytest.fixture
def words(request):
    """Of the command."""
    option = request.config.getoption
    if option("--server") == "embedded":
        return (f"--a=embedded:pair={option('--server-pair')}", *WORDS)
    arm = f"sglang:pair={option('--server-pair')},backend={option('--server-backend')}"
    arm += f",python={option('--server-python')}"
    if option("--server-args"):
        arm += f",args={shlex.join(option('--server-args'))}"
    return (f"--a={arm}", *WORDS)


@pytest.fixture
def patience_s(request):
    """Until a trial has ended; a real server compiles its kernels before."""
    return 120 + (0 if request.config.getoption("--server") == "embedded" else FIRST_S)


def trials(path):
    try:
        return [line for line in read(path) if isinstance(line, Trial)]
    except UsageError:  # not there: the command makes it, to know that it can, and removes it again
        return []


@pytest.mark.usefixtures("recorded")
def test_a_benchmark_killed_in_a_trial_leaves_nothing_and_goes_on(
    words, patience_s, tmp_path, monkeypatch
):
    monkeypatch.setattr(bench, "raise_priority", lambda: None)  # would outlive the test
    out = tmp_path / "bench.jsonl"
    command = [sys.executable, "-m", "harness", "bench", *words, f"--out={out}"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as running:
        process = psutil.Process(running.pid)
        eventually(lambda: trials(out), within_s=patience_s)
        left = process.children(recursive=True)
        servers = [one for one in left if SERVERS & {*one.cmdline()}]
        running.kill()  # its next trial has begun
    assert running.returncode == -signal.SIGKILL
    assert len(servers) >= 2
    assert psutil.wait_procs(left, timeout=30)[1] == []
    assert out.read_bytes().endswith(b"}\n")
    kept = list(read(out))
    assert [type(line) for line in kept[:2]] == [Session, Trial]
    assert len(kept) == 2
    assert bench.main([*words, f"--out={out}", "--resume"]) == 1  # a control alone is no verdict
    lines = list(read(out))
    assert lines[: len(kept)] == kept
    done = {(line.block, line.place) for line in trials(out) if not line.invalid}
    assert done == {(0, 0), (0, 1)}
