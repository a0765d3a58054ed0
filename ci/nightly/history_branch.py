"""The history of nights on a branch of its own, which no cache evicts.

The branch shares no commit with the source: its tree holds a folder per night and nothing else. It
is written by git's plumbing, so neither a work tree nor an index is touched; pushing it is the
pipeline's work.
"""

from __future__ import annotations

import gzip
import os
import re
import subprocess
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from ci.bench import history, outputs
from ci.nightly.stages import BENCH
from harness.bench.jsonl import PACKED
from harness.core.paths import ROOT
from harness.errors import UsageError, rejected

NIGHT = re.compile(r"\d{4}-\d\d-\d\d-[a-z0-9.-]+")
ATTEMPTS = 8
IDENTITY = {
    f"GIT_{role}_{fact}": text
    for role in ("AUTHOR", "COMMITTER")
    for fact, text in (("NAME", "specgate nightly"), ("EMAIL", "specgate@localhost"))
}
"""A runner has no name of its own, without which git writes no commit."""


class RefMoved(UsageError):
    """Somebody else wrote the branch between reading and writing it."""


@dataclass(frozen=True)
class HistoryBranch:
    """A branch of nights.

    Args:
        name: without refs/heads/.
        repository: whose branch it is.
    """

    name: str
    repository: Path = ROOT

    @property
    def ref(self) -> str:
        """Its full name."""
        return f"refs/heads/{self.name}"

    def tip(self) -> str:
        """Hash of its last commit, empty where there is no such branch yet.

        Raises:
            UsageError: there is no repository, or the branch is not one of nights alone.
        """
        self._git("rev-parse", "--git-dir")
        if self._ran("check-ref-format", self.ref).returncode:
            raise UsageError(rejected("--history-branch", self.name, "the name of a branch"))
        if f"branch {self.ref}" in self._git("worktree", "list", "--porcelain").splitlines():
            accepted = "a branch that no work tree has checked out"
            raise UsageError(rejected("--history-branch", self.name, accepted))
        return self._ran("rev-parse", "--verify", "--quiet", self.ref).stdout.decode().strip()

    def nights(self, tip: str) -> dict[str, str]:
        """Name -> tree of every night of a commit; none of an empty one.

        Raises:
            UsageError: the commit has anything else, such as the source.
        """
        listed = self._git("ls-tree", tip).splitlines() if tip else []
        rows = [re.split(r"[ \t]", line, maxsplit=3) for line in listed]
        others = [name for _, kind, _, name in rows if kind != "tree" or not NIGHT.fullmatch(name)]
        if others:
            accepted = f"a branch of nights alone, which has no {others[0]}"
            raise UsageError(rejected("--history-branch", self.name, accepted))
        return {name: tree for _, _, tree, name in rows}

    def description(self, night: str) -> str:
        """What it has, and what a night would add to it; nothing is written.

        Raises:
            UsageError: as of ``entries``.
        """
        known, measured = self.nights(self.tip()), len(self.entries())
        files = ", ".join((history.FILE, outputs.SUMMARY, BENCH + PACKED))
        held = f"history: branch {self.name}: {len(known)} nights, {measured} entries"
        return f"{held}; a night adds {free(night, known)}/: {files}"

    def entries(self) -> list[history.Entry]:
        """What its nights measured.

        Raises:
            UsageError: as of ``tip`` and ``nights``, or a line is not an entry.
        """
        tip, found = self.tip(), []
        for night in self.nights(tip):
            path = f"{tip}:{night}/{history.FILE}"
            held = self._ran("cat-file", "-p", path)
            text = held.stdout.decode(errors="replace") if held.returncode == 0 else ""
            found += history.parsed(text, f"{self.name}:{night}/{history.FILE}")
        return found

    def add(self, night: str, files: Mapping[str, bytes]) -> str:
        """Append a night; one that others append meanwhile is kept.

        Args:
            night: DATE-GPU; a further one of this name ends with a number.
            files: name -> content.

        Returns:
            The name of its folder.

        Raises:
            UsageError: as of ``tip`` and ``nights``; git cannot write; or the branch moved
                ``ATTEMPTS`` times.
        """
        blobs = {n: self._git("hash-object", "-w", "--stdin", given=c) for n, c in files.items()}
        tree = self._tree(f"100644 blob {blob}\t{name}" for name, blob in blobs.items())
        for attempt in Retrying(
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_random_exponential(multiplier=0.05, max=1.0),
            retry=retry_if_exception_type(RefMoved),
            reraise=True,
        ):
            with attempt:
                folder = self._appended(night, tree)
        return folder

    def _appended(self, night: str, tree: str) -> str:
        tip = self.tip()
        known = self.nights(tip)
        folder = free(night, known)
        whole = self._tree(f"040000 tree {t}\t{n}" for n, t in {**known, folder: tree}.items())
        parent = ["-p", tip] if tip else []
        commit = self._git("commit-tree", whole, *parent, "-m", f"Night {folder}")
        moved = self._ran("update-ref", self.ref, commit, tip)
        if moved.returncode:
            raise RefMoved(f"branch {self.name} was not written: {_first(moved.stderr)}")
        return folder

    def _tree(self, lines: Iterable[str]) -> str:
        return self._git("mktree", given="".join(f"{line}\n" for line in lines).encode())

    def _git(self, *words: str, given: bytes = b"") -> str:
        done = self._ran(*words, given=given)
        if done.returncode:
            raise UsageError(f"git of {self.repository}: {_first(done.stderr)}")
        return done.stdout.decode().strip()

    def _ran(self, *words: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        command = ["git", "-C", str(self.repository), *words]
        named = os.environ | IDENTITY
        try:
            return subprocess.run(command, input=given, capture_output=True, env=named, check=False)
        except OSError as error:
            raise UsageError(f"git cannot be started: {error}") from error


def free(night: str, known: Collection[str]) -> str:
    """The name of a night's folder: its own, or one with a number where that is taken."""
    names = (night if number == 1 else f"{night}-{number}" for number in count(1))
    return next(name for name in names if name not in known)


def _first(said: bytes) -> str:
    return said.decode(errors="replace").strip().partition("\n")[0]


def night_of(date: str, gpu: str) -> str:
    """Such as 2026-11-23-nvidia-h200.

    Args:
        date: ISO 8601.
        gpu: as the driver names it.
    """
    return f"{date}-{re.sub(r'[^a-z0-9.]+', '-', gpu.lower()).strip('-')}"


def compact(report: Path, entries: Iterable[history.Entry]) -> dict[str, bytes]:
    """What is kept of a night: its summary, its entries, and the benchmark's records, packed.

    Args:
        report: folder of its reports.
        entries: those that the branch lacks.
    """
    kept = {history.FILE: "".join(f"{entry.to_json()}\n" for entry in entries).encode()}
    for name in (outputs.SUMMARY, BENCH):
        if (path := report / name).is_file():
            kept[name] = path.read_bytes()
    if BENCH in kept:
        kept[BENCH + PACKED] = gzip.compress(kept.pop(BENCH), mtime=0)
    return kept
