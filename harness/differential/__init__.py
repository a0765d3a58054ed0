"""Differential trials: a subject on a case, compared with the oracle."""
