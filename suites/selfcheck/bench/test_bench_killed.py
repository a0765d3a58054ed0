"""A benchmark that is killed leaves no process and no half line, and goes on to a verdict.

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
from harness.bench.analysis import findings
from harness.bench.jsonl import read
from harness.bench.session_records import Role, Session, Trial
from harness.core.paths import ROOT
from harness.errors import UsageError

pytestmark = pytest.mark.untraced
WORDS = (
    "--workloads=smoke-bs2-in32-out32",
    "--design=pairs",
    "--blocks-at-most=1",
    "--warm-ups=1",
)
EMBEDDED = ("--sessions=injected", "--passes=2")
REAL = ("--sessions=A/A", "--passes=3")
"""A trial of a real server is over in a moment."""

SERVERS = {"serve", "sglang.launch_server"}
"""What a command of one of them has among its words."""


@pytest.fixture
def words(request):
    """Of the command."""
    option = request.config.getoption
    if option("--server") == "embedded":
        return (f"--a=embedded:pair={option('--server-pair')}", *EMBEDDED, *WORDS)
    arm = f"sglang:pair={option('--server-pair')},backend={option('--server-backend')}"
    arm += f",python={option('--server-python')}"
    if option("--server-args"):
        arm += f",args={shlex.join(option('--server-args'))}"
    return (f"--a={arm}", *REAL, *WORDS)


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
    words, patience_s, tmp_path, monkeypatch, capsys
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
    if {*EMBEDDED} <= {*words}:
        look_through(lines)
    assert bench.main([*words, f"--out={out}", "--resume"]) == 1
    assert list(read(out)) == lines, "all was measured, and is not measured again"
    told = capsys.readouterr().out
    assert "verdict: invalid" in told or {*REAL} <= {*words}


def look_through(lines):
    """What the embedded server, once as it is and once slowed down, must have left."""
    session, *made = lines
    assert session.role is Role.INJECTED
    assert (session.warm_ups, session.passes) == (1, 2)
    assert "--slowdown" in session.b.command
    assert "--slowdown" not in session.a.command
    for trial in made:
        assert trial.invalid == ()
        assert trial.conditions.output_tokens == 2 * 2 * 32
        assert (trial.conditions.cached_tokens, trial.conditions.flushed) == (0, True)
        assert trial.conditions.correct is True
        assert trial.flush_tries >= 1
    # Both arms decode the same tokens in the same steps, however long they take.
    assert len({trial.metrics["accept_length"] for trial in made}) == 1
    assert made[0].metrics["accept_length"] > 1.5
    assert all(found.evidence.over for found in findings(lines))
