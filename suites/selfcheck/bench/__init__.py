"""Claims: benchmarks and their statistics."""
