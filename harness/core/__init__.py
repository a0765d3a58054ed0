"""Shared vocabulary: cases, capabilities, records, tolerances."""
