"""Target and draft models, read from checkpoints in Hugging Face layout."""
