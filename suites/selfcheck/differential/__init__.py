"""Claims: comparison, invariants and diagnosis."""
