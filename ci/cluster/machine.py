"""``python -m ci.cluster.machine``: what this machine offers, for ``ray start --resources``.

A kind is a resource: "cpu" has as many as there are cores, "sm90" as many as GPUs. "host" is what a
benchmark takes whole and everything else a trace of, so that the two never share a machine.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from ci.nightly.machine import installed_gpus
from harness.core.argument_types import CommandLine
from harness.errors import UsageError, rejected

HOST = "host"
SHARE_OF_HOST = 0.0001
"""The least that Ray counts: ten thousand batches may share a host."""
CPU = "cpu"


def resources_here() -> tuple[dict[str, float], int]:
    """Resources of this machine, and its GPUs.

    Raises:
        UsageError: the GPUs are of several kinds, which one node cannot tell apart.
    """
    found = installed_gpus()
    kinds = sorted({"sm{}{}".format(*sm) for _, sm in found})
    if len(kinds) > 1:
        raise UsageError(rejected("GPUs", ", ".join(kinds), "one kind of GPU to a node"))
    if kinds:
        return {kinds[0]: float(len(found)), HOST: 1.0}, len(found)
    return {CPU: float(len(os.sched_getaffinity(0))), HOST: 1.0}, 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 for a machine that cannot be a node."""
    parser = CommandLine(prog="python -m ci.cluster.machine", description=__doc__)
    parser.parse_args(argv)
    try:
        own, _ = resources_here()
    except UsageError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 2
    print(json.dumps(own))
    return 0


if __name__ == "__main__":
    sys.exit(main())
