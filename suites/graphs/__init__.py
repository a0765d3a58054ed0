"""Claims: a replay equals the eager forward, whatever ran before it."""
