"""Claims: kernels and their limits."""
