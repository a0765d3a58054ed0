"""The engine with a shipped pair in a process of its own, behind sglang's HTTP interface."""
