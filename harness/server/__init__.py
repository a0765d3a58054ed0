"""HTTP, with no knowledge of what is served."""
