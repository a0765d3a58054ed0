"""``specgate cluster [LANES]``: run lanes on every machine of a Ray cluster, to one verdict.

Without an address Ray is started on this machine's devices, and stopped again. With one, each node
runs what its kind is for: it is started with the resources that "python -m ci.cluster.machine"
prints there.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from ci import gate, report
from ci.cluster import lanes
from ci.cluster.driver import Cluster, Drive
from ci.cluster.machine import CPU
from ci.cluster.store import RECORDS, Store, held
from ci.cluster.work import LaneWork
from ci.gate import named_kinds
from ci.nightly.trials import planned
from harness.core.argument_types import CommandLine, above_zero, count
from harness.core.paths import ROOT
from harness.core.signals import INTERRUPTED, heard_as_interrupt
from harness.errors import UsageError, missing

if TYPE_CHECKING:
    import argparse

    from ci.cluster.ray_cluster import RayCluster

WAIT_S = 60.0
LONGEST_LIST = 20


def parser() -> CommandLine:
    """The command line; what follows "--" goes to pytest, or to the lane's command."""
    made = CommandLine(prog="specgate cluster", description=__doc__)
    add = made.add_argument
    known = f"of {', '.join(lanes.rows())}"
    add("lanes", nargs="*", default=["run"], metavar="LANE", help=known)
    where = 'a cluster\'s, such as HOST:6379, or "auto" on one of its nodes; none starts Ray here'
    add("--address", metavar="ADDRESS", help=where)
    kinds = "what must be verified, such as sm90,sm100; otherwise every kind that is there"
    add("--kinds", type=named_kinds, default=[], metavar="KINDS", help=kinds)
    wait = "seconds to wait for a node of a kind that has none"
    add("--wait", type=above_zero, default=WAIT_S, metavar="S", help=wait)
    add("--resume", action="store_true", help="go on with the run that --report has")
    folder = "gets a folder a lane: records.jsonl, index.html, what commands wrote"
    add("--report", type=Path, default=Path("report/cluster"), metavar="DIR", help=folder)
    tree = "where each node has this tree already, in an image; otherwise it travels"
    add("--tree", type=Path, metavar="PATH", help=tree)
    sharing = "batches that share a GPU"
    add("--workers-per-gpu", type=count, default=4, metavar="K", help=sharing)
    declared = "a dry run: kinds are what nodes declare, and the CPU stands in for every GPU"
    add("--declared", action="store_true", help=declared)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 green, 1 red, 2 for what cannot be run, 130 where it is interrupted."""
    given = [*(sys.argv[1:] if argv is None else argv)]
    at = given.index("--") if "--" in given else len(given)
    options = parser().parse_args(given[:at])
    options.lanes = list(dict.fromkeys(options.lanes))
    try:
        for lane in options.lanes:
            lanes.kinds_of(lane, ())
        try:
            from ci.cluster.ray_cluster import RayCluster
        except ModuleNotFoundError as error:
            raise missing(error, "cluster") from error
        began = time.time()
        with ExitStack() as stack:
            for lane in options.lanes:
                stack.enter_context(held(options.report / lane))
            cluster = stack.enter_context(RayCluster(options.address, options.tree))
            stack.enter_context(heard_as_interrupt(signal.SIGTERM))  # of which Ray prints its stack
            kinds = options.kinds or kinds_there(cluster, options.wait)
            return run(cluster, wanted(kinds, options, given[at + 1 :]), options, began)
    except UsageError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        told = "interrupted; --resume goes on with what is recorded"
        print(f"cluster: {told}", file=sys.stderr)
        return INTERRUPTED


def run(
    cluster: Cluster, works: Sequence[LaneWork], options: argparse.Namespace, began: float
) -> int:
    """Run the lanes, then report and judge them.

    Args:
        cluster: joined or started.
        works: each lane on each of its kinds.
        options: of the command line.
        began: when the command did, seconds since the epoch.

    Raises:
        UsageError: a lane's folder cannot be used.
    """
    stores: dict[str, Store] = {}
    for lane in options.lanes:
        own = [one for one in works if one.lane == lane]
        stores[lane] = Store(options.report / lane, own, resume=options.resume, source=source())
    drive = Drive(
        works,
        cluster,
        recorded=lambda one: stores[one.lane].recorded(one),
        kept=lambda one: stores[one.lane].kept(one),
        sink=lambda one, ended: stores[one.lane].add(one, ended),
        tell=say,
        wait_s=options.wait,
    )
    try:
        drive.go()
    finally:
        for one in drive.progress:
            say(str(one))
    if drive.began is not None:
        first, all_s = drive.began - began, time.time() - began
        say(f"first unit {first:.1f} s after the command, all after {all_s:.1f} s")
    for one in drive.progress:
        tell_unverified(one.work) if one.given_up else None
    red = {one.work.lane: 1 for one in drive.progress if one.given_up}
    for lane in options.lanes:
        if code := judge(stores[lane], [one for one in works if one.lane == lane]):
            red[lane] = code
    if red:
        say(f"red: {', '.join(red)}")
    return max(red.values(), default=0)


def wanted(
    kinds: Sequence[str], options: argparse.Namespace, args: Sequence[str]
) -> list[LaneWork]:
    """Each lane on each kind that it is for.

    Args:
        kinds: that are asked for, or there.
        options: of the command line.
        args: handed on.

    Raises:
        UsageError: there is none for one of the lanes.
    """
    made = []
    for lane in options.lanes:
        own = lanes.kinds_of(lane, kinds)
        if not own:
            takes = lanes.rows()[lane]["kinds"]
            raise UsageError(
                f"lane {lane} is for {takes} kinds, and of these there is "
                f"{', '.join(kinds) or 'none'}; nodes declare them by python -m ci.cluster.machine"
            )
        made += [
            lanes.work(
                lane,
                kind,
                args,
                is_declared=options.declared,
                per_gpu=options.workers_per_gpu,
            )
            for kind in own
        ]
    return made


def kinds_there(cluster: RayCluster, wait_s: float) -> list[str]:
    """Every kind that a node declares; the first may be waited for."""
    deadline = cluster.now() + wait_s
    while True:
        found = {name for told in cluster.nodes() for name in told.resources if is_kind(name)}
        if found or cluster.now() >= deadline:
            return sorted(found)
        time.sleep(1.0)


def is_kind(resource: str) -> bool:
    """Whether a resource of Ray is one of our kinds."""
    return resource == CPU or (resource.startswith("sm") and resource[2:].isdecimal())


def tell_unverified(work: LaneWork) -> None:
    """How much of a kind's plan nobody ran."""
    if work.is_of_tests and work.has_gpu:
        major, minor = work.kind[2:-1], work.kind[-1:]
        trials = [one for one in planned((int(major), int(minor))) if not one.refused]
        say(f"{work}: {len(trials)} differential trials that its kernels run stay unverified")


def judge(store: Store, works: Sequence[LaneWork]) -> int:
    """Report and gate a lane's records; 1 also where a unit without a record failed.

    Failures are told last: the gate knows differential trials alone, and may be green beside them.
    """
    codes = [1 if store.failures else 0]
    if works[0].is_of_tests:
        records, page = str(store.folder / RECORDS), str(store.folder / "index.html")
        codes.append(report.main([records, "--out", page]))
        codes.append(gate.main([records, "--kinds", ",".join(one.kind for one in works)]))
    for failure in store.failures[:LONGEST_LIST]:
        say(f"failed: {failure}")
    if more := store.failures[LONGEST_LIST:]:
        say(f"failed: and {len(more)} more")
    return max(codes)


def source() -> tuple[str, bool]:
    """The commit of this checkout, and whether it is changed; empty and no without git."""
    said = [
        subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False
        ).stdout.strip()
        for words in (("rev-parse", "HEAD"), ("status", "--porcelain"))
    ]
    return said[0], bool(said[1])


def say(line: str) -> None:
    """Print at once."""
    print(f"cluster: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
