"""``specgate contract`` tells what changed, a member a line, and ends with 1 where anything did."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.upstream import contract, contract_watch
from harness.upstream.contract import Contract, WatchedClass
from harness.upstream.released_wheel import FOLDER

OLD: Contract = {
    "Backend": {
        "(class)": "class Backend in base.py",
        "forward": "method (self, q)",
        "left": "attribute = 1",
        "same": "property",
    },
    "Gone": {"(class)": "class Gone in gone.py", "a": "property", "b": "property"},
    "flashinfer.plan": {"(named)": "a.py", "bs=": "a.py"},
}
NEW: Contract = {
    "Backend": {
        "(class)": "class Backend(ABC) in base.py",
        "arrived": "property",
        "forward": "method (self, q, k=None)",
        "same": "property",
    },
    "flashinfer.plan": {"(named)": "a.py", "lens=": "a.py"},
    "flashinfer.run": {"(named)": "a.py, b.py", "0": "a.py"},
}
CHANGES = [
    "~ Backend.(class): class Backend in base.py → class Backend(ABC) in base.py",
    "+ Backend.arrived: property",
    "~ Backend.forward: method (self, q) → method (self, q, k=None)",
    "- Backend.left: attribute = 1",
    "- Gone: class Gone in gone.py, members: 2",
    "- flashinfer.plan.bs=: a.py",
    "+ flashinfer.plan.lens=: a.py",
    "+ flashinfer.run: called in a.py, b.py, members: 1",
]
SOURCE = "class Backend:\n    def forward(self, q): ...\n"
Command = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is recorded; a release is one file."""
    monkeypatch.setattr(contract_watch, "RECORDED", tmp_path / "golden")
    monkeypatch.setattr(contract, "WATCHED", (WatchedClass("Backend", ("sglang/base.py",)),))
    monkeypatch.setattr(contract, "CALLERS", ())
    monkeypatch.setenv(FOLDER, str(tmp_path / "wheels"))
    return tmp_path


@pytest.fixture
def command(folder: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Exit code and lines of ``specgate contract``."""

    def run(*words: str) -> tuple[int, list[str]]:
        code = contract_watch.main(words)
        return code, capsys.readouterr().out.splitlines()

    return run


def unpack(root: Path, source: str = SOURCE, version: str = "") -> Path:
    (root / "sglang").mkdir(parents=True, exist_ok=True)
    (root / "sglang/base.py").write_text(source, encoding="utf-8")
    if version:
        stated = f"version: str\n__version__ = version = '{version}'\n"
        (root / "sglang/_version.py").write_text(stated, encoding="utf-8")
    return root


def test_a_difference_is_a_line(command: Command) -> None:
    contract_watch.record("9.1", OLD)
    contract_watch.record("9.2", NEW)
    end = "9.1 to 9.2: 3 added, 3 removed, 2 changed"
    code, lines = command("9.1", "9.2")
    assert code == 1, f"releases that differ end with 1, not {code}"
    told = "what was added is a line of +, what was removed of -, another signature of ~"
    assert lines == [*CHANGES, end], (
        f"{told}; wrong or missing: {sorted({*lines} ^ {*CHANGES, end})}"
    )
    code, back = command("9.2", "9.1")
    told = f"backwards as many differ and end with 1, not {code}: {back[-1]}"
    assert (code, back[-1]) == (1, "9.2 to 9.1: 3 added, 3 removed, 2 changed"), told
    code, lines = command("9.1", "9.1")
    told = f"a release and itself end with 0 and one line, not {code}: {lines}"
    assert (code, lines) == (0, ["9.1 to 9.1: 0 added, 0 removed, 0 changed"]), told


def test_a_record_is_read_again_and_is_one_member_a_line(folder: Path) -> None:
    contract_watch.record("9.2", dict(reversed(NEW.items())))
    assert contract_watch.recorded("9.2") == NEW
    text = (folder / "golden/9.2.json").read_text(encoding="utf-8")
    assert text.splitlines()[:3] == [
        "{",
        ' "Backend": {',
        '  "(class)": "class Backend(ABC) in base.py",',
    ]
    assert list(json.loads(text)) == sorted(NEW)


def test_releases_are_in_the_order_of_their_numbers(folder: Path) -> None:
    for version in ("0.5.10", "0.5.9", "0.10.0", "0.5.10.post1", "0.5.10rc2"):
        contract_watch.record(version, OLD)
    ordered = ["0.5.9", "0.5.10rc2", "0.5.10", "0.5.10.post1", "0.10.0"]
    assert contract_watch.releases() == ordered, "a candidate comes before its release"


def test_a_recorded_release_is_compared_with_a_folder(folder: Path, command: Command) -> None:
    source = unpack(folder / "checkout")
    assert command("9.1", "--write", "--source", str(source))[0] == 1
    same = f"9.1 to {source}: 0 added, 0 removed, 0 changed"
    assert command("9.1", "--source", str(source)) == (0, [same])
    unpack(source, SOURCE + "    def plan(self): ...\n")
    code, lines = command("9.1", "--source", str(source))
    assert (code, lines[0]) == (1, "+ Backend.plan: method (self)")
    assert contract_watch.releases() == ["9.1"]


def test_recording_ends_with_1_until_nothing_changes(folder: Path, command: Command) -> None:
    for version in ("9.1", "9.2"):
        unpack(folder / "wheels" / version, SOURCE.replace("q", f"q{version[-1]}"), version)
    code, lines = command("9.1", "9.2", "--write")
    added = "+ Backend: class Backend in sglang/base.py, members: 1"
    assert code == 1
    assert lines == [
        line
        for version in ("9.1", "9.2")
        for line in (added, f"recorded to {version}: 1 added, 0 removed, 0 changed")
    ]
    assert contract_watch.recorded("9.2")["Backend"]["forward"] == "method (self, q2)"
    assert command("9.1", "9.2", "--write")[0] == 0
    unpack(folder / "wheels/9.1", SOURCE)
    # A release that is the same does not hide one that is not.
    assert command("9.1", "9.2", "--write")[0] == 1
    assert contract_watch.recorded("9.1")["Backend"]["forward"] == "method (self, q)"


def test_a_release_after_a_release_is_recorded_behind_it(folder: Path, command: Command) -> None:
    for version in ("9.1.post2", "9.1", "9.2rc1"):
        unpack(folder / "wheels" / version, SOURCE, version)
        assert command(version, "--write")[0] == 1
    assert contract_watch.releases() == ["9.1", "9.1.post2", "9.2rc1"]


TWO = "accepted: two, or one beside --source"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), f"VERSION = '' is not accepted; {TWO}"),
        (("9.1",), f"VERSION = '9.1' is not accepted; {TWO}"),
        (("9.1", "9.1", "9.1"), f"VERSION = '9.1 9.1 9.1' is not accepted; {TWO}"),
        (("--source", "{source}"), "VERSION = '' is not accepted; accepted: one beside --source"),
        (("9.1", "9.2"), "VERSION = '9.2' is not accepted; accepted: one of 9.1"),
        (("9.1", "--source", "none"), "source = 'none' is not accepted; accepted: a folder that"),
        (("--write",), "VERSION with --write = '' is not accepted; accepted: one or more"),
        (("9.1", "9.3", "--write", "--source", "{source}"), "accepted: one, of the folder"),
        (("9.2foo1", "--write"), "VERSION = '9.2foo1' is not accepted; accepted: a release such"),
        (("../9", "--write"), "VERSION = '../9' is not accepted; accepted: a release such as"),
        (
            ("9.3", "--write", "--source", "{source}"),
            "'9.3' is not accepted; accepted: 9.2.1,",
        ),
        (
            ("9.2", "--write", "--source", "{source}"),
            "'9.2' is not accepted; accepted: 9.2.1,",
        ),
        (("9.1", "9.4", "--write"), "wheels/9.4' is not accepted; accepted: a folder that defines"),
    ],
)
def test_bad_input_is_one_line_and_records_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str
) -> None:
    contract_watch.record("9.1", OLD)
    source = str(unpack(folder / "source", version="9.2.1"))
    unpack(folder / "wheels/9.1")
    with pytest.raises(SystemExit, match=r"^2$"):
        contract_watch.main([word.format(source=source) for word in words])
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("specgate contract: ")
    assert told in line
    assert contract_watch.releases() == ["9.1"]
    assert contract_watch.recorded("9.1") == OLD
