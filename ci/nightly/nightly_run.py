"""Run of a night: its stages, and the reports of what they record."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from ci.bench import history, latency_table, outputs
from ci.nightly.history_branch import HistoryBranch, compact
from ci.nightly.stages import BENCH, Stage
from ci.summary import census
from harness.core.paths import ROOT
from harness.core.record import Record, read_records

RECORDS = "records.jsonl"
SUMMARY = "GITHUB_STEP_SUMMARY"
SKIPPED = 256
"""In place of an exit code, which it is no process's: a stage that it needs did not succeed."""


def run_stages(night: Sequence[Stage], folder: Path) -> dict[str, int]:
    """Exit code of every stage, in order; one that fails stops those alone that need it.

    Args:
        night: what is started.
        folder: of the reports; made where missing, records of an earlier night are removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (RECORDS, BENCH, latency_table.LATENCY_FILE):
        (folder / name).unlink(missing_ok=True)
    codes: dict[str, int] = {}
    for stage in night:
        if any(codes.get(name) != 0 for name in stage.needs):
            codes[stage.name] = SKIPPED
            continue
        print(f"nightly: {stage.name}", flush=True)
        codes[stage.name] = subprocess.run(stage.argv, cwd=ROOT, check=False).returncode
    return codes


def lines(codes: dict[str, int], recorded: Sequence[Record]) -> list[str]:
    """One line per stage, and one of the differential trials.

    Args:
        codes: of the stages.
        recorded: trials of the differential stage.
    """
    said = {0: "succeeded", SKIPPED: "skipped, a stage before it failed"}
    stages = [f"{name}: {said.get(code, f'ended with {code}')}" for name, code in codes.items()]
    red = sum(record.verdict.is_red for record in recorded)
    return [*stages, f"trials: {census(recorded)}, {red} red"] if recorded else stages


def records(folder: Path) -> list[Record]:
    """Records of the differential stage; none where it wrote none."""
    path = folder / RECORDS
    return list(read_records(path)) if path.is_file() else []


def publish(folder: Path, past: Path, notes: Iterable[str]) -> bool:
    """Write the outputs of the benchmark, and the summary where GitHub shows it.

    Args:
        folder: of the reports.
        past: file of the history.
        notes: further lines of the summary.

    Returns:
        Whether there was a benchmark and it is not red.
    """
    bench, told = folder / BENCH, list(notes)
    if bench.is_file():
        written = outputs.write(bench, folder, past, notes=told)
        green, text = not written.is_red, written.summary
    else:
        green, text = False, "\n\n".join(["## specgate: no benchmark", *told]) + "\n"
        (folder / outputs.SUMMARY).write_text(text, encoding="utf-8")
    if os.environ.get(SUMMARY):
        with Path(os.environ[SUMMARY]).open("a", encoding="utf-8") as file:
            file.write(text)
    return green


def publish_on(branch: HistoryBranch, night: str, folder: Path, notes: Iterable[str]) -> bool:
    """As ``publish``, with the history of a branch, which then gets this night.

    Args:
        branch: of nights; what a history in the folder has beyond it is added, too.
        night: its folder there.
        folder: of the reports.
        notes: further lines of the summary.

    Raises:
        UsageError: the branch cannot be read or written.
    """
    past, known = folder / history.FILE, branch.entries()
    history.append(past, known)
    green = publish(folder, past, notes)
    kept = branch.add(night, compact(folder, history.lacking(history.read(past), known)))
    print(f"history: {kept} is on branch {branch.name}")
    return green
