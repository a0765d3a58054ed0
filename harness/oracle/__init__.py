"""The oracle: dense float64 from token ids, weights and histories; imports torch alone.

``VERSION`` is part of the identity of every golden; raise it when an answer may change.
"""

from __future__ import annotations

from harness.oracle.attention import (
    attend,
    low_precision_attend,
    quantize,
    quantize_dequantize,
)
from harness.oracle.decoder import Decoder, Draft
from harness.oracle.following import FollowedText, follow
from harness.oracle.generation import OracleGeneration, greedy, relative_margins, speculate
from harness.oracle.rotary import rotate

VERSION = 1

__all__ = [
    "VERSION",
    "Decoder",
    "Draft",
    "FollowedText",
    "OracleGeneration",
    "attend",
    "follow",
    "greedy",
    "low_precision_attend",
    "quantize",
    "quantize_dequantize",
    "relative_margins",
    "rotate",
    "speculate",
]
