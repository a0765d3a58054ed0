"""Gates: they read records and never run kernels."""
