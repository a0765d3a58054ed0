"""Commands of documents are typed: one that fails is red, and so is a row nothing asks for."""

from __future__ import annotations

import io
import shlex
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from ci.doors import __main__ as cli
from ci.doors import doors_table, environments, extras
from ci.doors.documents import Command, commands, ordered
from ci.doors.doors_table import CommandRow, Table
from ci.doors.shell import QUICK_PIP, Outcome, Shell, fresh
from ci.doors.tried import Tried, show, typed
from harness.core.paths import ROOT
from harness.errors import UsageError

pytestmark = pytest.mark.untraced
DOCUMENT = """Text with `python3 -m inline`.

```bash
first --option 'a # b'   # a comment
# a line of its own

second "c#d" e#f \\
    --continued
after both lines
```

```
not bash
```

1. In a list:

   ```bash
   third
   ```
"""
PATH = {"PATH": "/usr/bin:/bin"}


def test_commands_are_the_lines_of_bash_blocks() -> None:
    found = list(commands("a.md", DOCUMENT))
    assert [(command.place, command.bare) for command in found] == [
        ("a.md:4", "first --option 'a # b'"),
        ("a.md:7", 'second "c#d" e#f --continued'),
        ("a.md:9", "after both lines"),
        ("a.md:19", "third"),
    ]


def test_a_reader_begins_with_the_readme() -> None:
    paths = ["docs/a.md", "CONTRIBUTING.md", "README.md", "ci/README.md"]
    assert ordered(paths) == ["README.md", "CONTRIBUTING.md", "ci/README.md", "docs/a.md"]


def a_table(*rows: CommandRow, **placeholders: str) -> Table:
    return Table(10.0, frozenset({"gpu"}), placeholders, {row.command: row for row in rows})


def tried(folder: Path, text: str, known: Table | None = None) -> list[Tried]:
    """What becomes of a document of one block."""
    shell, done = Shell(folder, PATH), dict[str, Tried]()
    found = commands("a.md", f"```bash\n{text}\n```\n")
    return [typed(command, known or a_table(), shell, done) for command in found]


def test_what_a_command_sets_holds_for_the_next(tmp_path: Path) -> None:
    lines = "mkdir b && cd b\nP='x  y'\nexport Q=$P\ntest \"$P$Q\" = 'x  yx  y' && pwd"
    results = tried(tmp_path, lines)
    assert [one.problem for one in results] == [""] * 4
    assert results[-1].output.strip() == str(tmp_path / "b")


def test_what_a_command_unsets_is_gone_for_the_next(tmp_path: Path) -> None:
    results = tried(tmp_path, 'export Q=1\nunset Q\ntest -z "${Q+set}"')
    assert [one.problem for one in results] == [""] * 3, "a variable that was unset stays unset"


def test_a_value_may_have_an_equals_sign(tmp_path: Path) -> None:
    results = tried(tmp_path, 'export OPTS="--a=1 --b=2"\ntest "$OPTS" = "--a=1 --b=2"')
    assert [one.problem for one in results] == [""] * 2, "a name ends at the first equals sign"


@pytest.mark.parametrize("text", ["false", "exit 3", "no-such-command", "test -t 0"])
def test_a_command_that_fails_is_red(tmp_path: Path, text: str) -> None:
    [failed, after] = tried(tmp_path, f"{text}\ntrue")
    assert failed.problem.startswith("ended with ")
    assert not after.problem


def test_a_command_is_stopped_at_its_limit_with_what_it_started(tmp_path: Path) -> None:
    text = "(sleep 2; touch late) & sleep 60"
    [late] = tried(tmp_path, text, a_table(CommandRow(text, 0.5)))
    assert late.problem == "longer than 0 s"
    assert late.seconds < 2
    assert subprocess.run(["sleep", "2"], check=False).returncode == 0
    assert not (tmp_path / "late").exists()


def test_a_row_says_what_is_run_instead(tmp_path: Path) -> None:
    known = a_table(
        CommandRow("hours FILE", 5, run="echo $((1 + 1)) FILE", reason="hours"), FILE="here"
    )
    [one] = tried(tmp_path, "hours FILE  # of work", known)
    assert (one.problem, one.output) == ("", "2 here\n")
    assert one.ran == "echo $((1 + 1)) here (hours)"


@pytest.mark.parametrize(
    ("needs", "left_out"), [("sh", ""), ("no-such-program", "no-such-program")]
)
def test_without_a_program_that_no_lane_installs_a_row_is_left_out(
    tmp_path: Path, needs: str, left_out: str
) -> None:
    known = a_table(CommandRow("echo x >> file", 5, needs=needs))
    [one] = tried(tmp_path, "echo x >> file", known)
    assert (tmp_path / "file").exists() is not bool(left_out)
    assert one.left_out == (f"left out: no {left_out} here" if left_out else "")
    assert not one.problem


def test_the_same_command_is_run_once(tmp_path: Path) -> None:
    first, again = tried(tmp_path, "echo >> file; false\necho >> file; false")
    assert (tmp_path / "file").read_text() == "\n"
    assert again.problem == first.problem == "ended with 1"
    assert again.ran == "as a.md:2"


CLEAN = """trap 'echo "bye"; exit 0' INT; echo serving; while true; do sleep 0.1; done"""
LOUD = CLEAN.replace("bye", "Traceback (most recent call last)")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (CLEAN, ""),
        (LOUD, "a traceback"),
        (CLEAN.replace("exit 0", "exit 1"), "ended with 1 after Ctrl-C"),
        (CLEAN.replace("exit 0", "true"), "longer than 3 s"),
        ("echo starting", "never said 'serving'"),
    ],
)
def test_a_server_is_interrupted_once_it_serves(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "serve").write_text(text)
    row = CommandRow("bash serve", 3, ready="serving", reason="serves")
    [one] = tried(tmp_path, "bash serve", a_table(row))
    assert one.problem == problem


@pytest.mark.parametrize(
    ("text", "red"),
    [
        ("echo needs a device; exit 2", False),
        ("echo needs a device", True),
        ("echo something else; exit 2", True),
        ("echo needs a device; echo more; exit 2", True),
        ("echo 'Traceback (most recent call last):'; echo needs a device; exit 2", True),
    ],
)
def test_a_refusal_is_the_last_line_and_no_success(tmp_path: Path, text: str, red: bool) -> None:
    row = CommandRow(text, 5, refused="needs a device", reason="a device")
    [one] = tried(tmp_path, text, a_table(row))
    assert bool(one.problem) is red


@pytest.mark.parametrize("text", ["run BUNDLE", "see http://HOST:PORT", "x=OLD/bin/python"])
def test_a_placeholder_that_nobody_fills_is_red(tmp_path: Path, text: str) -> None:
    [one] = tried(tmp_path, f"touch ran; {text}", a_table(FILE="x"))
    assert "placeholder = " in one.problem
    assert not (tmp_path / "ran").exists()


def test_placeholders_are_words_and_variables_are_none() -> None:
    known = a_table(OLD=".venv", **{"HOST:PORT": "[::1]:80"})
    text = "ARM=a,python=$P run OLD/bin http://HOST:PORT THRESHOLD=3 --size 36M ${ARM} $PWD/x"
    filled = "ARM=a,python=$P run .venv/bin http://[::1]:80 THRESHOLD=3 --size 36M ${ARM} $PWD/x"
    assert known.filled(text) == filled


def test_a_row_that_no_document_asks_for_is_stale() -> None:
    known = a_table(CommandRow("old command", 5), CommandRow("new command", 5), SPEC="x", FILE="y")
    asked = [Command("a.md", 1, "new command  # old command"), Command("a.md", 2, "b FILE")]
    assert known.stale(asked) == ["old command", "SPEC"]
    assert all(one.problem for one in cli.stale(known, asked))


def test_no_row_is_stale_and_every_placeholder_filled() -> None:
    known = doors_table.read()
    texts = cli.documents(ROOT)
    every = [command for path, text in texts.items() for command in commands(path, text)]
    assert {"README.md", "CONTRIBUTING.md", "ci/README.md", "docs/benchmarks.md"} <= texts.keys()
    assert known.stale(every) == []
    for command in every:
        known.filled(known.row(command).run or command.bare)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ('run = "x"', "row = .* accepted: command"),
        ('command = "a"\nruns = "x"', "row = .* accepted: command"),
        ('command = "a"\nrun = "x"', "reason of a = ''"),
        ('command = "a"\nreason = "x"', "reason of a = 'x'"),
        ('command = "a"\nrun = "x"\nready = "y"\nreason = "z"', "one of run, ready and refused"),
        ('command = "a"\n[[command]]\ncommand = " a "', "command = 'a' .* one row per command"),
    ],
)
def test_a_row_that_makes_no_sense_is_refused(tmp_path: Path, row: str, told: str) -> None:
    file = tmp_path / "doors.toml"
    file.write_text(f"limit = 1\ngpu_extras = []\n[placeholders]\n[[command]]\n{row}\n")
    with pytest.raises(UsageError, match=told):
        doors_table.read(file)


def test_a_shell_has_nothing_of_the_lane() -> None:
    of_lane = {"VIRTUAL_ENV": "/lane", "PYTHONPATH": "/x", "TOX_ENV_NAME": "doors"}
    of_person = {"PATH": "/lane/bin:/usr/bin", "HOME": "/home", "PIP_INDEX_URL": "index"}
    assert fresh(of_lane | of_person) == of_person | QUICK_PIP | {"PATH": "/usr/bin"}


def test_sets_of_extras_are_those_of_tox_and_the_documents() -> None:
    tox = """
[testenv]
extras = test
[testenv:run]
extras =
    test
    {env:SPECGATE_STACK:test}
[testenv:lint]
extras = test, lint
[testenv:doors]
package = skip
extras = none
"""
    assert extras.of_tox(tox) == {
        frozenset({"test"}),
        frozenset({"test", "gpu"}),
        frozenset({"test", "lint"}),
    }
    texts = ["pip install -c x -e '.[a,b]'", "`-e .[c]`, not [d] and not a.[0]x"]
    assert extras.of_documents(texts) == {frozenset("ab"), frozenset("c"), frozenset("0")}
    assert extras.of_tox((ROOT / "tox.ini").read_text()) == {
        frozenset({"test"}),
        frozenset({"test", "gpu"}),
        frozenset({"test", "cluster"}),
        frozenset({"test", "cluster", "gpu"}),
        frozenset({"test", "lint"}),
        frozenset({"test", "operators"}),
    }


def test_a_skip_for_want_of_a_package_is_told_but_for_a_gpu_s(tmp_path: Path) -> None:
    reasons = (
        "could not import 'altair': No module named 'altair'",
        "hypothesis is not installed",
        "No module named 'numpy'",
        "flashinfer-python is not installed: pip install it",
        "needs --device cuda",
    )
    cases = "".join(f'<testcase><skipped message="{reason}"/></testcase>' for reason in reasons)
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    of_gpu = {"gpu": ["flashinfer-python==0.6.12", "numpy<2.4"]}
    project = {"dependencies": ["numpy>=2"], "optional-dependencies": of_gpu}
    accepted = extras.kernel_packages(project, frozenset({"gpu"}))
    assert extras.lacking(report, accepted) == list(reasons[:3])


def test_one_test_of_each_folder_is_the_first() -> None:
    first = ["suites/a/test_x.py::test_1[b c]", "suites/b/y.py::test_1"]
    listed = [first[0], "suites/a/test_x.py::test_2", first[1], "", "3 tests"]
    assert extras.one_of_each_folder("\n".join(listed)) == first


def test_the_table_fits_a_terminal_and_shows_what_is_red() -> None:
    long = "python3 -m harness bench --a sglang:backend=triton --b sglang:backend=flashinfer"
    told = io.StringIO()
    output = "\n".join(f"line {number}" for number in range(100))
    red = Tried("docs/benchmarks.md:9", long, "x" * 90, 61.4, output, "ended with 1")
    green = Tried("[lint,test]", "python3 -m ci run '[/]'", seconds=2)
    assert green.line == "ok, 2 s: [lint,test] python3 -m ci run '[/]'"
    console = Console(file=told, width=80)
    assert show([green, red], 63.4, console) == 1
    shown = told.getvalue()
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    assert "line 99" in lines
    assert "line 59" not in lines
    assert "[lint,test]" in shown
    assert "'[/]'" in shown
    assert "x" * 90 in shown.replace("\n", "").replace(" ", "")
    assert lines[-1] == "doors: 2 tried, 1 red, 0 left out, 1.1 min"
    absent = Tried("a.md:3", "browse", left_out="left out: no browser here")
    assert show([green, absent], 2, console) == 0
    assert "doors: 1 tried, 0 red, 1 left out, 0.0 min" in told.getvalue()
    assert "→ left out: no browser here" in told.getvalue()


def test_an_unknown_document_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "clone", lambda into: ROOT)
    assert cli.main(["READMI.md", "--into", str(tmp_path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("doors: READMI.md is no document; accepted: README.md, CONTRIBUTING.md")


def test_an_environment_may_lie_in_a_folder_with_a_space(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    typed_lines: list[str] = []

    def run(shell: Shell, text: str, row: CommandRow) -> Outcome:
        typed_lines.append(text)
        return Outcome(0.0, "suites/a/test_x.py::test_1")

    monkeypatch.setattr(environments.Shell, "run", run)
    root, into = tmp_path / "specgate", tmp_path / "in to"
    root.mkdir()
    (root / "tox.ini").write_text("[testenv]\nextras = test\n")
    project = '[project]\ndependencies = []\n[project.optional-dependencies]\ngpu = ["a"]\n'
    (root / "pyproject.toml").write_text(project)
    list(environments.environments(a_table(), root, into, []))
    make, _, *runs = map(shlex.split, typed_lines)
    own = str(into / "test" / "bin" / "python")
    assert own in make, f"pip of the environment installs into it: {make}"
    assert [words[0] for words in runs] == [own] * 2, f"its own python runs the suites: {runs}"


def test_the_folder_to_work_in_is_the_same_for_commands_that_run_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[Path] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "doors", lambda _, into, __: given.append(into) or [])
    assert cli.main(["extras", "--into", "made"]) == 0
    told = "a relative --into is one of this folder, not of the clone in which commands run"
    assert given == [tmp_path / "made"], f"{told}: {given}"
