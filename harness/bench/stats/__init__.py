"""Sequential statistics of paired blocks, with stated error rates; no torch."""
