"""The self-check counts the verdicts of its benchmarks, and leaves none of them running."""

import io
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from rich.console import Console

from fixtures.pytest_plugin.poll import eventually
from harness.bench import selfcheck
from harness.bench.session_records import Role
from harness.bench.stats.bench_verdict import BenchVerdict
from harness.core.paths import ROOT
from suites.selfcheck.bench.test_bench_analysis import judged, records


def test_a_selfcheck_counts_what_was_left_alone_and_what_was_found(tmp_path):
    records(tmp_path / "bench.jsonl", blocks=8, role=Role.INJECTED)
    injected = judged(tmp_path / "bench.jsonl")
    records(tmp_path / "same.jsonl", ratio=1.0)
    same = judged(tmp_path / "same.jsonl")
    good = selfcheck.outcome([same, injected], 61.0)
    assert (good.left_alone, good.found, good.blocks) == (True, True, 8)
    missed = selfcheck.outcome([injected], 1.0)
    assert not missed.left_alone
    invalid = replace(good, same={"tpot": BenchVerdict.OK, "itl": BenchVerdict.INVALID})
    assert not invalid.left_alone, "an A/A session that could not be judged was not left alone"
    swapped = selfcheck.SelfCheckOutcome(
        same=good.injected, injected=good.same, blocks=1, seconds=1.0
    )
    assert (swapped.left_alone, swapped.found) == (False, False)
    text = io.StringIO()
    Console(file=text, width=160).print(selfcheck.table([good, swapped]))
    assert "1 of 2 left alone" in text.getvalue()
    assert "1 of 2 found" in text.getvalue()


@pytest.mark.parametrize(("ratio", "code"), [(1.0, 1), (1.05, 0)])
def test_a_selfcheck_runs_the_command_a_user_types(tmp_path, monkeypatch, capsys, ratio, code):
    commands = []

    def bench_run(command, cwd):
        assert cwd == ROOT
        commands.append(command)
        out = Path(command[command.index("--out") + 1])
        same, injected = tmp_path / "same", tmp_path / "injected"
        for path, slower, role, name in (
            (same, 1.0, Role.SAME, "x"),
            (injected, ratio, Role.INJECTED, "y"),
        ):
            records(path, ratio=slower, role=role)
            out.write_text(
                (out.read_text() if out.exists() else "")
                + path.read_text().replace('"s"', f'"{name}"')
            )
            path.unlink()

    @contextmanager
    def launched(spec, log):
        yield SimpleNamespace(url=spec.url)

    monkeypatch.setattr(selfcheck, "run_guarded", bench_run)
    monkeypatch.setattr(selfcheck, "launch", launched)
    assert selfcheck.main(["--runs", "2", "--out", str(tmp_path / "out")]) == code
    assert [command[1:4] for command in commands] == [["-m", "harness", "bench"]] * 2
    assert all(command[5].startswith("url:http://127.0.0.1:") for command in commands)
    seeds = [command[command.index("--seed") + 1] for command in commands]
    assert seeds == ["selfcheck-0", "selfcheck-1"]
    assert "2 of 2 left alone" in capsys.readouterr().out


def test_a_run_that_was_cut_short_is_run_again(tmp_path, monkeypatch):
    many = []

    def cut_short(command, cwd):
        many.append(command)
        records(Path(command[command.index("--out") + 1]), blocks=3)
        raise KeyboardInterrupt

    monkeypatch.setattr(selfcheck, "run_guarded", cut_short)
    monkeypatch.setattr(
        selfcheck, "launch", lambda *_: nullcontext(SimpleNamespace(url="http://127.0.0.1:1"))
    )
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            selfcheck.main(["--runs", "1", "--out", str(tmp_path)])
    assert len(many) == 2


def test_a_killed_selfcheck_leaves_no_benchmark_running(tmp_path):
    script = "from harness.bench import selfcheck; selfcheck.run_guarded(['sleep', '60'])"
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT) as parent:
        process = psutil.Process(parent.pid)
        eventually(lambda: [p for p in process.children(recursive=True) if p.name() == "sleep"])
        descendants = process.children(recursive=True)
        parent.kill()
    assert psutil.wait_procs(descendants, timeout=30)[1] == []
