"""Probes of a kernel's capability table against the kernel itself."""
