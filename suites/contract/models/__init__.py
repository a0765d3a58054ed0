"""Claims: models and checkpoints."""
