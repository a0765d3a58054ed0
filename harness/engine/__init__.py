"""A small speculative engine; it meets backends only through the interface."""
