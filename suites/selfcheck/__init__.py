"""Claims: the harness itself is right, judged by hand-worked numbers and planted faults."""
