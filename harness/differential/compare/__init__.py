"""Comparisons of obtained with expected quantities; each is a value and raises nothing."""

from __future__ import annotations

from harness.differential.compare.exact import compare_exact
from harness.differential.compare.numbers import Locate, compare
from harness.differential.compare.outcome import Comparison

__all__ = ["Comparison", "Locate", "compare", "compare_exact"]
