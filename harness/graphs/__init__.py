"""Capture and replay of graphs, through the backend interface only."""
