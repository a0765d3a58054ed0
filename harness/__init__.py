"""Mechanism: a plain library that knows no test runner, no row and no suite."""
