"""``specgate VERB``: run cases, judge their records, serve, benchmark, plant mutants.

Each verb starts a process that could be started by hand: pytest, the gate, one of our modules.
"""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from harness.core.argument_types import CommandLine, count
from harness.core.paths import ROOT, python_path
from harness.core.signals import INTERRUPTED, held

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[CommandLine]

DIFFERENTIAL = (
    "suites/differential",
    "suites/speculative",
    "suites/graphs/test_effect_budgets.py",
)
EVERYTHING = ("suites", "--ignore=suites/latency")
CUDA = ("--device", "cuda")
WORKERS_PER_GPU = 4
LATENCY = ("suites/latency", "-n0")
"""Times are taken by one process, which shares the GPU with no other."""
GOLDENS = ("suites/differential/test_goldens.py", "suites/speculative/test_golden_prompts.py")
GOLDEN_MODES = ("verify", "add", "rewrite")
LEFT_RECORDS = (0, 1, 2)
"""Exit codes of a pytest that ran tests: passed, failed, interrupted."""
PYTEST_INTERRUPTED = 2
HANDED_ON = {
    "bench": ("fixtures.bench", "compare two servers in randomised blocks, to a verdict"),
    "compare": ("harness.bench", "judge a benchmark's records again and print what they show"),
    "resolution": ("fixtures.resolution", "tell what a benchmark finds, from recorded launches"),
    "campaign": ("fixtures.campaign", "compare servers of real size, row by row of a table"),
    "serve": ("harness.server", "serve a shipped pair over HTTP"),
    "upstream": ("fixtures.upstream", "put SGLang's own backends on trial, by release"),
    "accept-lengths": (
        "fixtures.accept_lengths",
        "compare accept lengths of sglang's attention backends with the oracle's",
    ),
    "compare-releases": (
        "fixtures.compare_releases",
        "run the same rows on two releases of sglang, or checkouts, and print what differs",
    ),
    "bisect": ("fixtures.bisect", "find the release, package or commit that turned trials red"),
    "findings": ("fixtures.findings", "tell what was found in SGLang's backends, by release"),
    "minimise": ("fixtures.minimise", "find the smallest case that is red for the same cause"),
    "mutants": ("fixtures.mutants", "plant the mutants of the tables, see which test notices"),
    "operators": (
        "fixtures.operators",
        "draw mutants that nobody wrote, and see which test notices",
    ),
    "coverage": ("fixtures.coverage", "tell which combinations of modes, sizes and dtypes ran"),
    "cluster": ("ci.cluster", "run lanes on every machine of a Ray cluster, to one verdict"),
    "report": ("ci.report", "print the records of a run, write their page"),
    "limits": ("harness.kernels.limits", "ask a device's kernels what they refuse"),
    "contract": ("harness.upstream.contract_watch", "tell what changed in SGLang's interface"),
    "upstream-defects": ("fixtures.upstream_defects", "plant defects in SGLang, see who notices"),
    "wheels": ("harness.upstream.released_wheel", "extract what latency compares, from wheels"),
}
"""Verbs that are modules with a command line of their own, which they explain by ``--help``."""


def start(module: str, *args: str) -> int:
    """Exit code of ``python -m module args``, run in the repository."""
    with subprocess.Popen([sys.executable, "-m", module, *args], cwd=ROOT) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                # The terminal told the child too; it ends by itself and keeps its records.
                continue


def become(module: str, *args: str) -> None:
    """Go on as ``python -m module args`` in this process; its exit code comes as SystemExit."""
    os.environ["PYTHONPATH"] = python_path()
    sys.argv[1:] = args
    with held(signal.SIGINT):
        _import(module)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _import(module: str) -> None:
    """Import what a module needs, which takes seconds; itself it is not imported after this."""
    spec = find_spec(module)
    name = f"{module}.__main__" if spec and spec.submodule_search_locations else module
    import_module(name)
    del sys.modules[name]


def run(report: Path, args: Sequence[str]) -> int:
    """Run every case on this machine's devices, then report and gate, even if cut short.

    Args:
        report: folder of ``records.jsonl`` and ``index.html``.
        args: handed to pytest.

    Returns:
        The first exit code that is not zero: pytest's, the report's, the gate's.
    """
    folder = report.absolute()
    where = ("--workers-per-gpu", str(WORKERS_PER_GPU), "--device", "auto")
    is_custom = any(word.partition("=")[0] == "--kernel" for word in args)
    suites = DIFFERENTIAL[:1] if is_custom else DIFFERENTIAL
    code = start("pytest", *suites, *where, "--report", str(folder), *args)
    return _ended("run", {"pytest": code, **_judge(folder, code, args)})


def gpu(report: Path, workers: int, args: Sequence[str]) -> int:
    """Run every suite that takes a device on CUDA, report and gate; latencies without ``args``.

    Args:
        report: as in ``run``.
        workers: that share a GPU.
        args: handed to pytest; paths of suites run instead of all.

    Returns:
        The first exit code that is not zero: pytest's, the report's, the gate's.
    """
    folder = report.absolute()
    suites = () if any(word.startswith("suites") for word in args) else EVERYTHING
    spread = ("-n", "auto", "--maxprocesses", "64")
    where = (*CUDA, "--workers-per-gpu", str(workers), "--report", str(folder))
    code = start("pytest", *suites, *spread, *where, *args)
    timed = not args and code in LEFT_RECORDS and code != PYTEST_INTERRUPTED
    codes = {"pytest": code, "pytest of latencies": latency(report, ()) if timed else 0}
    return _ended("gpu", codes | _judge(folder, code, args))


def latency(report: Path, args: Sequence[str]) -> int:
    """Time metadata and attention on CUDA by one process; pytest's exit code.

    Args:
        report: folder of ``latency.json``.
        args: handed to pytest.
    """
    where = f"--latency-json={report.absolute() / 'latency.json'}"
    return start("pytest", *LATENCY, *CUDA, where, *args)


def _judge(folder: Path, code: int, args: Sequence[str]) -> dict[str, int]:
    """Exit codes of the report and the gate, none where pytest's tells that nothing ran.

    The gate asks for a whole run, so a shard is reported alone and gated with the others.
    """
    if code not in LEFT_RECORDS:
        return {}
    records = str(folder / "records.jsonl")
    reported = {"the report": start("ci.report", records, "--out", str(folder / "index.html"))}
    is_shard = any(word.partition("=")[0] == "--shard" for word in args)
    return reported if is_shard else reported | {"the gate": start("ci.gate", records)}


def _ended(verb: str, codes: dict[str, int]) -> int:
    """The first exit code that is not zero, named where the last word was a green gate's.

    The gate knows differential trials alone, and is green beside another test that failed.
    """
    name, code = next(((name, code) for name, code in codes.items() if code), ("", 0))
    if code and codes.get("the gate") == 0:
        print(f"specgate {verb}: {name} ended with {code}", file=sys.stderr)
    return code


def version() -> str:
    """The project's, from the checkout that this is."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return str(tomllib.load(file)["project"]["version"])


def parser() -> argparse.ArgumentParser:
    """The command line: one subcommand a verb; what they do not know goes to pytest."""
    made = CommandLine(prog="specgate", description=__doc__)
    made.add_argument("--version", action="version", version=f"specgate {version()}")
    verbs = made.add_subparsers(dest="verb", required=True, metavar="VERB", help="one of:")
    runs = _verb(verbs, "run", "run every case on this machine, report and gate")
    gpus = _verb(verbs, "gpu", "run every suite that takes a device on real kernels")
    sharing = "processes that share a GPU"
    gpus.add_argument(
        "--workers-per-gpu", type=count, default=WORKERS_PER_GPU, metavar="K", help=sharing
    )
    goldens = _verb(verbs, "golden", "verify, add or rewrite the recorded answers")
    goldens.add_argument(
        "mode", choices=GOLDEN_MODES, help="compare, record what is missing, or record all anew"
    )
    times = _verb(verbs, "latency", "time metadata and attention on the GPU")
    for verb in (runs, gpus, times):
        folder = "folder of what is written"
        verb.add_argument("--report", type=Path, default=Path("report"), metavar="DIR", help=folder)
    for name, (_, help_text) in HANDED_ON.items():
        verbs.add_parser(name, help=help_text, add_help=False)
    return made


def _verb(verbs: Verbs, name: str, told: str) -> argparse.ArgumentParser:
    about = f"{told[0].upper()}{told[1:]}. What is not listed here goes to pytest."
    return verbs.add_parser(name, help=told, description=about)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the verb; 2 for a command line that makes no sense, 130 where it is interrupted.

    Args:
        argv: the command line without the program's name; the process's own if None.
    """
    commands = parser()
    options, args = commands.parse_known_args(argv)
    if args[:1] == ["--"]:
        del args[0]
    try:
        return _run_verb(options, args)
    except KeyboardInterrupt:
        print(f"specgate {options.verb}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _run_verb(options: argparse.Namespace, args: Sequence[str]) -> int:
    if options.verb in HANDED_ON:
        become(HANDED_ON[options.verb][0], *args)
    if options.verb == "run":
        return run(options.report, args)
    if options.verb == "gpu":
        return gpu(options.report, options.workers_per_gpu, args)
    if options.verb == "golden":
        return start("pytest", *GOLDENS, "-n0", f"--golden={options.mode}", *args)
    return latency(options.report, args)


if __name__ == "__main__":
    sys.exit(main())
