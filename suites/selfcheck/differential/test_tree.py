"""The digest of a tree changes with each file that can change a verdict, and with nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core.tree import digest

FILES = {
    "harness/a.py": "1",
    "golden/b.safetensors": "2",
    "ci/report.css": "3",
    "conftest.py": "4",
    "ci/constraints.txt": "5",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def taken(root: Path) -> str:
    return digest.__wrapped__(root)


@pytest.mark.parametrize("name", FILES)
def test_every_source_counts(tree: Path, name: str) -> None:
    before = taken(tree)
    (tree / name).write_text("other")
    said = f"the digest of the tree changes with {name}, which can change a verdict"
    assert taken(tree) != before, said
    (tree / name).write_text(FILES[name])
    assert taken(tree) == before, f"the digest is as before where {name} is"
    (tree / name).unlink()
    assert taken(tree) != before, f"{said}: it is gone"


def test_a_renamed_file_counts(tree: Path) -> None:
    before = taken(tree)
    (tree / "harness" / "a.py").rename(tree / "harness" / "b.py")
    assert taken(tree) != before


def test_a_moved_file_counts(tree: Path) -> None:
    before = taken(tree)
    # Last in both trees, so that no order gives it away.
    (tree / "suites").mkdir()
    (tree / "harness" / "a.py").rename(tree / "suites" / "a.py")
    assert taken(tree) != before, "a file of the same name in another folder is another tree"


@pytest.mark.parametrize(
    "name",
    [
        ".git/HEAD",
        "report/records.jsonl",
        "harness/README.md",
        "harness/__pycache__/a.pyc",
        "suites/.hypothesis/x",
        "docs/h200.md",
    ],
)
def test_what_runs_leave_and_documents_do_not(tree: Path, name: str) -> None:
    before = taken(tree)
    (tree / name).parent.mkdir(parents=True, exist_ok=True)
    (tree / name).write_text("left behind")
    assert taken(tree) == before
