"""The digest of the sources: what a record was made by, with and without git."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from harness.core.paths import ROOT

FOLDERS = ("ci", "fixtures", "golden", "harness", "suites")
FILES = ("conftest.py", "pyproject.toml")
MADE = ("__pycache__",)
"""Folders that running leaves behind."""


@cache
def digest(root: Path = ROOT) -> str:
    """SHA-256 of every file that can change a verdict: its path and its content; documents cannot.

    Args:
        root: of the checkout.
    """
    made = hashlib.sha256()
    for path in sorted(_files(root)):
        content = hashlib.sha256(path.read_bytes()).digest()
        made.update(path.relative_to(root).as_posix().encode() + b"\0" + content)
    return made.hexdigest()


def _files(root: Path) -> Iterator[Path]:
    yield from (root / name for name in FILES if (root / name).is_file())
    for folder in FOLDERS:
        for path in (root / folder).rglob("*"):
            parts = path.relative_to(root).parts
            is_made = any(part in MADE or part.startswith(".") for part in parts)
            if path.suffix != ".md" and not is_made and path.is_file():
                yield path
