"""Claims: metadata takes less than anyone's, and each optimization pays, in times of one run."""
