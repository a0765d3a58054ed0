"""Benchmarks of servers: arms, trials and blocks, their records and their analysis."""
