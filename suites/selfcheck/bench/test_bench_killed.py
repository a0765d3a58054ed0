"""A benchmark that is killed leaves no process and no half line, and goes on to a whole block.

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
    "--passes=2",  # not the default
)


SERVERS = {"serve", "sglang.launch_server"}
"""What a command of one of them has among its words."""


@pytest.fixture
def is_embedded(request):
    """Whether its servers are this project's."""
    return request.config.getoption("--server") == "embedded"


@pytest.fixture
def words(request, is_embedded):
    """Of the command."""
    option = request.config.getoption
    if is_embedded:
        arm = f"embedded:pair={option('--server-pair')}"
        return (f"--a={arm}", f"--sessions={Role.INJECTED}", *WORDS)
    arm = f"sglang:pair={option('--server-pair')},backend={option('--server-backend')}"
    arm += f",python={option('--server-python')}"
    if option("--server-args"):
        arm += f",args={shlex.join(option('--server-args'))}"
    return (f"--a={arm}", f"--sessions={Role.SAME}", *WORDS)


@pytest.fixture
def patience_s(is_embedded):
    """Until a trial has ended; a real server compiles its kernels before."""
    return 120 + (0 if is_embedded else FIRST_S)


def trials(path):
    try:
        return [line for line in read(path) if isinstance(line, Trial)]
    except UsageError:  # not there: the command makes it, to know that it can, and removes it again
        return []


@pytest.mark.usefixtures("recorded")
def test_a_benchmark_killed_in_a_trial_leaves_nothing_and_goes_on(
    words, is_embedded, patience_s, tmp_path, capsys, monkeypatch
):
    # One benchmark answers every question, since each start of a server takes seconds.
    monkeypatch.setattr(bench, "raise_priority", lambda: None)  # would outlive the test
    out = tmp_path / "bench.jsonl"
    command = (sys.executable, "-m", "harness", "bench", *words, f"--out={out}")
    with subprocess.Popen(command, cwd=ROOT) as running:
        try:
            eventually(lambda: trials(out), within_s=patience_s)
            left = psutil.Process(running.pid).children(recursive=True)
            servers = [one for one in left if SERVERS & {*one.cmdline()}]
        finally:
            running.kill()  # its next trial has begun
    assert running.returncode == -signal.SIGKILL
    assert len(servers) >= 2
    assert psutil.wait_procs(left, timeout=30)[1] == []
    assert out.read_bytes().endswith(b"}\n")
    kept = list(read(out))
    assert [type(line) for line in kept] == [Session, Trial]
    session = kept[0]
    assert (session.warm_ups, session.passes) == (1, 2)
    if is_embedded:
        assert session.role is Role.INJECTED
        assert "--slowdown" in session.b.command
        assert "--slowdown" not in session.a.command

    again = [*words, f"--out={out}", "--resume"]
    assert bench.main(again) == 1  # a control alone is no verdict
    lines = list(read(out))
    assert lines[: len(kept)] == kept
    assert all(found.evidence.over for found in findings(lines))
    assert "verdict: invalid" in capsys.readouterr().out
    measured = trials(out)[1:]  # the block that was cut off is measured as a whole
    assert {(trial.block, trial.place) for trial in measured} == {(0, 0), (0, 1)}
    for trial in trials(out):
        assert trial.invalid == ()
        assert trial.conditions.output_tokens == 2 * 2 * 32
        assert (trial.conditions.cached_tokens, trial.conditions.flushed) == (0, True)
        assert trial.conditions.correct is True
        assert trial.flush_tries >= 2
    if is_embedded:
        # Both arms decode the same tokens in the same steps, however long they take.
        assert len({trial.metrics["accept_length"] for trial in trials(out)}) == 1
        assert measured[0].metrics["accept_length"] > 1.5

    assert bench.main(again) == 1
    assert list(read(out)) == lines  # nothing is left to measure
