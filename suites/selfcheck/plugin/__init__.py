"""Claims: the pytest plugin."""
