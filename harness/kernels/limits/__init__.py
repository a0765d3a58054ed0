"""Capability tables asked of the kernels themselves, and the random calls that ask them."""
