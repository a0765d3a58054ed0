"""Trials, blocks and arms: what a benchmark measures, and what its records say."""
