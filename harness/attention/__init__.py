"""The optimized attention backends, their baselines, and their metadata."""
