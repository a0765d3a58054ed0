"""Claims: every part refuses what breaks its contract, and says why."""
