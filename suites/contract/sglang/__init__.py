"""Claims: the adapter of released backends, and what stands in for packages that they import."""
