"""The adapter of released backends, without a release."""
