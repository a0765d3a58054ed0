"""What every other part speaks in: cases, capabilities, records, tolerances."""
