"""One case, from its row to its record."""
