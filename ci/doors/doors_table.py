"""``doors.toml``: values of placeholders, and commands that do not run as they stand."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ci.doors.documents import Command
from harness.errors import UsageError, rejected

COMMAND_TABLE = Path(__file__).with_name("doors.toml")
UNFILLED = re.compile(r"(?<![\w$.{-])[A-Z]{2,}(?:[.:][A-Z]+)*(?![\w=])")
"""A word in capitals that is no variable, neither read ($PWD) nor set (ARM=…)."""


@dataclass(frozen=True)
class CommandRow:
    """How a command of a document is run.

    Args:
        command: as the document has it, without its comment.
        limit: seconds it may take.
        run: what is run instead.
        ready: output of a server that serves; it is interrupted then, and must end cleanly.
        refused: part of the last line where the command cannot run and must refuse by itself.
        reason: why it is not run as it stands.
        needs: a program that no lane installs; where it is missing the command is left out.
    """

    command: str
    limit: float
    run: str = ""
    ready: str = ""
    refused: str = ""
    reason: str = ""
    needs: str = ""

    def __post_init__(self) -> None:
        ways = [name for name in ("run", "ready", "refused") if getattr(self, name)]
        if len(ways) > 1:
            raise UsageError(rejected(self.command, ways, "one of run, ready and refused"))
        if bool(ways) != bool(self.reason):
            wanted = "a reason exactly where the command is not run as it stands"
            raise UsageError(rejected(f"reason of {self.command}", self.reason, wanted))


@dataclass(frozen=True)
class Table:
    """``doors.toml``.

    Args:
        limit: seconds of a command that has no row.
        gpu_extras: extras whose packages need a GPU.
        placeholders: word of a document -> its value.
        rows: by command.
    """

    limit: float
    gpu_extras: frozenset[str]
    placeholders: Mapping[str, str]
    rows: Mapping[str, CommandRow]

    def row(self, command: Command) -> CommandRow:
        """The row of a command, or one that runs it as it stands."""
        return self.rows.get(command.bare) or CommandRow(command.bare, self.limit)

    def filled(self, text: str) -> str:
        """A command line with every placeholder filled.

        Raises:
            UsageError: it has one that the table does not know.
        """
        for word, value in self.placeholders.items():
            text = re.sub(rf"(?<![\w$.-]){re.escape(word)}(?![\w=])", value, text)
        if unknown := UNFILLED.search(text):
            raise UsageError(rejected("placeholder", unknown[0], ", ".join(self.placeholders)))
        return text

    def stale(self, commands: Collection[Command]) -> list[str]:
        """Rows and placeholders that no command of any document asks for."""
        texts = {command.bare for command in commands}
        words = [word for word in self.placeholders if not any(word in text for text in texts)]
        return [*(command for command in self.rows if command not in texts), *words]


def read(file: Path = COMMAND_TABLE) -> Table:
    """The table.

    Raises:
        UsageError: a row has a field that none has, lacks one, or is there twice.
    """
    with file.open("rb") as opened:
        told = tomllib.load(opened)
    limit = float(told["limit"])
    rows: dict[str, CommandRow] = {}
    for entry in told["command"]:
        row = _row(entry, limit)
        if row.command in rows:
            raise UsageError(rejected("command", row.command, "one row per command"))
        rows[row.command] = row
    return Table(limit, frozenset(told["gpu_extras"]), told["placeholders"], rows)


def _row(entry: Mapping[str, Any], limit: float) -> CommandRow:
    known = {field.name for field in fields(CommandRow)}
    if not {"command"} <= entry.keys() <= known:
        accepted = f"command, and of {', '.join(sorted(known))}"
        raise UsageError(rejected("row", dict(entry), accepted))
    texts = {name: " ".join(value.split()) for name, value in entry.items() if name != "limit"}
    return CommandRow(limit=float(entry.get("limit", limit)), **texts)
