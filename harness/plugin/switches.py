"""Environment variables that switch the plugin of a server that is started; "1" is on."""

import os

GPU_DELAY = "SPECGATE_GPU_DELAY"
"""Its steps wait on the GPU for what ``/slow_down`` says."""
PHASES = "SPECGATE_PHASES"
"""The phases of its steps are timed."""


def is_on(switch: str) -> bool:
    """Whether this process has the switch on."""
    return os.environ.get(switch) == "1"
