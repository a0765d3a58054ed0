"""Every file and folder that a document names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.core.paths import ROOT

TOP = ("harness/", "fixtures/", "suites/", "golden/", "ci/", "docs/")
DOCUMENTS = sorted(
    path
    for path in (*ROOT.glob("*.md"), *(p for top in TOP for p in (ROOT / top).rglob("*.md")))
    if path.name != "LICENSE.md"
)


def named(text: str) -> set[str]:
    """Paths in backticks, from the root of the repository."""
    return {word for word in re.findall(r"`([\w./-]+)`", text) if word.startswith(TOP)}


def test_paths_are_found_in_prose() -> None:
    assert named("see `ci/gate.py`, `gate.py` and ci/none") == {"ci/gate.py"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_names_is_there(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert {name for name in named(text) if not (ROOT / name).exists()} == set()
