"""The commands of the documents: every line of their fenced ``bash`` blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from markdown_it import MarkdownIt

READ_FIRST = ("README.md", "CONTRIBUTING.md")
"""Run before the others, as a reader of these does."""
CONTINUED = re.compile(r"\s*\\\n\s*")
UNCOMMENTED = re.compile(r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s'"\\]|\s(?!\s*\#))*""", re.DOTALL)


@dataclass(frozen=True)
class Command:
    """One command of a document.

    Args:
        document: path in the repository.
        line: of the document, from 1.
        text: verbatim, a comment after it included.
    """

    document: str
    line: int
    text: str

    @property
    def bare(self) -> str:
        """On one line and without its comment; empty where there is nothing else."""
        joined = CONTINUED.sub(" ", self.text).strip()
        found = UNCOMMENTED.match(joined)
        return "" if joined.startswith("#") or found is None else found[0].strip()

    @property
    def place(self) -> str:
        """Such as "README.md:17"."""
        return f"{self.document}:{self.line}"


def ordered(paths: list[str]) -> list[str]:
    """Documents in reading order."""
    return sorted(paths, key=lambda path: (path not in READ_FIRST, path != READ_FIRST[0], path))


def commands(document: str, text: str) -> Iterator[Command]:
    """Every command of a document, in order.

    Args:
        document: its path, for the commands.
        text: Markdown.
    """
    for token in MarkdownIt().parse(text):
        if token.type != "fence" or token.info.split()[:1] != ["bash"] or token.map is None:
            continue
        line, pending = token.map[0] + 2, ""
        for written in token.content.splitlines():
            pending += f"\n{written}" if pending else written
            if written.endswith("\\"):
                continue
            command = Command(document, line, pending)
            line, pending = line + pending.count("\n") + 1, ""
            if command.bare:
                yield command
