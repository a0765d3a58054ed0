"""``python3 -m ci doors``: run the commands of the documents in a fresh clone.

HEAD is cloned into an empty folder. There every command of the documents is run as it stands, and
every set of extras that tox.ini or a document names is installed, and the suites are tried in it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from ci.doors import doors_table
from ci.doors.documents import Command, commands, ordered
from ci.doors.environments import environments
from ci.doors.shell import Shell, fresh
from ci.doors.tried import Tried, show, typed
from harness.core.paths import ROOT
from harness.errors import UsageError

ITSELF = "python3 -m ci doors"
EXTRAS_NAME = "extras"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python3 -m ci.doors",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "names",
        nargs="*",
        metavar="DOCUMENT",
        help=f"such as README.md, or {EXTRAS_NAME!r}; default: everything",
    )
    made.add_argument(
        "--into", type=Path, metavar="FOLDER", help="work in this empty folder, and keep it"
    )
    return made


def documents(root: Path) -> dict[str, str]:
    """Path -> text of every document of the repository, in reading order."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=root, capture_output=True, text=True, check=True
    )
    return {
        path: (root / path).read_text(encoding="utf-8")
        for path in ordered(listed.stdout.splitlines())
    }


def clone(into: Path) -> Path:
    """A fresh clone of HEAD in a folder that is made, and must be empty; absolute as that is."""
    into.mkdir(parents=True, exist_ok=True)
    target = into / "specgate"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(target)], check=True)
    return target


def doors(names: Sequence[str], into: Path, console: Console) -> list[Tried]:
    """All results.

    Args:
        names: documents, or "extras"; everything if empty.
        into: an empty folder, absolute: commands run in others.
        console: of the progress.

    Raises:
        UsageError: the table is wrong, or a document does not exist.
    """
    known, root = doors_table.read(), clone(into)
    texts = documents(root)
    if unknown := [name for name in names if name not in (*texts, EXTRAS_NAME)]:
        raise UsageError(
            f"{unknown[0]} is no document; accepted: {', '.join((*texts, EXTRAS_NAME))}"
        )
    every = [command for path, text in texts.items() for command in commands(path, text)]
    every = [command for command in every if command.bare != ITSELF]
    tried = stale(known, every)
    shell = Shell(root, fresh(os.environ))
    done: dict[str, Tried] = {}
    for command in every:
        if not names or command.document in names:
            with console.status(escape(f"{command.place} {command.bare}")):
                result = typed(command, known, shell, done)
            print_progress(result, console)
            tried.append(result)
    if not names or EXTRAS_NAME in names:
        for result in environments(known, root, into, texts.values()):
            print_progress(result, console)
            tried.append(result)
    return tried


def print_progress(result: Tried, console: Console) -> None:
    """Print one line of progress."""
    style = "red" if result.problem else ""
    console.print(result.line, style=style, markup=False, highlight=False)


def stale(known: doors_table.Table, every: Sequence[Command]) -> list[Tried]:
    """A red result for every row that no command asks for."""
    problem = "stale: no command of a document asks for it"
    return [Tried("doors.toml", text, problem=problem) for text in known.stale(every)]


def main(argv: Sequence[str]) -> int:
    """Exit code: 0 green, 1 red, 2 for bad arguments."""
    options = parser().parse_args(argv)
    console = Console(soft_wrap=True)
    started = time.monotonic()
    with ExitStack() as stack:
        into = options.into or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            tried = doors(options.names, into.absolute(), console)
        except (UsageError, subprocess.CalledProcessError, FileExistsError) as error:
            print(f"doors: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("doors: interrupted", file=sys.stderr)
            return 128 + signal.SIGINT
    return show(tried, time.monotonic() - started, Console(highlight=False))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
