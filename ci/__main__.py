"""``python3 -m ci LANE [ARGS]``: run one lane in environments of its own.

Needs Python alone. The first call makes a private environment with tox in ``.tox/tools``; tox
makes the lane's environment and hands ARGS to its command.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import textwrap
import venv
from pathlib import Path
from typing import Any

from ci.child import CHECKOUT, carried_out
from harness.core.signals import INTERRUPTED

TOOLS = CHECKOUT / ".tox" / "tools"
CONSTRAINTS = CHECKOUT / "ci" / "constraints.txt"


def lanes_toml() -> dict[str, Any]:
    """``lanes.toml``."""
    import tomllib  # new in 3.11: imported here, so that an older Python reaches the clear refusal

    with (CHECKOUT / "ci" / "lanes.toml").open("rb") as file:
        return tomllib.load(file)


def lanes() -> dict[str, str]:
    """Every lane and its description, in the order of ``lanes.toml``."""
    return {name: str(description) for name, description in lanes_toml()["lanes"].items()}


def lacks_gpu(lane: str) -> str | None:
    """Why a lane cannot run on this machine, None if it can."""
    if lane not in lanes_toml()["needs_gpu"] or has_gpu():
        return None
    return f"lane {lane} needs a CUDA device, and nvidia-smi lists no GPU here"


def version() -> str:
    """The project's."""
    import tomllib

    with (CHECKOUT / "pyproject.toml").open("rb") as file:
        return str(tomllib.load(file)["project"]["version"])


def menu() -> str:
    """The lanes, one per line."""
    known = lanes()
    width = max(map(len, known))
    return "\n".join(
        textwrap.fill(
            description,
            width=80,
            initial_indent=f"  {name:<{width}}  ",
            subsequent_indent=" " * (width + 4),
        )
        for name, description in known.items()
    )


def tool_environment() -> Path:
    """The Python of an environment that has the pinned tox, made when missing or outdated.

    The stamp is written last, so an interrupted installation is made anew.
    """
    python = TOOLS / "bin" / "python"
    stamp = TOOLS / "stamp"
    wanted = f"{sys.executable} {sys.version}\n{CONSTRAINTS.read_text(encoding='utf-8')}"
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
        print("ci: making the tool environment in .tox/tools", flush=True)
        shutil.rmtree(TOOLS, ignore_errors=True)
        venv.create(TOOLS, with_pip=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, "--constraint", str(CONSTRAINTS), "tox"], check=True)
        stamp.write_text(wanted, encoding="utf-8")
    return python


def has_gpu() -> bool:
    """Whether the NVIDIA driver lists a GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    listed = subprocess.run([tool, "-L"], capture_output=True, check=False)
    return listed.returncode == 0 and listed.stdout.startswith(b"GPU ")


def run_lane(lane: str, args: list[str]) -> int:
    """Exit code of the lane's command, 2 where it needs a GPU and there is none.

    Quiet tox, so that the lane's own summary is the last thing printed.
    """
    if reason := lacks_gpu(lane):
        print(f"ci: {reason}", file=sys.stderr)
        return 2
    try:
        python = tool_environment()
    except subprocess.CalledProcessError as error:
        cause = f"{error.cmd} ended with {error.returncode}"
        print(f"ci: no tool environment: {cause}", file=sys.stderr)
        return 1
    print(f"ci: lane {lane} (its environment is made on the first run)", flush=True)
    tox = [str(python), "-m", "tox", "run", "-qq", "--root", str(CHECKOUT), "-e", lane]
    handed_on = ["--", *args] if args else []
    stack = {"SPECGATE_STACK": "gpu"} if has_gpu() else {}
    return carried_out([*tox, *handed_on], stack | os.environ)


def main(argv: list[str]) -> int:
    """Exit code: the lane's, or 2 for a lane that does not exist.

    Args:
        argv: the lane and arguments of its command; a ``--`` between them is nobody's.
    """
    parser = argparse.ArgumentParser(
        prog="python3 -m ci",
        usage="python3 -m ci LANE [ARGS]",
        description="lanes:\n" + menu(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"specgate {version()}")
    parser.add_argument("lane", nargs="?", metavar="LANE", help="which lane to run")
    lane = parser.parse_args(argv[:1]).lane
    if lane is None:
        parser.print_help()
        return 0
    if lane not in lanes():
        print(f"ci: lane = {lane!r} is not accepted; accepted:\n{menu()}", file=sys.stderr)
        return 2
    args = argv[1:]
    return run_lane(lane, args[1:] if args[:1] == ["--"] else args)


if __name__ == "__main__":
    if sys.version_info < (3, 11):
        sys.exit("ci: Python 3.11 or newer is needed")
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("ci: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
