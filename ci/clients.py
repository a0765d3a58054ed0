"""``python -m ci.clients``: make the environment in which released clients ask our server.

Their requirements differ from ours, so they do not share a lane's environment. Nothing is
resolved: ``clients.txt`` lists every distribution. A second call finds the environment as it is.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from harness.core.argument_types import CommandLine

REQUIREMENTS = Path(__file__).with_name("clients.txt")
CLIENTS_FOLDER = REQUIREMENTS.parents[1] / ".tox" / "clients"
STAMP = CLIENTS_FOLDER / "installed.txt"
"""Written last: what was installed, by which Python."""


def python() -> Path | None:
    """The environment's interpreter, None where it is absent, unfinished or of other pins."""
    complete = STAMP.is_file() and STAMP.read_text(encoding="utf-8") == _wanted()
    return _interpreter() if complete else None


def main(argv: Sequence[str] | None = None) -> int:
    """Make it unless it is there; pip's exit code."""
    CommandLine(prog="python -m ci.clients", description=__doc__).parse_args(argv)
    if python():
        return 0
    print(f"installing {REQUIREMENTS.name} into {CLIENTS_FOLDER}", flush=True)
    shutil.rmtree(CLIENTS_FOLDER, ignore_errors=True)
    venv.create(CLIENTS_FOLDER, with_pip=True)
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--retries", "1")
    command = (str(_interpreter()), *install, "--requirement", str(REQUIREMENTS))
    code = subprocess.run(command, check=False).returncode
    if code == 0:
        STAMP.write_text(_wanted(), encoding="utf-8")
    return code


def _interpreter() -> Path:
    return CLIENTS_FOLDER / "bin" / "python"


def _wanted() -> str:
    return f"{sys.version}\n{REQUIREMENTS.read_text(encoding='utf-8')}"


if __name__ == "__main__":
    sys.exit(main())
