"""The optimized attention backends; each is handed its provider."""
