"""The node's side: check the machine, keep a pytest or run a command, say what became of it.

Called by a worker process of Ray, and knows nothing of Ray.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ci.cluster import guarded
from ci.cluster.pytest_process import PytestProcess
from ci.cluster.work import Answer, Ended, LaneWork, Node, Plan, Refused, UnitEnd
from harness.core.paths import ROOT, python_path
from harness.core.tree import digest
from harness.errors import UsageError, rejected

KEPT = Path("report", "kept")
"""What the commands of a node share, such as a recorded run."""
LARGEST_FILES = 32 << 20
"""Bytes that a command's files may have together; what is beyond is left out."""


def plan(work: LaneWork, node: Node) -> Answer:
    """What this node would run.

    Args:
        work: of a lane on this node's kind.
        node: this one.
    """
    if refused := refusal(work, node):
        return refused
    try:
        units = kept_process(work).collected if work.is_of_tests else items(work)
    except UsageError as error:
        return Refused(node=node, reasons=(str(error),))
    return Plan(units=units, node=node)


def run(work: LaneWork, units: tuple[str, ...], node: Node) -> Answer:
    """Run a batch.

    Args:
        work: that it belongs to.
        units: tests or items, of the plan.
        node: this one.
    """
    if refused := refusal(work, node):
        return refused
    if not work.is_of_tests:
        began = time.time()
        ended = tuple(command_end(work, item) for item in units)
        return Ended(units=placed(ended, node), began=began, node=node)
    try:
        process = kept_process(work)
    except UsageError as error:
        return Refused(node=node, reasons=(str(error),))
    made = process.run(units, work.limit_s)
    return Ended(
        units=placed(made.ended, node),
        killer=made.killer,
        reason=made.reason if made.killer else "",
        blank=made.blank if made.killer else "",
        left=made.left,
        began=made.began,
        node=node,
    )


def placed(ended: Iterable[UnitEnd], node: Node) -> tuple[UnitEnd, ...]:
    """The units with the place that ran them: this node, and the GPU that its worker sees."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    place = f"{node}, GPU {gpu}" if gpu else str(node)
    return tuple(replace(end, place=place) for end in ended)


def refusal(work: LaneWork, node: Node) -> Refused | None:
    """Why this node must not run it, None if it may."""
    reasons = (*wrong_versions(work.versions), *wrong_tree(work.tree))
    return Refused(node=node, reasons=reasons) if reasons else None


def wrong_versions(wanted: Mapping[str, str]) -> Iterator[str]:
    """One line for each distribution that is absent or of another version."""
    for name, needed in wanted.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "none"
        if found.partition("+")[0] != needed:
            yield rejected(name, found, needed)


def wrong_tree(wanted: str) -> Iterator[str]:
    """One line if this is another tree."""
    if (found := digest()) != wanted:
        yield rejected("tree", found[:12], wanted[:12])


_kept: dict[tuple[str, ...], PytestProcess] = {}
"""At most one: what the last batch of this worker ran in. Imports and kernels stay warm in it."""


def kept_process(work: LaneWork) -> PytestProcess:
    """A pytest of this lane on the device that this worker has now.

    Raises:
        UsageError: pytest collects nothing here; names its last line.
    """
    key = (*work.argv, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    process = _kept.get(key)
    if process is None or not process.is_alive:
        while _kept:
            _kept.popitem()[1].close()
        process = _kept[key] = PytestProcess([sys.executable, *work.argv], ROOT, variables())
    return process


def variables() -> dict[str, str]:
    """Of what a worker starts; Ray's own would make it a part of the cluster."""
    own = {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    return {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | own


def items(work: LaneWork) -> tuple[str, ...]:
    """The items of a command.

    Raises:
        UsageError: the command that prints them fails.
    """
    if work.item:
        return (work.item,)
    done = _started(work.items)
    if done.returncode:
        raise UsageError(f"no items: {_last(done.stderr)}")
    return tuple(done.stdout.splitlines())


def command_end(work: LaneWork, item: str) -> UnitEnd:
    """How the command of an item ended, with what it wrote."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        places = {"{item}": item, "{report}": folder, "{kept}": str(ROOT / KEPT)}
        argv = [filled(word, places) for word in work.argv]
        try:
            done = _started(argv, work.limit_s)
            outcome, said = "failed" if done.returncode else "passed", done.stdout + done.stderr
            message = _last(said)
        except subprocess.TimeoutExpired as over:
            outcome, message = "failed", f"over {work.limit_s:g} s"
            # As bytes, whatever was asked for.
            said = b"".join(part for part in (over.stdout, over.stderr) if part).decode(
                errors="replace"
            )
        files, left_out = _written(Path(folder))
    told = [
        f"left on the node, over {LARGEST_FILES >> 20} MiB with the others: {name}\n"
        for name in left_out
    ]
    files["output.txt"] = "".join([*told, said]).encode()
    seconds = round(time.monotonic() - started, 3)
    return UnitEnd(unit=item, outcome=outcome, message=message, seconds=seconds, files=files)


def filled(word: str, places: Mapping[str, str]) -> str:
    """A word of a command with its places filled."""
    for place, value in places.items():
        word = word.replace(place, value)
    return word


def _started(
    argv: tuple[str, ...] | list[str], limit_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run to its end. ``guarded`` ends with this process, however that ends, and ends the rest."""
    with subprocess.Popen(
        [sys.executable, "-m", guarded.__name__, *argv],
        cwd=ROOT,
        env=variables(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",  # a command may say what is no text
    ) as process:
        watched, process.stdin = process.stdin, None  # which communicate() would close at once
        try:
            said = process.communicate(timeout=limit_s)
        finally:
            if watched is not None:
                watched.close()
    return subprocess.CompletedProcess(argv, process.returncode, *said)


def _written(folder: Path) -> tuple[dict[str, bytes], list[str]]:
    """Files of a folder, and the names of those that no room is left for."""
    files: dict[str, bytes] = {}
    left_out = []
    room = LARGEST_FILES
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if path.stat().st_size <= room:
            room -= path.stat().st_size
            files[name] = path.read_bytes()
        else:
            left_out.append(name)
    return files, left_out


def _last(text: str) -> str:
    return next(reversed(text.strip().splitlines()), "no cause given")
