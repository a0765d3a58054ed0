"""Results of the commands, and their table."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.markup import escape
from rich.table import Table as Printed

from ci.doors.documents import Command
from ci.doors.doors_table import Table
from ci.doors.shell import Shell
from harness.errors import UsageError

TAIL = 40
"""Lines of a red command's output that are shown."""


@dataclass(frozen=True)
class Tried:
    """Result of one command, or of one check of an environment.

    Args:
        place: such as "README.md:17".
        asked: the command as the document has it.
        ran: the command that was run instead, or the place where it ran before; empty if neither.
        seconds: it took.
        output: of it.
        problem: why it is red; empty where it is not.
        left_out: why it was not tried; empty where it was.
    """

    place: str
    asked: str
    ran: str = ""
    seconds: float = 0.0
    output: str = ""
    problem: str = ""
    left_out: str = ""

    @property
    def line(self) -> str:
        """One line of progress."""
        fate = self.problem or self.left_out or "ok"
        return f"{fate}, {self.seconds:.0f} s: {self.place} {self.asked}"


def typed(command: Command, table: Table, shell: Shell, done: dict[str, Tried]) -> Tried:
    """Run a command of a document, once however many documents have it.

    Args:
        command: from a document.
        table: rows of commands.
        shell: that runs it.
        done: results by command; this one is added.
    """
    if earlier := done.get(command.bare):
        return replace(earlier, place=command.place, ran=f"as {earlier.place}", seconds=0.0)
    row = table.row(command)
    if row.needs and shutil.which(row.needs) is None:
        return Tried(command.place, command.bare, left_out=f"left out: no {row.needs} here")
    try:
        text = table.filled(row.run or command.bare)
    except UsageError as error:
        return Tried(command.place, command.bare, problem=str(error))
    ended = shell.run(text, row)
    how = {"ready": row.ready and "until it serves, then Ctrl-C", "run": text, "": ""}
    ran = how["ready"] or (text if text != command.bare else "")
    if row.reason:
        ran = f"{ran or f'expected: {row.refused}'} ({row.reason})"
    made = Tried(command.place, command.bare, ran, ended.seconds, ended.output, ended.problem)
    done[command.bare] = made
    return made


def show(tried: Sequence[Tried], seconds: float, console: Console) -> int:
    """Print the end of every red output and the table; 1 if anything is red, else 0."""
    red = [one for one in tried if one.problem]
    for one in red:
        console.rule(escape(f"{one.place}: {one.problem}"), align="left")
        console.print(escape(one.asked))
        tail = one.output.rstrip().splitlines()[-TAIL:]
        console.print("\n".join(tail), markup=False, soft_wrap=True)
    printed = Printed("where", "command", "s", "", box=None, pad_edge=False)
    printed.columns[1].overflow = "fold"
    printed.columns[2].justify = "right"
    for one in tried:
        ran = one.ran or one.left_out
        more = f"\n  → {escape(ran)}" if ran else ""
        fate = "[red]red[/]" if one.problem else "–" if one.left_out else "ok"
        printed.add_row(escape(one.place), escape(one.asked) + more, f"{one.seconds:.0f}", fate)
    console.print(printed)
    left_out = sum(bool(one.left_out) for one in tried)
    counts = f"{len(tried) - left_out} tried, {len(red)} red, {left_out} left out"
    console.print(f"doors: {counts}, {seconds / 60:.1f} min")
    return int(bool(red))
