"""Paired blocks of measurements to a ruling with a stated error rate; no torch."""
