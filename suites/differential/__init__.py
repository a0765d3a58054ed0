"""Claims: every subject agrees with the float64 oracle on every case."""
