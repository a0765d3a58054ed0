"""Environment variables that switch the plugin of a server that is started."""

PHASES = "SPECGATE_PHASES"
"""1: the phases of its steps are timed."""
