"""A signal ends a program in one line, whatever it was doing, and leaves no process behind."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from fixtures import bench
from fixtures.pytest_plugin.poll import eventually
from harness.__main__ import become
from harness.core.signals import ending, hear_sigint, heard_as_interrupt, held
from harness.server.launch.process import ROOT

SERVE = ("serve", "--pair", "gqa")
BENCH = ("bench", "--a", "embedded:", "--b", "embedded:", "--out")


@pytest.mark.parametrize(
    ("code", "said"),
    [(0, "exit code 0"), (3, "exit code 3"), (-9, "SIGKILL"), (-signal.SIGRTMIN - 5, "signal 39")],
)
def test_how_a_process_ended_is_told_by_the_name_of_its_signal(code: int, said: str) -> None:
    assert ending(code) == said


def has_begun(program: subprocess.Popen[str]) -> bool:
    """Whether its command line is read: a package is imported then; before, coverage's at most."""
    mapped = {Path(one.path) for one in psutil.Process(program.pid).memory_maps()}
    return any("-packages" in str(path) and path.parent.name != "coverage" for path in mapped)


def has_children(program: subprocess.Popen[str]) -> bool:
    return bool(psutil.Process(program.pid).children())


def serves(program: subprocess.Popen[str]) -> bool:
    assert program.stdout is not None
    return program.stdout.readline().startswith("serving http://127.0.0.1:")


@pytest.mark.parametrize(
    ("words", "moment", "number", "told"),
    [
        (SERVE, has_begun, signal.SIGINT, "specgate serve: "),
        (SERVE, has_children, signal.SIGINT, "specgate serve: stopped by SIGINT"),
        (SERVE, has_children, signal.SIGTERM, "specgate serve: stopped by SIGTERM"),
        (SERVE, serves, signal.SIGINT, "specgate serve: stopped by SIGINT"),
        (SERVE, serves, signal.SIGTERM, "specgate serve: stopped by SIGTERM"),
        (BENCH, has_begun, signal.SIGINT, "specgate bench: interrupted"),
        (BENCH, has_children, signal.SIGINT, "specgate bench: interrupted; nothing was measured"),
    ],
)
def test_a_signal_ends_a_program_in_one_line(
    tmp_path: Path,
    words: tuple[str, ...],
    moment: Callable[[subprocess.Popen[str]], bool],
    number: signal.Signals,
    told: str,
) -> None:
    out = (str(tmp_path / "bench.jsonl"),) if words is BENCH else ()
    program = subprocess.Popen(
        [sys.executable, "-m", "harness", *words, *out],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hear_sigint,
    )
    try:
        eventually(lambda: moment(program))
        descendants = psutil.Process(program.pid).children(recursive=True)
        # A terminal tells every process of the group.
        send = os.killpg if number == signal.SIGINT else os.kill
        send(program.pid, number)
        output, errors = program.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        pytest.fail(f"{number.name} ends a program within 60 s")
    finally:
        program.kill()
    # Another line of it is read above.
    assert "serving" not in output, f"a program that is signalled serves no more: {output}"
    lines = errors.splitlines()
    rule = f"stderr is one line, {told!r}, not {len(lines)}, the last of them {lines[-1:]}"
    assert len(lines) == 1, rule
    assert lines[0].startswith(told), rule
    # Python itself passes on an interrupt that came while code was compiled.
    rule = f"the exit status tells signal {number}, not {program.returncode}"
    assert program.returncode in (128 + number, -number), rule
    left = psutil.wait_procs(descendants, timeout=30)[1]
    assert left == [], f"no process is left behind: {left}"


def test_an_interrupted_benchmark_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "of today.jsonl"

    class Run:
        def __init__(self, **_: object) -> None:
            return

        def run(self) -> None:
            out.write_text("")
            raise KeyboardInterrupt

    monkeypatch.setattr(bench, "BenchRun", Run)
    monkeypatch.setattr(bench, "raise_priority", lambda: None)  # would outlive the test
    monkeypatch.setattr(bench.signal, "signal", lambda *_: None)
    words = ["--a", "embedded:", "--b", "embedded:", "--out", str(out)]
    for given in (words, [*words, "--resume"]):
        assert bench.main(given) == 130
        [line] = capsys.readouterr().err.splitlines()
        start = f"specgate bench: interrupted; {out} keeps what was measured, go on with: "
        assert line.startswith(start)
        again = shlex.split(line.removeprefix(start))
        assert again == ["specgate", "bench", *words, "--resume"]


def test_a_signal_that_comes_while_a_program_is_imported_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loses_interrupts.py").write_text(
        "import signal\n"
        "try:\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "except KeyboardInterrupt:\n"
        "    pass\n"
        "if __name__ == '__main__':\n"
        "    print('begun')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["specgate"])
    monkeypatch.setenv("PYTHONPATH", "")
    # In a shell's background a Ctrl-C is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            become("loses_interrupts")
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().out == ""


def test_a_signal_that_comes_while_the_server_is_built_is_not_lost() -> None:
    def raises(*_: object) -> None:
        raise KeyboardInterrupt

    built: list[str] = []

    def build() -> None:
        with held(signal.SIGINT):
            os.kill(os.getpid(), signal.SIGINT)
            built.append("all of it")

    before = signal.signal(signal.SIGINT, raises)
    try:
        with pytest.raises(KeyboardInterrupt):
            build()
        assert signal.getsignal(signal.SIGINT) is raises
    finally:
        signal.signal(signal.SIGINT, before)
    assert built == ["all of it"]


def test_a_handler_of_before_is_back_whatever_it_was() -> None:
    def own(*_: object) -> None:
        raise AssertionError("nobody sends it")

    before = signal.signal(signal.SIGTERM, own)
    try:
        with heard_as_interrupt(signal.SIGTERM):
            assert signal.getsignal(signal.SIGTERM) is not own
        assert signal.getsignal(signal.SIGTERM) is own, "what heard a signal before hears it again"
    finally:
        signal.signal(signal.SIGTERM, before)
