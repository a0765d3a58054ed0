"""The cluster that Ray makes of machines; the one file that knows Ray, beside what tests it."""

from __future__ import annotations

import itertools
import os
import pickle
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import exceptions

from ci.cluster.machine import HOST, SHARE_OF_HOST, resources_here
from ci.cluster.work import Answer, LaneWork, Node, NodeLost, Refused, WorkerLost
from harness.core.paths import ROOT, python_path
from harness.errors import UsageError, first_line

LEFT_AT_HOME = [".git", ".tox", ".venv", "report", "*.egg-info", "__pycache__"]
LOCAL = "127.0.0.1"
LOOPBACK = "127."
NODES_ARE_KNOWN_S = 0.5
"""For so long what was last heard of the nodes is believed."""
PAYLOAD_IS_LOST = (
    exceptions.NodeDiedError,
    exceptions.ObjectLostError,
    exceptions.ObjectStoreFullError,
)
WORKER_IS_LOST = (
    exceptions.WorkerCrashedError,
    exceptions.OutOfMemoryError,
    exceptions.LocalRayletDiedError,
    exceptions.RayTaskError,
)


@dataclass(frozen=True)
class Told:
    """A node as Ray tells of it."""

    node: Node
    resources: Mapping[str, float]


def absent_or(payload: bytes) -> Callable[[], bytes]:
    """What a task does; a nested function travels by value, so a node without the tree runs it."""

    def answer() -> bytes:
        import pickle

        import ray

        name = ray.util.get_node_ip_address()
        here = ray.get_runtime_context().get_node_id()
        try:
            from ci.cluster import node, work
        except ModuleNotFoundError as error:
            return pickle.dumps(("absent", here, name, str(error)))
        lane, units = pickle.loads(payload)
        own = work.Node(id=here, name=name)
        return pickle.dumps(node.plan(lane, own) if units is None else node.run(lane, units, own))

    return answer


class RayCluster:
    """One connection to Ray.

    Args:
        address: of a cluster, "auto" for the one that this machine is a node of; None starts Ray on
            this machine's devices.
        tree: folder where each node has the sources already; None has them travel.

    Raises:
        UsageError: there is no cluster at the address.
    """

    def __init__(self, address: str | None, tree: Path | None) -> None:
        # A driver that waits for its first node must not be told of each try.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Workers on this machine have the packages of this process, wherever they are.
        path = python_path() if address is None else tree
        environment: dict[str, Any] = (
            {"working_dir": str(ROOT), "excludes": LEFT_AT_HOME}
            if path is None
            else {"env_vars": {"PYTHONPATH": str(path)}}
        )
        quiet = {"logging_level": "ERROR", "log_to_driver": False, "runtime_env": environment}
        try:
            if address is None:
                own, gpus = resources_here()
                ray.init(
                    address="local",
                    num_cpus=os.cpu_count(),
                    num_gpus=gpus,
                    resources=own,
                    include_dashboard=False,
                    _node_ip_address=LOCAL,
                    **quiet,
                )
            else:
                # Of a cluster on loopback Ray would look for a node at this machine's own address.
                host = address.rpartition(":")[0]
                local = {"_node_ip_address": host} if host.startswith(LOOPBACK) else {}
                ray.init(address=address, **local, **quiet)
        except (ConnectionError, ValueError, RuntimeError, exceptions.RayError) as error:
            raise UsageError(f"--address {address}: {first_line(error)}") from error
        self._refused: set[str] = set()
        self._tickets = itertools.count()
        self._running: dict[ray.ObjectRef[bytes], int] = {}
        self._nodes: list[Told] = []
        self._heard_at = -NODES_ARE_KNOWN_S

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave: the workers of this connection end with it, and free their GPUs.

        What runs is not cancelled before: where an answer crosses a cancellation, Ray 2.60 ends
        this process ("Tried to complete task that was not pending").
        """
        ray.shutdown()

    def nodes(self) -> list[Told]:
        """Nodes that are alive and not refused."""
        if self.now() - self._heard_at >= NODES_ARE_KNOWN_S:
            self._heard_at = self.now()
            self._nodes = [
                Told(Node(id=n["NodeID"], name=n["NodeManagerHostname"]), n["Resources"])
                for n in ray.nodes()
                if n["Alive"]
            ]
        return [told for told in self._nodes if told.node.id not in self._refused]

    def slots(self, work: LaneWork) -> int:
        """As ``driver.Cluster`` has it."""
        there = [told.resources for told in self.nodes() if HOST in told.resources]
        if work.is_alone:
            return sum(bool(one.get(work.kind)) for one in there)
        return sum(int(one.get(work.kind, 0.0) / work.share + 1e-6) for one in there)

    def submit(self, work: LaneWork, units: tuple[str, ...] | None) -> Hashable:
        """As ``driver.Cluster`` has it."""
        share = 1.0 if work.is_alone else work.share
        options: dict[str, Any] = {
            "num_cpus": 0,
            "max_retries": 0,
            "resources": {work.kind: share, HOST: 1.0 if work.is_alone else SHARE_OF_HOST},
        }
        if work.has_gpu and not work.is_declared:
            options["num_gpus"] = share
        if self._refused:
            options["label_selector"] = {
                "ray.io/node-id": f"!in({','.join(sorted(self._refused))})"
            }
        task = ray.remote(absent_or(pickle.dumps((work, units)))).options(**options)
        reference: ray.ObjectRef[bytes] = task.remote()
        ticket = self._running[reference] = next(self._tickets)
        return ticket

    def answers(self, within_s: float) -> list[tuple[Hashable, Answer]]:
        """As ``driver.Cluster`` has it.

        Raises:
            UsageError: the tree cannot travel.
        """
        if not self._running:
            time.sleep(within_s)
            return []
        running = [*self._running]
        if not ray.wait(running, num_returns=1, timeout=within_s)[0]:
            return []
        ready, _ = ray.wait(running, num_returns=len(running), timeout=0)
        return [(self._running.pop(reference), self._answer(reference)) for reference in ready]

    def refuse(self, node: Node) -> None:
        """As ``driver.Cluster`` has it."""
        self._refused.add(node.id)

    def withdraw(self, ticket: Hashable) -> None:
        """As ``driver.Cluster`` has it."""
        for reference in [one for one, own in self._running.items() if own == ticket]:
            del self._running[reference]
            ray.cancel(reference, force=True)

    def now(self) -> float:
        """As ``driver.Cluster`` has it."""
        return time.monotonic()

    def _answer(self, reference: ray.ObjectRef[bytes]) -> Answer:
        try:
            said = ray.get(reference)
        except exceptions.RuntimeEnvSetupError as error:
            raise UsageError(f"the tree cannot travel: {first_line(error)}") from error
        except PAYLOAD_IS_LOST as error:
            return NodeLost(reason=first_line(error))
        except WORKER_IS_LOST as error:
            return WorkerLost(reason=first_line(error))
        return answer_of(said)


def answer_of(said: bytes) -> Answer:
    """What a task returned."""
    found = pickle.loads(said)
    if isinstance(found, tuple):
        _, identity, name, reason = found
        return Refused(node=Node(id=identity, name=name), reasons=(f"no specgate: {reason}",))
    answer: Answer = found
    return answer
