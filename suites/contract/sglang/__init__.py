"""Claims: what stands in for packages that SGLang imports."""
