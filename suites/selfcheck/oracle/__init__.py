"""Claims: the float64 oracle and the budgets."""
