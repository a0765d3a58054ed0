"""Claims: covering rows, feasible combinations and coverage."""
