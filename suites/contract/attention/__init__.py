"""Claims: attention backends."""
