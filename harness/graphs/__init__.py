"""Capture and replay, through the backend interface only."""
