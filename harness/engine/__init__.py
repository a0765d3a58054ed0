"""A small speculative engine over the interface of attention backends."""
