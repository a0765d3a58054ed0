"""Obtained against expected; a comparison is a value, and only a test asserts on it."""

from __future__ import annotations

from harness.compare.numbers import Locate, compare
from harness.compare.outcome import Comparison
from harness.compare.sequences import compare_exact, compare_tokens

__all__ = ["Comparison", "Locate", "compare", "compare_exact", "compare_tokens"]
