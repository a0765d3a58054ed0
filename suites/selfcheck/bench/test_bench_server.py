"""A benchmark of the embedded server, by its command line: launched, flushed, measured, resumed."""

import pytest

from fixtures import bench
from harness.bench.analysis import findings
from harness.bench.jsonl import read
from harness.bench.session_records import Role, Session, Trial

pytestmark = pytest.mark.untraced
WORDS = (
    "--a=embedded:pair=gqa",
    "--sessions=injected",
    "--workloads=smoke-bs2-in32-out32",
    "--design=pairs",
    "--blocks-at-most=1",
    "--warm-ups=1",
    "--passes=1",
)


@pytest.mark.usefixtures("recorded")
def test_one_block_of_a_control(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "raise_priority", lambda: None)  # would outlive the test
    out = tmp_path / "bench.jsonl"
    assert bench.main([*WORDS, f"--out={out}"]) == 1  # a control alone is no verdict
    lines = list(read(out))
    sessions = [line for line in lines if isinstance(line, Session)]
    trials = [line for line in lines if isinstance(line, Trial)]
    assert [session.role for session in sessions] == [Role.INJECTED]
    assert {(session.warm_ups, session.passes) for session in sessions} == {(1, 1)}
    assert "--slowdown" in sessions[0].b.command
    assert "--slowdown" not in sessions[0].a.command
    assert len(trials) == 2
    for trial in trials:
        assert trial.invalid == ()
        assert trial.conditions.output_tokens == 2 * 32
        assert (trial.conditions.cached_tokens, trial.conditions.flushed) == (0, True)
        assert trial.conditions.correct is True
        assert trial.flush_tries >= 1
    # Both arms decode the same tokens in the same steps, however long they take.
    assert len({trial.metrics["accept_length"] for trial in trials}) == 1
    assert trials[0].metrics["accept_length"] > 1.5
    assert bench.main([*WORDS, f"--out={out}", "--resume"]) == 1
    assert list(read(out)) == lines
    assert all(found.evidence.over for found in findings(lines))
    assert "verdict: invalid" in capsys.readouterr().out
