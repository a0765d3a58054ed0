"""``PYTHON released_client.py [MODULE ARGS…]``: run a client of released sglang without its engine.

Without a module, runs are read from standard input, a JSON list of words a line, and answered by
``ENDED``: one process imports once what they share.

At their first import sglang's packages import torch, its kernels and much else that its clients do
not use. So the packages named here are there without their ``__init__``, and the modules named
here have nothing but the one name that a client imports from them.
"""

from __future__ import annotations

import json
import runpy
import sys
from importlib.util import find_spec
from types import ModuleType

PACKAGES = ("sglang", "sglang.srt.utils")
STUBS = {
    "sglang.srt.disaggregation.utils": {"FAKE_BOOTSTRAP_HOST": "2.2.2.2"},
    "datasets": {"load_dataset": None},
}
ENDED = "the run has ended"


def main(*words: str) -> None:
    """Run the module as ``python -m`` does, or those that are asked for."""
    for name in PACKAGES:
        found = find_spec(name)
        assert found is not None, f"{name} is not installed"
        bare = ModuleType(name)
        bare.__path__ = list(found.submodule_search_locations or ())
        bare.__spec__ = found
        sys.modules[name] = bare
    for name, contents in STUBS.items():
        stub = sys.modules[name] = ModuleType(name)
        stub.__dict__.update(contents)
    for run in [words] if words else map(json.loads, sys.stdin):
        sys.argv = [*run]
        runpy.run_module(run[0], run_name="__main__", alter_sys=True)
        if not words:
            print(ENDED, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
